"""On a GPU the host never waits within a step."""

from __future__ import annotations

import pytest
import torch

from benchmarks.devices import host_waits
from tests.cuda import (  # noqa: F401
    CUDA,
    ENTRIES,
    Mode,
    cases,
    compiled,
    needs_cuda,
    same_bits_each_time,
    step_of,
)

pytestmark = [*needs_cuda, pytest.mark.usefixtures("same_bits_each_time")]


@cases("gpt-auto", "resnet50-only")
def test_the_host_never_waits_in_a_step(name: str, mode: Mode):
    entry = ENTRIES[name]
    step = step_of(entry, compiled(entry, mode, "min"))
    for _ in range(2):  # libraries wait when they are loaded
        step()
    assert host_waits(step) == {}
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()


@pytest.mark.gpu
def test_waits_are_seen_where_there_are_any():
    x = torch.ones(1 << 20, device=CUDA)

    def step() -> None:
        assert x.sum().item() == 1 << 20

    step()
    assert sum(host_waits(step).values()) >= 1
