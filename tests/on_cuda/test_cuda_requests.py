"""What a step asks of the allocator is what was planned, request by request."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from fxremat.planner.allocator import allocations
from fxremat.planner.allocator.allocations import Allocated, Requests
from fxremat.planner.allocator.allocator import AllocatorSettings
from fxremat.planner.allocator.blocks import LEAST_BLOCK_BYTES
from fxremat.planner.allocator.footprints import WORKSPACE
from tests.cuda import (  # noqa: F401
    ENTRIES,
    Share,
    compiled,
    needs_cuda,
    same_bits_each_time,
    step_of,
)

pytestmark = [*needs_cuda, pytest.mark.usefixtures("same_bits_each_time")]


def rounded(nbytes: int) -> int:
    return -(-nbytes // LEAST_BLOCK_BYTES) * LEAST_BLOCK_BYTES


def asked_for() -> list[int]:
    """Bytes of each request since the history began, rounded as all are."""
    traces: Any = torch.cuda.memory._snapshot()["device_traces"][0]
    sizes = (event["size"] for event in traces if event["action"] == "alloc")
    return [rounded(nbytes) for nbytes in sizes if nbytes > LEAST_BLOCK_BYTES]


def sizes_of(requests: Requests) -> Iterator[int]:
    """Bytes of each, but of those that a loss outside the model is taken to make."""
    calls = [*requests.calls]
    calls.insert(
        requests.loss_point_index, tuple(r for r in requests.loss_point if r[0] != WORKSPACE)
    )
    return (nbytes for call in (*calls, requests.end) for _, nbytes in call)


@pytest.mark.parametrize(
    ("name", "share"),
    [
        ("gpt", "min"),
        ("gpt", 1.0),
        ("resnet50", "min"),
        pytest.param("resnet50", 1.0, marks=pytest.mark.slow),
    ],
)
def test_a_step_asks_for_what_was_planned(name: str, share: Share, monkeypatch: pytest.MonkeyPatch):
    """But for single numbers, which a loop asks for, too."""
    replayed: list[tuple[Requests, Allocated]] = []
    replay = allocations.replay_requests

    def noted(requests: Requests, settings: AllocatorSettings) -> Allocated:
        replayed.append((requests, replay(requests, settings)))
        return replayed[-1][1]

    monkeypatch.setattr(allocations, "replay_requests", noted)
    entry = ENTRIES[name]
    trained = compiled(entry, False, share)
    step = step_of(entry, trained)
    step()
    step()
    trained.model.zero_grad(set_to_none=True)
    torch.cuda.memory._record_memory_history(context=None)
    try:
        step()
        found = asked_for()
    finally:
        torch.cuda.memory._record_memory_history(enabled=None)
    peak_bytes = trained.call.plan.predicted_peak_bytes
    # Several schedules may take as much at their peak.
    planned = [
        [rounded(nbytes) for nbytes in sizes if nbytes > LEAST_BLOCK_BYTES]
        for sizes in (sizes_of(r) for r, taken in replayed if taken.allocated_bytes == peak_bytes)
    ]
    assert found in planned
