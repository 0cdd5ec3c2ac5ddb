"""The measured link."""

from __future__ import annotations

import gc
import os
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fxremat
from fxremat.costs.link import bandwidth
from fxremat.costs.link.bandwidth import PIECE_BYTES, PIECES, measure_link
from fxremat.errors import HostMemoryError
from fxremat.ir import Link, MeasuredLink
from fxremat.runtime.arena import Arena
from tests.moving import intercept_copies


def slow(seconds: float) -> Callable[[Callable[[], None]], None]:
    def copy_slowly(copy: Callable[[], None]) -> None:
        copy()
        time.sleep(seconds)

    return copy_slowly


def test_a_slow_link_is_measured_as_slow(tmp_path: Path):
    """10 ms a copy more, one at a time, and no work for the processor."""
    begin = time.perf_counter()
    with intercept_copies(slow(0.01)):
        link = measure_link("cpu", host_dir=tmp_path)
    taken = time.perf_counter() - begin
    piece = PIECE_BYTES["cpu"]
    # Bounds that hold on a busy machine, too.
    least, most = PIECES * piece / taken, piece / 0.01
    assert 0.01 <= link.offload_call_s < taken
    assert 0.01 <= link.prefetch_call_s < taken
    assert least < link.offload_bytes_per_s <= most
    assert least < link.prefetch_bytes_per_s <= most
    assert 2 * least < link.both_bytes_per_s <= most
    assert link.shared
    assert not list(tmp_path.iterdir())


def test_nothing_is_held_once_it_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Host memory of a plan comes next, and has the whole limit."""
    made: list[weakref.ref[Arena]] = []

    def noted(*args: Any, **kwargs: Any) -> Arena:
        arena = Arena(*args, **kwargs)
        made.append(weakref.ref(arena))
        return arena

    monkeypatch.setattr(bandwidth, "Arena", noted)
    gc.collect()
    gc.disable()
    try:
        measure_link("cpu", host_dir=tmp_path)
        assert [arena() for arena in made] == [None]
    finally:
        gc.enable()


def test_it_is_measured_once_for_each_folder_and_takes_little(tmp_path: Path):
    begin = time.perf_counter()
    link = measure_link(torch.device("cpu"), host_dir=tmp_path)
    taken = time.perf_counter() - begin
    assert taken < 4  # half a second where nothing else runs
    assert measure_link("cpu", host_dir=str(tmp_path)) is link
    other = tmp_path / "other"
    other.mkdir()
    assert measure_link("cpu", host_dir=other) is not link
    assert link.slowdown >= 1
    assert link.offload_bytes_per_s > 1e7
    assert link.prefetch_bytes_per_s > 1e7


@pytest.mark.parametrize("limit_bytes", [1 << 10, 9 << 10, 1 << 20, 48 << 20])
def test_no_more_host_memory_is_taken_than_may_be(
    limit_bytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    taken: list[int] = []
    real = os.posix_fallocate

    def allocate(descriptor: int, offset: int, length: int) -> None:
        taken.append(length)
        real(descriptor, offset, length)

    monkeypatch.setattr(os, "posix_fallocate", allocate)
    link = measure_link("cpu", host_dir=tmp_path, host_limit_bytes=limit_bytes)
    assert limit_bytes // 4 < sum(taken) <= limit_bytes
    assert link.offload_bytes_per_s > 0
    # A little more room is no other link.
    assert measure_link("cpu", host_dir=tmp_path, host_limit_bytes=limit_bytes + 1) is link


def test_a_plan_fits_where_measuring_as_usual_would_not(tmp_path: Path):
    torch.manual_seed(0)
    model = nn.Sequential(*[m for _ in range(6) for m in (nn.Linear(64, 64), nn.Tanh())])
    sample = torch.randn(512, 64)
    host = fxremat.HostMemory("only", limit=1 << 20, folder=tmp_path)
    call = fxremat.compile(model, sample, "min", loss=torch.sum, offload=host)
    assert 0 < call.plan.host_bytes <= 1 << 20


def test_a_folder_that_is_not_there(tmp_path: Path):
    with pytest.raises(HostMemoryError, match="nowhere"):
        measure_link("cpu", host_dir=tmp_path / "nowhere")


def test_the_link_that_is_planned_with():
    shared = MeasuredLink(4e9, 5e9, 4.4e9, 1.2, shared=True)
    assert shared.link() == Link(4e9, 5e9, shared=True)
    duplex = MeasuredLink(50e9, 55e9, 90e9, 1.02, shared=False)
    assert duplex.link() == Link(50e9, 55e9, shared=False)


@pytest.mark.parametrize("free_bytes", [1 << 20, 700 << 20, 80 << 30])
def test_measuring_takes_a_part_of_the_free_device_memory(
    free_bytes: int, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _device: (free_bytes, 80 << 30))
    piece_bytes, pieces = bandwidth.pieces_of(torch.device("cuda", 0), None)
    taken = 3 * piece_bytes * pieces  # those that go, those that come, and a product
    assert taken <= free_bytes / 8
    assert taken <= 3 * 256 << 20
    assert taken > min(free_bytes / 40, 500 << 20)


@pytest.mark.gpu
@pytest.mark.cuda
def test_on_cuda_both_directions_run_at_once():
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    link = measure_link("cuda")
    assert not link.shared
    assert link.offload_bytes_per_s > 1e9
    assert link.prefetch_bytes_per_s > 1e9
    assert link.both_bytes_per_s > 1.2 * min(link.offload_bytes_per_s, link.prefetch_bytes_per_s)
    assert 1 <= link.slowdown < 2
