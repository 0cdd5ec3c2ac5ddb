"""The runtime on two compute streams: random loops are free of races, and need every wait."""

from __future__ import annotations

import inspect
import pkgutil
from importlib import import_module
from typing import Any

import pytest
import torch

from fxremat import runtime
from fxremat.runtime import lease, streams
from fxremat.runtime.streams import StreamLease
from tests.runtime.stream_schedules import run_schedule
from tests.stream_waits import ORDERING, Wait, left_out, ordering_calls, waits

SEEDS = 10_000
QUICK = 300
PARTS = 8
MOST_SEEDS = 1_500
"""Within how many loops a wait that is missing shows; about 300 for the rarest one."""
WHERE_CUDA_FAILS = {"self.event.synchronize", "stream.synchronize"}
"""Waits in the place of those that cannot be had; tests/runtime/test_streams.py leaves them out."""
MEASURING = ("watch", "bandwidth", "workspaces")
"""What in the runtime waits to measure something, and orders no copy of a step."""


def check(seeds: range) -> None:
    for seed in seeds:
        device = run_schedule(seed)
        assert device.races == [], f"seed {seed}"
        assert device.wrong == [], f"seed {seed}"


def test_every_access_is_ordered():
    check(range(QUICK))


@pytest.mark.slow
@pytest.mark.parametrize("part", range(PARTS))
def test_every_access_is_ordered_in_many_loops(part: int):
    check(range(QUICK + part, SEEDS, PARTS))


@pytest.mark.parametrize("wait", [w for w in waits() if w.call not in WHERE_CUDA_FAILS], ids=str)
def test_without_any_one_wait_there_is_a_race(wait: Wait):
    """Told by the clocks alone, whatever order the work happened to be done in."""
    with left_out(wait):
        assert any(run_schedule(seed).races for seed in range(MOST_SEEDS))


def test_a_wait_on_another_stream_than_that_of_the_memory_is_none(
    monkeypatch: pytest.MonkeyPatch,
):
    """A step may be given up in a thread, or within a stream, that is not its own."""

    def abandon(of: StreamLease, token: Any) -> None:
        torch.cuda.current_stream(of.device).wait_event(token.event)

    monkeypatch.setattr(StreamLease, "abandon", abandon)
    assert any(run_schedule(seed).races for seed in range(MOST_SEEDS))


def test_no_wait_is_forgotten():
    """Every place that orders something is left out in turn, and nothing else orders copies."""
    assert len(waits()) == sum(map(ordering_calls, (streams, lease)))
    assert len(waits()) >= 20
    for found in pkgutil.iter_modules(runtime.__path__):
        if found.name not in {"streams", "lease", *MEASURING}:
            source = inspect.getsource(import_module(f"{runtime.__name__}.{found.name}"))
            assert not [name for name in ORDERING if f".{name}(" in source], found.name


def test_what_is_left_out_is_there_again_afterwards():
    wait = waits()[0]
    with left_out(wait):
        assert run_schedule(0).races
    assert not run_schedule(0).races
