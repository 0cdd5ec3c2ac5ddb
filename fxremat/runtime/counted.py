"""Peaks of steps that nobody watches, from the counters of CUDA's allocator."""

from __future__ import annotations

from collections.abc import Callable

import torch

from fxremat import torch_compat


class Count:
    """Measures the peak memory of a step with the allocator's counters, which are not reset for it.

    What other threads allocate during the step is included.
    """

    __slots__ = ("_device", "_most_bytes", "_others_bytes", "_state_bytes", "_state_bytes_before")

    def __init__(
        self,
        device: torch.device,
        others_bytes: int,
        most_bytes: int,
        state_bytes: Callable[[], int],
    ) -> None:
        self._device, self._others_bytes, self._most_bytes = device, others_bytes, most_bytes
        self._state_bytes, self._state_bytes_before = state_bytes, state_bytes()

    @staticmethod
    def begin(
        device: torch.device,
        step_bytes: Callable[[], int],
        state_bytes: Callable[[], int] = lambda: 0,
    ) -> Count | None:
        """Return a counter of the step that begins now; ``None`` if ``device`` counts nothing.

        Args:
            device: the device of the step.
            step_bytes: returns how many of the bytes that are allocated now belong to the step,
                including optimizer state that is counted before it exists.
            state_bytes: returns the bytes of existing optimizer state that ``step_bytes`` counts
                before it exists. What hooks make of it during the step is counted once.
        """
        counted = torch_compat.counted_bytes(device)
        if counted is None:
            return None
        now_bytes, most_bytes = counted
        return Count(device, now_bytes - step_bytes(), most_bytes, state_bytes)

    def peak_bytes(self) -> int | None:
        """Return the most bytes the step had allocated; ``None`` if an earlier peak was higher."""
        counted = torch_compat.counted_bytes(self._device)
        if counted is None or counted[1] <= self._most_bytes:
            return None
        made_bytes = max(0, self._state_bytes() - self._state_bytes_before)
        return counted[1] - self._others_bytes - made_bytes
