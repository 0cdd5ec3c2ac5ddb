"""What a step takes beside its graphs: the way into them, and out of the backward.

It is the same for all plans of a step, and most of a step of small operations.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fxremat import torch_compat

_RUNS = 5


@dataclass(frozen=True, slots=True)
class Around:
    """What leads into a step's graphs and out of them, whatever its plan.

    Attributes:
        device: of the step.
        inputs: dtype, shape, strides, … of each parameter, buffer and argument.
        saved: tensors that a forward hands to the backward that keeps everything.
        gradients: how many the backward returns.
    """

    device: torch.device
    inputs: tuple[object, ...]
    saved: int
    gradients: int


def overhead_s(around: Around, call: Callable[[], object]) -> float:
    """Seconds of a step beside its graphs, measured once a process; 0 on a GPU.

    Args:
        around: of the step.
        call: leads to the forward graph and returns before it runs.
    """
    if around.device.type != "cpu":
        return 0.0  # the host runs ahead
    if around not in _known_s:
        _known_s[around] = way_in_s(call) + way_out_s(
            saved=around.saved, gradients=around.gradients
        )
    return _known_s[around]


_known_s: dict[Around, float] = {}
"""Measured once, so that plans of one step for several budgets rest on the same figures."""


def way_in_s(call: Callable[[], object]) -> float:
    """Seconds of ``call``, which leads to the forward graph and no further: guards, wrappers."""
    return statistics.median(_seconds(call) for _ in range(_RUNS))


def way_out_s(*, saved: int, gradients: int) -> float:
    """Seconds of autograd around a step: tensors saved, a backward called, gradients handed over.

    Args:
        saved: tensors that the forward hands to the backward.
        gradients: leaves whose gradients it returns.
    """
    with torch_compat.real_execution(), torch.enable_grad():
        leaves = [torch.zeros(1, requires_grad=True) for _ in range(max(gradients, 1))]
        kept = [torch.zeros(1) for _ in range(saved)]

        def run() -> float:
            made = tuple(torch.zeros(1) for _ in leaves)
            for leaf in leaves:
                leaf.grad = None
            return _seconds(lambda: _through(leaves, kept, made))

        return statistics.median(run() for _ in range(_RUNS))


def _through(leaves: list[Tensor], kept: list[Tensor], made: tuple[Tensor, ...]) -> None:
    result: Tensor = _Around.apply(kept, made, *leaves)  # type: ignore[no-untyped-call]
    torch.autograd.backward(result)


class _Around(torch.autograd.Function):
    """A step without its graphs."""

    @staticmethod
    def forward(ctx: Any, kept: list[Tensor], made: tuple[Tensor, ...], *_leaves: Tensor) -> Tensor:
        ctx.save_for_backward(*kept)
        ctx.made = made
        return torch.zeros(())

    @staticmethod
    def backward(ctx: Any, *_gradients: Tensor) -> Any:
        _ = ctx.saved_tensors
        return (None, None, *ctx.made)


def _seconds(run: Callable[[], object]) -> float:
    begin = time.perf_counter()
    run()
    return time.perf_counter() - begin
