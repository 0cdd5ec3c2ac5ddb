"""The link between device and host memory."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Link:
    """What transfers cost. A transfer of ``n`` bytes takes ``n / bandwidth`` seconds.

    Attributes:
        offload_bytes_per_s: bandwidth from device to host (D2H), ``β`` of the papers.
        prefetch_bytes_per_s: bandwidth from host to device (H2D).
        shared: one transfer at a time, whatever its direction (assumption (A) of
            Beaumont et al. 2019); else one in each direction.
    """

    offload_bytes_per_s: float
    prefetch_bytes_per_s: float
    shared: bool = False


@dataclass(frozen=True, slots=True)
class MeasuredLink:
    """Bandwidths of a link, and what transfers cost those who compute.

    Attributes:
        offload_bytes_per_s: from device to host memory, alone.
        prefetch_bytes_per_s: from host memory to device, alone.
        both_bytes_per_s: both directions together, half the bytes each way.
        slowdown: time of computations with transfers under way over their time without,
            at least 1.
        shared: one transfer at a time, whatever its direction.
        offload_call_s: what the calls that start an offload and await it take of those who
            compute, however little is moved. On CUDA the host has that time.
        prefetch_call_s: the same of a prefetch.
    """

    offload_bytes_per_s: float
    prefetch_bytes_per_s: float
    both_bytes_per_s: float
    slowdown: float
    shared: bool
    offload_call_s: float = 0.0
    prefetch_call_s: float = 0.0

    def link(self) -> Link:
        """What the solvers plan with: each direction alone.

        A step offloads in its forward and prefetches in its backward, so that the two
        directions meet only around the turn.
        """
        return Link(self.offload_bytes_per_s, self.prefetch_bytes_per_s, self.shared)
