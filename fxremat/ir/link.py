"""The link between device and host memory."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Link:
    """Bandwidths of the link to host memory. ``n`` bytes take ``n / bandwidth`` seconds.

    Attributes:
        offload_bytes_per_s: bandwidth from device to host (D2H), ``β`` of the papers.
        prefetch_bytes_per_s: bandwidth from host to device (H2D).
        shared: whether the link carries one transfer at a time, in either direction (assumption (A)
            of Beaumont, Eyraud-Dubois, Shilova, 2019); else it carries one in each direction.
    """

    offload_bytes_per_s: float
    prefetch_bytes_per_s: float
    shared: bool = False


@dataclass(frozen=True, slots=True)
class MeasuredLink:
    """Measured bandwidths of the link to host memory, and what transfers cost the computing thread.

    Attributes:
        offload_bytes_per_s: bandwidth from device to host memory while nothing moves the other way.
        prefetch_bytes_per_s: bandwidth from host memory to device while nothing moves the other
            way.
        both_bytes_per_s: bandwidth of both directions together, half the bytes each way.
        slowdown: time of computations during transfers over their time without, at least 1.
        shared: whether the link carries one transfer at a time, in either direction.
        offload_call_s: seconds that the calls that start an offload and wait for it take of the
            computing thread, however few bytes are moved. 0 on CUDA, where the host has time to
            spare.
        prefetch_call_s: seconds that the calls that start a prefetch and wait for it take.
    """

    offload_bytes_per_s: float
    prefetch_bytes_per_s: float
    both_bytes_per_s: float
    slowdown: float
    shared: bool
    offload_call_s: float = 0.0
    prefetch_call_s: float = 0.0

    def link(self) -> Link:
        """Return the link that solvers plan with: bandwidths of single directions, and ``shared``.

        A step offloads in its forward and prefetches in its backward, so the two directions overlap
        only near the loss point.
        """
        return Link(self.offload_bytes_per_s, self.prefetch_bytes_per_s, self.shared)
