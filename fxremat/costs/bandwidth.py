"""What the link between device and host memory does, measured with the arena's memory."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor

from fxremat.ir import MeasuredLink
from fxremat.runtime import transfer
from fxremat.runtime.arena import Arena
from fxremat.runtime.memory import folder_of
from fxremat.runtime.slots import ALIGNMENT_BYTES
from fxremat.runtime.views import tensor_in

PIECE_BYTES = {"cpu": 4 << 20, "cuda": 32 << 20}
"""Size of a tensor that is moved: as that of an activation. Smaller where room is short."""

PIECES = 8
"""How many are moved, one after the other: together they are far beyond the caches."""

DEVICE_SHARE = 1 / 8
"""Of the free device memory: what is taken for measuring, at most."""

_SQUARE = {"cpu": 256, "cuda": 1024}
"""Rows of the matrices that are multiplied while transfers are under way."""

_CALLS = 32
"""Small transfers whose calls are timed."""

_ROUNDS, _ENOUGH_S = 5, 0.5
"""How often each is timed, at most: no further round begins after so many seconds."""

_BESIDE = 0.8
"""Computations that transfers run beside take this part of the transfers' time: a device that
is done copying would compute the rest undisturbed."""


LinkKey = tuple[torch.device, str, int, int]
"""Device, folder of the host memory, size and number of the pieces that are moved."""

_known: dict[LinkKey, MeasuredLink] = {}


def measure_link(
    device: torch.device | str,
    *,
    host_dir: str | os.PathLike[str] | None = None,
    host_limit_bytes: int | None = None,
) -> MeasuredLink:
    """Measure the link of ``device``; once in a process for each device and folder.

    Medians over a few rounds, all kinds in turn, in memory that has been used before, as
    that of a training step has. Less than a second on a CPU that has nothing else to do.

    Args:
        device: from where, and to where.
        host_dir: folder of the host memory's file, on a CPU.
        host_limit_bytes: most host memory to measure with, at least 1 KiB.

    Raises:
        HostMemoryError: the host memory cannot be had.
    """
    key = link_key(device, host_dir=host_dir, host_limit_bytes=host_limit_bytes)
    if key not in _known:
        _known[key] = _measure(*key)
    return _known[key]


def link_key(
    device: torch.device | str,
    *,
    host_dir: str | os.PathLike[str] | None = None,
    host_limit_bytes: int | None = None,
) -> LinkKey:
    """The key under which :func:`measure_link` keeps its figures."""
    device = torch.device(device)
    if device.type == "cuda":
        index: int | None = device.index
        device = torch.device("cuda", torch.cuda.current_device() if index is None else index)
    return device, folder_of(host_dir), *pieces_of(device, host_limit_bytes)


def know_link(key: LinkKey, link: MeasuredLink) -> None:
    """Use ``link`` as if it had been measured under ``key``."""
    _known[key] = link


def pieces_of(device: torch.device, host_limit_bytes: int | None) -> tuple[int, int]:
    """Size and number of the pieces that there is room for; as many go as come.

    Sizes are powers of two, so that little more or less room means no new measurement.
    """
    piece_bytes = PIECE_BYTES[device.type]
    room = PIECES * piece_bytes
    if host_limit_bytes is not None:
        room = min(room, host_limit_bytes // 2)
    if device.type == "cuda":
        free, _total = torch.cuda.mem_get_info(device)
        room = min(room, int(DEVICE_SHARE * free) // 3)
    while piece_bytes > ALIGNMENT_BYTES and PIECES * piece_bytes > room:
        piece_bytes //= 2
    return piece_bytes, max(1, min(PIECES, room // piece_bytes))


def _measure(device: torch.device, folder: str, piece_bytes: int, pieces: int) -> MeasuredLink:
    bench = _Bench(device, folder, piece_bytes, pieces)
    times: dict[str, list[float]] = {}
    begin_s = time.perf_counter()
    for done in range(_ROUNDS + 1):
        # Two rounds at least: the first touches pages and warms caches, and is left out.
        if done > 1 and time.perf_counter() - begin_s > _ENOUGH_S:
            break
        for run in bench.runs:
            times.setdefault(run.__name__, []).append(run())
    middle = {name: statistics.median(taken[1:]) for name, taken in times.items()}
    called = device.type == "cpu"
    return MeasuredLink(
        offload_bytes_per_s=bench.nbytes / middle["offload"],
        prefetch_bytes_per_s=bench.nbytes / middle["prefetch"],
        both_bytes_per_s=2 * bench.nbytes / middle["both"],
        slowdown=max(1.0, middle["beside"] / middle["compute"]),
        shared=device.type == "cpu",
        offload_call_s=middle["offload_calls"] if called else 0.0,
        prefetch_call_s=middle["prefetch_calls"] if called else 0.0,
    )


class _Bench:
    """Seconds of moving pieces of device memory, and of computing with and without that."""

    def __init__(self, device: torch.device, folder: str, piece_bytes: int, pieces: int) -> None:
        self.nbytes = pieces * piece_bytes
        self._device = device
        arena = Arena(2 * self.nbytes, device=device, host_dir=folder)
        self._host = arena.open()
        self._out = [self._ones(piece_bytes) for _ in range(pieces)]
        side = _SQUARE[device.type]
        self._square = torch.ones(side, side, device=device)  # no draw: the user's are counted
        self._product = torch.empty_like(self._square)
        self._long = torch.ones(piece_bytes // 4, device=device)
        count = min(_CALLS, self.nbytes // ALIGNMENT_BYTES)
        self._small = [self._ones(ALIGNMENT_BYTES) for _ in range(count)]
        self._repeats = 1
        self._offload(self._out, self.nbytes)
        self._release(self._out, self.nbytes)
        self._seconds(self._work)
        self.both()
        self._repeats = max(1, int(_BESIDE * self.both() / self._seconds(self._work)))

    @property
    def runs(self) -> tuple[Callable[[], float], ...]:
        """The measurements; not kept here, where they would hold the memory in a ring."""
        return (
            self.offload, self.prefetch, self.both, self.compute, self.beside,
            self.offload_calls, self.prefetch_calls,
        )  # fmt: skip

    def offload(self) -> float:
        return self._seconds(lambda: self._offload_all(self._out))

    def prefetch(self) -> float:
        return self._seconds(lambda: self._wait(self._prefetch(self._out, self.nbytes)))

    def both(self) -> float:
        def run() -> None:
            self._offload(self._out, 0)
            coming = self._prefetch(self._out, self.nbytes)
            self._release(self._out, 0)
            self._wait(coming)

        return self._seconds(run)

    def compute(self) -> float:
        return self._seconds(self._work)

    def beside(self) -> float:
        """Computing, with transfers both ways under way that take longer."""
        self._offload(self._out, 0)
        coming = self._prefetch(self._out, self.nbytes)
        taken_s = self._seconds(self._work)
        self._release(self._out, 0)
        self._wait(coming)
        self._end()
        return taken_s

    def offload_calls(self) -> float:
        """Seconds a transfer, of many small ones that the computing thread waits for in turn."""
        return self._seconds(lambda: self._offload_all(self._small)) / len(self._small)

    def prefetch_calls(self) -> float:
        def run() -> None:
            for fresh in self._prefetch(self._small, 0):
                transfer.wait(fresh)
                tensor_in(fresh, torch.uint8, (ALIGNMENT_BYTES,), (1,), 0)

        return self._seconds(run) / len(self._small)

    def _ones(self, nbytes: int) -> Tensor:
        return torch.ones(nbytes, dtype=torch.uint8, device=self._device)

    def _work(self) -> None:
        for _ in range(self._repeats):
            # One that computes, and one that reads and writes memory as transfers do.
            torch.mm(self._square, self._square, out=self._product)
            torch.add(self._long, 1.0, out=self._long)

    def _offload_all(self, pieces: list[Tensor]) -> None:
        self._offload(pieces, 0)
        self._release(pieces, 0)

    def _offload(self, pieces: list[Tensor], begin: int) -> None:
        for i, piece in enumerate(pieces):
            transfer.offload(piece, self._host, begin + i * piece.numel())

    def _release(self, pieces: list[Tensor], begin: int) -> None:
        for i, piece in enumerate(pieces):
            transfer.release(piece, self._host, begin + i * piece.numel())

    def _prefetch(self, pieces: list[Tensor], begin: int) -> list[Tensor]:
        return [
            transfer.prefetch(self._host, begin + i * p.numel(), p.numel(), self._device)
            for i, p in enumerate(pieces)
        ]

    def _wait(self, coming: list[Tensor]) -> None:
        for fresh in coming:
            transfer.wait(fresh)

    def _seconds(self, run: Callable[[], None]) -> float:
        begin_s = time.perf_counter()
        run()
        self._end()
        return time.perf_counter() - begin_s

    def _end(self) -> None:
        """On CUDA, wait for the current stream: it waits for the others where it must."""
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()
