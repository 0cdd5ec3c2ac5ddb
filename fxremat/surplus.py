"""What a training loop needs beside the model's own step: optimizer state and the loss."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from fxremat.measure import device_of, peak_of
from fxremat.outputs import Unused
from fxremat.passes.storage import allocated_bytes


def optimizer_bytes(
    optimizer: torch.optim.Optimizer | type[torch.optim.Optimizer] | None, model: nn.Module
) -> int:
    """Bytes of the state that an optimizer keeps on the model's device.

    State that does not exist yet is found by one step of a copy of the optimizer on a few
    numbers: state of a parameter's shape scales with it, the rest does not.

    Raises:
        TypeError: the optimizer cannot take such a step.
    """
    if optimizer is None:
        return 0
    if isinstance(optimizer, type):
        make: Any = optimizer
        made: torch.optim.Optimizer = make([p for p in model.parameters() if p.requires_grad])
        return optimizer_bytes(made, model)
    total = 0
    for group in optimizer.param_groups:
        alike, fixed = _state_of(optimizer, group)
        for parameter in group["params"]:
            nbytes = int(alike * parameter.numel() * parameter.element_size())
            total += allocated_bytes(nbytes, parameter.device) + fixed
    return total


def _state_of(optimizer: torch.optim.Optimizer, group: dict[str, Any]) -> tuple[float, int]:
    """State in multiples of a parameter's bytes, and bytes that do not depend on its size."""
    size = 64
    probe = torch.zeros(size, requires_grad=True)
    probe.grad = torch.ones_like(probe)
    trial = copy.copy(optimizer)
    trial.state = defaultdict(dict)
    trial.param_groups = [{**group, "params": [probe]}]
    try:
        trial.step()
    except (RuntimeError, TypeError) as error:
        raise TypeError(
            f"the state of {type(optimizer).__name__} cannot be found by a trial step "
            f"({error}): give its bytes as reserve= instead of optimizer="
        ) from error
    tensors = [v for v in trial.state[probe].values() if isinstance(v, torch.Tensor)]
    alike = sum(t.nbytes for t in tensors if t.numel() == size)
    return alike / probe.nbytes, sum(t.nbytes for t in tensors if t.numel() != size)


@dataclass(frozen=True, slots=True)
class LossNeeds:
    """What a loss outside the model takes.

    Attributes:
        nbytes: most bytes that its forward and backward have allocated beside its inputs.
        unused: outputs of the model that get no gradient from it; ``None``: all get one.
    """

    nbytes: int
    unused: Unused | None


def needs_of_loss(loss: Callable[[Any], torch.Tensor], outputs: object) -> LossNeeds:
    """Run ``loss``, forward and backward, on made-up outputs.

    Args:
        loss: of the model's outputs.
        outputs: as empty shells; values are made up.
    """
    made: dict[int, torch.Tensor] = {}

    def fill(index: int, value: object) -> object:
        if not isinstance(value, torch.Tensor):
            return value
        made[index] = torch.zeros(value.shape, dtype=value.dtype, device=value.device)
        return made[index].requires_grad_(value.is_floating_point())

    leaves, spec = pytree.tree_flatten(outputs)
    values = pytree.tree_unflatten([fill(i, leaf) for i, leaf in enumerate(leaves)], spec)
    device = next(iter(made.values())).device if made else device_of(nn.Module())

    def run() -> None:
        with torch.enable_grad():
            torch.autograd.backward(loss(values))

    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        before = torch.cuda.memory_allocated(device) if device.type == "cuda" else 0
        nbytes = peak_of(run, device=device) - before
    unused = tuple(i for i, t in made.items() if t.requires_grad and t.grad is None)
    return LossNeeds(nbytes, Unused(unused, len(leaves)) if unused else None)
