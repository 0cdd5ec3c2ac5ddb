"""Gradients and optimizer state that live in host memory between their uses."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TrainingState:
    """What of gradients and optimizer state lives in host memory, and what that costs.

    Attributes:
        state_bytes: bytes of optimizer state in host memory.
        gradient_bytes: bytes of gradients in host memory.
        step_bytes: bytes that the optimizers' steps have on the device, at least, in addition to
            what is held between steps.
        optimizer_s: predicted seconds of the optimizers' steps, with their transfers.
        backward_s: predicted seconds that the transfers of gradients add to the backward.
        added_s: predicted seconds that all of these transfers add to a training step.
    """

    state_bytes: int
    gradient_bytes: int
    step_bytes: int
    optimizer_s: float
    backward_s: float
    added_s: float
