"""Peaks that an allocator counts anyway: seen of steps that nobody watches, on CUDA."""

from __future__ import annotations

from collections.abc import Callable

import torch

from fxremat import torch_compat


class Count:
    """The peak of a step by the allocator's own counters, which are not reset for it.

    What other threads allocate meanwhile is counted with it.
    """

    __slots__ = ("_device", "_most_bytes", "_others_bytes")

    def __init__(self, device: torch.device, others_bytes: int, most_bytes: int) -> None:
        self._device, self._others_bytes, self._most_bytes = device, others_bytes, most_bytes

    @staticmethod
    def begin(device: torch.device, there_bytes: Callable[[], int]) -> Count | None:
        """Begin to count a step; ``None``: nothing is counted on its device.

        Of what is allocated now, ``there_bytes`` are counted as the step's.
        """
        counted = torch_compat.counted_bytes(device)
        if counted is None:
            return None
        now_bytes, most_bytes = counted
        return Count(device, now_bytes - there_bytes(), most_bytes)

    def peak_bytes(self) -> int | None:
        """Most that the step has taken; ``None``: no more than was there before it already."""
        counted = torch_compat.counted_bytes(self._device)
        if counted is None or counted[1] <= self._most_bytes:
            return None
        return counted[1] - self._others_bytes
