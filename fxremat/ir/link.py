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

    @staticmethod
    def symmetric(bytes_per_s: float, *, shared: bool = False) -> Link:
        """The same bandwidth in both directions."""
        return Link(bytes_per_s, bytes_per_s, shared)
