"""The loss of a step: a function of the outputs, of outputs and a target, or the model's own."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn
from torch.utils import _pytree as pytree

from fxremat import torch_compat
from fxremat.capture.sample import Sample
from fxremat.errors import ArgumentError
from fxremat.passes.joint.graph import allocated_bytes

Loss = Callable[..., torch.Tensor] | Literal["own"]
"""What ``loss=`` may be."""

LossOfOutputs = Callable[[Any], torch.Tensor]
"""What it is once it was read."""


@dataclass(frozen=True, slots=True)
class Compared:
    """A loss that compares outputs with a target.

    Attributes:
        criterion: of outputs and target.
        target: a tensor, or a tuple or dict of some, as the loop passes it.
    """

    criterion: Callable[..., torch.Tensor]
    target: Any

    def __call__(self, outputs: Any) -> torch.Tensor:
        """The loss of ``outputs``."""
        return self.criterion(outputs, self.target)

    def map(self, change: Callable[[Any], Any]) -> Compared:
        """This loss with each leaf of its target changed."""
        return Compared(self.criterion, pytree.tree_map(change, self.target))


def own_loss(outputs: Any) -> torch.Tensor:
    """The loss that a model returns: as ``.loss``, as ``["loss"]``, first of a tuple, or alone.

    Raises:
        ArgumentError: it returns none of one number.
    """
    found = returned_loss(outputs)
    if found is None:
        raise ArgumentError(
            f"loss='own', but the model returned a {type(outputs).__name__} in which no loss is: "
            "it must be a tensor of one number, as .loss or ['loss'], as the first of a tuple, or "
            "alone. Give the sample what it is computed from, such as labels, or a function as "
            "loss=",
            argument="loss",
            value="own",
        )
    return found


def returned_loss(outputs: Any) -> torch.Tensor | None:
    """The loss that a model returns, as :func:`own_loss` finds it; ``None``: there is none."""
    if isinstance(outputs, Mapping):
        found = outputs.get("loss")
    elif isinstance(outputs, (tuple, list)) and not hasattr(outputs, "loss"):
        found = outputs[0] if outputs else None
    else:
        found = getattr(outputs, "loss", outputs)
    is_one = isinstance(found, torch.Tensor) and found.numel() == 1 and found.is_floating_point()
    return found if is_one else None


def read_loss(loss: object, target: object) -> LossOfOutputs | None:
    """A loss as a function of the outputs alone.

    Raises:
        ArgumentError: ``loss`` is none, or it and ``target`` do not go together.
    """
    if loss is None and target is None:
        return None
    if loss is None or (target is not None and loss == "own"):
        raise ArgumentError(
            f"target is given, but loss is {loss!r}: target= is what loss= compares the outputs "
            "with, give both as in loss=torch.nn.CrossEntropyLoss(), target=y",
            argument="target",
            value=target,
        )
    if isinstance(loss, str) and loss == "own":
        return own_loss
    if not callable(loss):
        raise ArgumentError(
            f"loss is {loss!r}: must be a function of the model's outputs, one of outputs and "
            "target= as well, 'own' where the model returns its loss, or None",
            argument="loss",
            value=loss,
        )
    takes_one, takes_two = _takes(loss, 1), _takes(loss, 2)
    if target is None and takes_two and not takes_one:
        raise ArgumentError(
            f"loss is {loss!r}, which takes outputs and a target: give what it compares the "
            f"outputs with as target=, such as target=y where the loop calls it as "
            "criterion(model(x), y)",
            argument="loss",
            value=loss,
        )
    if target is not None and takes_one and not takes_two:
        raise ArgumentError(
            f"target is given, but loss is {loss!r}, which takes the outputs alone: leave target= "
            "out, or give a loss of outputs and target",
            argument="target",
            value=target,
        )
    return loss if target is None else Compared(loss, target)


def _takes(function: Callable[..., Any], count: int) -> bool:
    """Whether it may be called with so many arguments, as far as it tells."""
    called = function.forward if isinstance(function, nn.Module) else function
    try:
        inspect.signature(called).bind(*[None] * count)
    except TypeError:
        return False
    except ValueError:  # of C, and it does not tell
        return True
    return True


def target_bytes(
    loss: object,
    model: nn.Module,
    call: Sample,
    device: torch.device,
    *,
    step: torch.device | None = None,
) -> tuple[int, ...]:
    """Bytes of each storage of a loss's target that neither model nor call has.

    Args:
        loss: of the step.
        model: whose outputs it is of.
        call: of the model.
        device: only what is there counts.
        step: device of the step, whose allocator asks for each storage; ``device`` if None.
    """
    others = (*_tensors((call.args, call.kwargs)), *torch_compat.tensors_of_module(model))
    counted = {key for tensor in others for key in torch_compat.storages_of(tensor)}
    found: dict[object, int] = {}
    for tensor in _tensors(loss.target if isinstance(loss, Compared) else None):
        for key, nbytes in torch_compat.storages_of(tensor).items():
            if tensor.device == device and key not in counted:
                found[key] = allocated_bytes(nbytes, step or device)
    return tuple(found.values())


def _tensors(tree: Any) -> Iterator[torch.Tensor]:
    return (leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, torch.Tensor))
