"""What a loss outside the model needs, measured on made-up outputs."""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from fxremat import torch_compat
from fxremat.capture.unused_outputs import Unused
from fxremat.costs.measured.measure import device_of
from fxremat.costs.measured.workspaces import library_workspaces
from fxremat.errors import ArgumentError
from fxremat.planner.allocator.blocks import MOST_SMALL_BYTES
from fxremat.runtime.steps import SCALAR_BYTES


@dataclass(frozen=True, slots=True)
class LossNeeds:
    """Memory of a loss outside the model.

    Attributes:
        nbytes: maximum bytes that its forward and backward allocate in addition to its inputs.
        unused: outputs of the model that get no gradient from it; ``None``: all get one.
        small_bytes: the maximum of them in blocks of the allocator's small pool.
        outputs_bytes: bytes of the outputs with which it was measured.
        left_bytes: bytes held as long as the value of the loss, in addition to one number: some
            losses occupy the storage of a larger tensor.
    """

    nbytes: int
    unused: Unused | None
    small_bytes: int = 0
    outputs_bytes: int = 0
    left_bytes: int = 0

    def of(self, outputs: object) -> LossNeeds:
        """Return the memory of the same loss for other outputs, in proportion to their bytes."""
        found = _bytes_of(outputs)
        share = found / self.outputs_bytes if self.outputs_bytes else 1.0
        sizes = self.nbytes, self.small_bytes, self.left_bytes
        nbytes, small_bytes, left_bytes = (math.ceil(size * share) for size in sizes)
        return LossNeeds(nbytes, self.unused, small_bytes, found, left_bytes)


def _bytes_of(outputs: object) -> int:
    tensors = (t for t in pytree.tree_leaves(outputs) if isinstance(t, torch.Tensor))
    return sum(t.numel() * t.element_size() for t in tensors)


def needs_of_loss(
    loss: Callable[[Any], torch.Tensor],
    outputs: object,
    adopt: Callable[[Any], Any] | None = None,
) -> LossNeeds:
    """Run the forward and backward of ``loss`` on zeros, and return the memory that they take.

    If Triton tunes kernels meanwhile, a second run is measured, without the memory of tuning.

    Args:
        loss: a function of the model's outputs.
        outputs: outputs of the model as tensors without data.
        adopt: returns the fake copy of another tensor that ``loss`` reads, for a run on fake
            tensors, without the memory of workspaces; ``None``: the loss runs on the device.

    Raises:
        ArgumentError: ``loss`` returns no scalar with a gradient. What ``loss`` itself raises
            is not caught.
    """
    with torch_compat.tunings() as tuned:
        found = _measured(loss, outputs, adopt)
    if tuned and adopt is None:
        found = _measured(loss, outputs, adopt)
        torch.cuda.empty_cache()
    return found


def _measured(
    loss: Callable[[Any], torch.Tensor], outputs: object, adopt: Callable[[Any], Any] | None
) -> LossNeeds:
    """Return the memory of one run of ``loss``; see :func:`needs_of_loss`."""
    leaves, spec = pytree.tree_flatten(outputs)
    tensors = [t for t in leaves if isinstance(t, torch.Tensor)]
    made: dict[int, torch.Tensor] = {}

    def fill(index: int, value: object) -> object:
        if not isinstance(value, torch.Tensor):
            return value
        made[index] = torch.zeros(value.shape, dtype=value.dtype, device=value.device)
        return made[index].requires_grad_(value.is_floating_point() or value.is_complex())

    with contextlib.ExitStack() as stack:
        log: Any
        if adopt is None:
            device = tensors[0].device if tensors else device_of(nn.Module())
            library_workspaces(device)  # or a loss that multiplies would be charged with them
            devices = [device] if device.type == "cuda" else []
            stack.enter_context(torch.random.fork_rng(devices=devices))
            log = torch_compat.AllocationLog(device)
        else:
            stack.enter_context(torch_compat.without_launches())
            stack.enter_context(torch_compat.fake_mode_of(tensors))
            log = torch_compat.fake_log(adopt)
        filled = pytree.tree_unflatten([fill(i, leaf) for i, leaf in enumerate(leaves)], spec)
        with log, torch.enable_grad():
            value = _checked(loss, loss(filled))
            torch.autograd.backward(value)
        held = value.untyped_storage().nbytes()
    unused = tuple(i for i, t in made.items() if t.requires_grad and t.grad is None)
    found = LossNeeds(
        log.peak_bytes,
        Unused(unused, len(leaves)) if unused else None,
        outputs_bytes=_bytes_of(tensors),
        left_bytes=0 if any(value is t for t in made.values()) else max(0, held - SCALAR_BYTES),
    )
    if adopt is not None:
        return found
    small = (change for _mark, change in log.events if abs(change) <= MOST_SMALL_BYTES)
    return replace(found, small_bytes=max(0, *itertools.accumulate(small), 0))


def _checked(loss: object, result: object) -> torch.Tensor:
    """Return ``result`` of a loss if it is a real scalar with a gradient.

    Raises:
        ArgumentError: a backward cannot begin at ``result``.
    """
    if not isinstance(result, torch.Tensor):
        got = "None" if result is None else f"a {type(result).__name__}"
    elif result.numel() != 1:
        got = f"a tensor of shape {tuple(result.shape)}"
    elif not result.requires_grad:
        got = f"a scalar of {result.dtype} without a gradient"
    elif result.is_complex():
        got = f"a scalar of {result.dtype}"
    else:
        return result
    raise ArgumentError(
        f"loss= returned {got}, but must return a real scalar tensor that is computed from the "
        "model's outputs with a gradient, such as outputs.mean()",
        argument="loss",
        value=loss,
        code="FXR404",
    )
