"""Measures the link between device and host memory, with the arena's memory."""

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
"""Size in bytes of a tensor that is moved, like that of an activation. Less where memory is short.
"""

PIECES = 8
"""Number of tensors that are moved one after the other. Together they are far larger than caches.
"""

DEVICE_SHARE = 1 / 8
"""Largest share of the free device memory that is used for measuring."""

_SQUARE = {"cpu": 256, "cuda": 1024}
"""Rows of the square matrices that are multiplied during transfers."""

_CALLS = 32
"""Number of small transfers whose calls are timed."""

_ROUNDS, _ENOUGH_S = 5, 0.5
"""Largest number of rounds, and the seconds after which no further round begins."""

_COMPUTE_SHARE = 0.8
"""Computations that run during transfers are sized to take this share of the transfers' time, so
that the transfers do not end first."""


LinkKey = tuple[torch.device, str, int, int]
"""Device, folder of the host memory's file, and size in bytes and number of the pieces to move."""

_links: dict[LinkKey, MeasuredLink] = {}


def measure_link(
    device: torch.device | str,
    *,
    host_dir: str | os.PathLike[str] | None = None,
    host_limit_bytes: int | None = None,
) -> MeasuredLink:
    """Measure transfers between ``device`` and host memory: speed, and how they slow computations.

    This is done once per :func:`link_key` in a process. The figures are medians over a few rounds,
    in each of which every kind of transfer is run once. They use memory that was used before, like
    that of a training step. This takes less than a second on a CPU that has nothing else to do.

    Args:
        device: the device.
        host_dir: folder of the host memory's file, on a CPU.
        host_limit_bytes: largest amount of host memory to measure with, at least 1 KiB.

    Raises:
        HostMemoryError: the host memory is unavailable.
    """
    key = link_key(device, host_dir=host_dir, host_limit_bytes=host_limit_bytes)
    if key not in _links:
        _links[key] = _measure(*key)
    return _links[key]


def link_key(
    device: torch.device | str,
    *,
    host_dir: str | os.PathLike[str] | None = None,
    host_limit_bytes: int | None = None,
) -> LinkKey:
    """Return the key under which :func:`measure_link` caches its figures for these arguments."""
    device = torch.device(device)
    if device.type == "cuda":
        index: int | None = device.index
        device = torch.device("cuda", torch.cuda.current_device() if index is None else index)
    return device, folder_of(host_dir), *pieces_of(device, host_limit_bytes)


def record_link(key: LinkKey, link: MeasuredLink) -> None:
    """Let :func:`measure_link` return ``link`` for ``key``, as if it had been measured."""
    _links[key] = link


def pieces_of(device: torch.device, host_limit_bytes: int | None) -> tuple[int, int]:
    """Return the bytes and the number of the pieces to move, which fit into the memory available.

    As many pieces are offloaded as are prefetched. Sizes are powers of two, so that a slightly
    different amount of memory does not require a new measurement.
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
        # At least two rounds: the first touches pages and warms caches, and is not counted.
        if done > 1 and time.perf_counter() - begin_s > _ENOUGH_S:
            break
        for run in bench.runs:
            times.setdefault(run.__name__, []).append(run())
    median_s = {name: statistics.median(seconds[1:]) for name, seconds in times.items()}
    called = device.type == "cpu"
    return MeasuredLink(
        offload_bytes_per_s=bench.nbytes / median_s["offload"],
        prefetch_bytes_per_s=bench.nbytes / median_s["prefetch"],
        both_bytes_per_s=2 * bench.nbytes / median_s["both"],
        slowdown=max(1.0, median_s["compute_during_transfers"] / median_s["compute"]),
        shared=device.type == "cpu",
        offload_call_s=median_s["offload_calls"] if called else 0.0,
        prefetch_call_s=median_s["prefetch_calls"] if called else 0.0,
    )


class _Bench:
    """Times transfers of pieces of device memory, and computations with and without transfers."""

    def __init__(self, device: torch.device, folder: str, piece_bytes: int, pieces: int) -> None:
        self.nbytes = pieces * piece_bytes
        self._device = device
        arena = Arena(2 * self.nbytes, device=device, host_dir=folder)
        self._host = arena.open()
        self._out = [self._ones(piece_bytes) for _ in range(pieces)]
        side = _SQUARE[device.type]
        self._square = torch.ones(side, side, device=device)  # must not advance random generators
        self._product = torch.empty_like(self._square)
        self._long = torch.ones(piece_bytes // 4, device=device)
        count = min(_CALLS, self.nbytes // ALIGNMENT_BYTES)
        self._small = [self._ones(ALIGNMENT_BYTES) for _ in range(count)]
        self._repeats = 1
        self._offload(self._out, self.nbytes)
        self._release(self._out, self.nbytes)
        self._seconds(self._work)
        self.both()
        self._repeats = max(1, int(_COMPUTE_SHARE * self.both() / self._seconds(self._work)))

    @property
    def runs(self) -> tuple[Callable[[], float], ...]:
        """The methods that measure something; each runs it once and returns its seconds.

        They are not stored in an attribute, which would form a reference cycle that keeps memory
        alive.
        """
        return (
            self.offload, self.prefetch, self.both, self.compute, self.compute_during_transfers,
            self.offload_calls, self.prefetch_calls,
        )  # fmt: skip

    def offload(self) -> float:
        """Return the seconds of offloading all pieces."""
        return self._seconds(lambda: self._offload_all(self._out))

    def prefetch(self) -> float:
        """Return the seconds of prefetching all pieces."""
        return self._seconds(lambda: self._wait(self._prefetch(self._out, self.nbytes)))

    def both(self) -> float:
        """Return the seconds of offloading all pieces and prefetching as many at the same time."""

        def run() -> None:
            self._offload(self._out, 0)
            coming = self._prefetch(self._out, self.nbytes)
            self._release(self._out, 0)
            self._wait(coming)

        return self._seconds(run)

    def compute(self) -> float:
        """Return the seconds of computing without transfers."""
        return self._seconds(self._work)

    def compute_during_transfers(self) -> float:
        """Return the seconds of computing during longer transfers in both directions."""
        self._offload(self._out, 0)
        coming = self._prefetch(self._out, self.nbytes)
        seconds = self._seconds(self._work)
        self._release(self._out, 0)
        self._wait(coming)
        self._end()
        return seconds

    def offload_calls(self) -> float:
        """Return the seconds of one small offload and the wait for it, as a mean of many."""
        return self._seconds(lambda: self._offload_all(self._small)) / len(self._small)

    def prefetch_calls(self) -> float:
        """Return the seconds of one small prefetch and the wait for it, as a mean of many."""

        def run() -> None:
            for fresh in self._prefetch(self._small, 0):
                transfer.wait(fresh)
                tensor_in(fresh, torch.uint8, (ALIGNMENT_BYTES,), (1,), 0)

        return self._seconds(run) / len(self._small)

    def _ones(self, nbytes: int) -> Tensor:
        return torch.ones(nbytes, dtype=torch.uint8, device=self._device)

    def _work(self) -> None:
        for _ in range(self._repeats):
            # The first is bound by arithmetic, the second by memory, like transfers.
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
        """On CUDA, wait for the current stream, which itself waits for the streams of transfers."""
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()
