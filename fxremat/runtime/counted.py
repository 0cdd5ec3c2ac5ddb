"""Peaks that an allocator counts anyway: seen of steps that nobody watches, on CUDA."""

from __future__ import annotations

import torch

from fxremat import torch_compat


class Count:
    """Of what a step takes, from its begin on. Nothing of the user's is reset for it.

    Args:
        device: of the step.
        there_bytes: of what is there when it begins and counts as the step's; all else that is
            allocated then is others', and is taken to stay.
    """

    __slots__ = ("_before", "_device", "_others_bytes")

    def __init__(self, device: torch.device, there_bytes: int) -> None:
        counted = torch_compat.counted_bytes(device)
        self._device = device
        self._before = counted
        self._others_bytes = 0 if counted is None else counted[0] - there_bytes

    def peak_bytes(self) -> int | None:
        """What the step has taken at most; ``None``: less than the device has seen before it."""
        if self._before is None:
            return None
        counted = torch_compat.counted_bytes(self._device)
        if counted is None or counted[1] <= self._before[1]:
            return None
        return counted[1] - self._others_bytes
