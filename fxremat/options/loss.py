"""The loss of a step: a function of the outputs, of outputs and a target, or the model's."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import nn
from torch.utils import _pytree as pytree

from fxremat import torch_compat
from fxremat.capture.sample import Sample
from fxremat.errors import ArgumentError, refuse
from fxremat.passes.joint.graph import allocated_bytes

LossFunction = Callable[..., torch.Tensor] | Literal["own"]
"""A function of the outputs, of the outputs and a target, or ``"own"``."""

LossOfOutputs = Callable[[Any], torch.Tensor]
"""A loss that was read, as a function of the outputs only."""


@dataclass(frozen=True, slots=True, eq=False)
class Loss:
    """The loss of a step, and its target.

    Attributes:
        function: a function that computes a scalar from the outputs, or from the outputs and
            ``target``, outside the model; or ``"own"`` if the model returns its loss.
        target: the second argument of a loss such as ``torch.nn.CrossEntropyLoss()``, called as
            ``function(model(x), target)``: a tensor for the sample's size, or a tuple or dict of
            tensors. It is counted as held throughout the step, with the size that it has here. For
            larger batches, pass a larger one or set ``reserve``.
        drop_unused: whether to return ``None`` in place of outputs that ``function`` does not use,
            such as logits that are returned with a loss. Callers cannot hold them, so they are
            counted only as long as the step itself needs them. If a model with ``"own"`` returns
            logits and they are not dropped, up to three times their bytes are set aside: for their
            gradient, and for a loss that might use them.

    Raises:
        ArgumentError: ``function`` has another type, requires a ``target`` that is missing, or
            does not take the given one.
    """

    function: LossFunction
    target: Any = None
    drop_unused: bool = False

    def __post_init__(self) -> None:
        drop_unused: object = self.drop_unused
        if not isinstance(drop_unused, (bool, np.bool_)):
            refuse("drop_unused", drop_unused, "True or False")
        object.__setattr__(self, "drop_unused", bool(drop_unused))
        function: object = self.function
        if isinstance(function, str) and function == "own":
            if self.target is not None:
                raise ArgumentError(
                    "a target is given, but the loss is 'own', which the model computes from the "
                    "sample. Omit the target, or pass a loss function",
                    argument="target",
                    value=self.target,
                    code="FXR403",
                )
            return
        if not callable(function):
            must_be = (
                "a function of the model's outputs, a fxremat.Loss with a function and a target, "
                "'own' if the model returns its loss, or None"
            )
            refuse("loss", function, must_be)
        _check_target(function, self.target)

    @property
    def of_outputs(self) -> LossOfOutputs:
        """The loss as a function of the outputs only."""
        if self.function == "own":
            return own_loss
        return self.function if self.target is None else Compared(self.function, self.target)


@dataclass(frozen=True, slots=True)
class Compared:
    """A loss that compares outputs with a target.

    Attributes:
        criterion: the function of outputs and target.
        target: a tensor, or a tuple or dict of tensors, as the loop passes it.
    """

    criterion: Callable[..., torch.Tensor]
    target: Any

    def __call__(self, outputs: Any) -> torch.Tensor:
        """Return the loss of ``outputs``."""
        return self.criterion(outputs, self.target)

    def map(self, change: Callable[[Any], Any]) -> Compared:
        """Return this loss with each leaf of its target replaced by the result of ``change``."""
        return Compared(self.criterion, pytree.tree_map(change, self.target))


def own_loss(outputs: Any) -> torch.Tensor:
    """Return the loss that a model returns as ``.loss``, ``["loss"]``, first or only output.

    Raises:
        ArgumentError: the outputs contain no such tensor of one number.
    """
    loss = returned_loss(outputs)
    if loss is None:
        raise ArgumentError(
            f"loss='own', but the model returned a {type(outputs).__name__} without a loss: "
            "it must return a tensor of one number, as .loss or ['loss'], as the first of a tuple, "
            "or as its only output. Add the inputs of the loss, such as labels, to the sample, or "
            "pass a function as loss=",
            argument="loss",
            value="own",
            code="FXR402",
        )
    return loss


def returned_loss(outputs: Any) -> torch.Tensor | None:
    """Return the loss that :func:`own_loss` finds in outputs, or ``None`` if there is none."""
    if isinstance(outputs, Mapping):
        loss = outputs.get("loss")
    elif isinstance(outputs, (tuple, list)) and not hasattr(outputs, "loss"):
        loss = outputs[0] if outputs else None
    else:
        loss = getattr(outputs, "loss", outputs)
    is_one = isinstance(loss, torch.Tensor) and loss.numel() == 1 and loss.is_floating_point()
    return loss if is_one else None


def _check_target(function: Callable[..., Any], target: object) -> None:
    """Raise ``ArgumentError`` if a loss takes a target and none is given, or the reverse."""
    takes_one, takes_two = _takes(function, 1), _takes(function, 2)
    if target is None and takes_two and not takes_one:
        raise ArgumentError(
            f"loss is {function!r}, which takes outputs and a target: pass both, as in "
            "loss=fxremat.Loss(criterion, target=y) if the loop calls criterion(model(x), y)",
            argument="loss",
            value=function,
            code="FXR403",
        )
    if target is not None and takes_one and not takes_two:
        raise ArgumentError(
            f"a target is given, but loss is {function!r}, which takes only the outputs: omit "
            "the target, or pass a loss of outputs and target",
            argument="target",
            value=target,
            code="FXR403",
        )


def _takes(function: Callable[..., Any], count: int) -> bool:
    """Return whether ``function`` takes ``count`` arguments; true if its signature is unknown."""
    called = function.forward if isinstance(function, nn.Module) else function
    try:
        inspect.signature(called).bind(*[None] * count)
    except TypeError:
        return False
    except ValueError:  # a function of C that has no signature
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
    """Return the bytes of each storage of a loss's target, without those of model and call.

    Args:
        loss: the loss of the step.
        model: the model whose outputs the loss reads.
        call: the arguments of the model.
        device: storages on other devices are not counted.
        step: device of the step, whose allocator determines the bytes; by default ``device``.
    """
    others = (*_tensors((call.args, call.kwargs)), *torch_compat.tensors_of_module(model))
    counted = {key for tensor in others for key in torch_compat.storages_of(tensor)}
    sizes: dict[object, int] = {}
    for tensor in _tensors(loss.target if isinstance(loss, Compared) else None):
        for key, nbytes in torch_compat.storages_of(tensor).items():
            if tensor.device == device and key not in counted:
                sizes[key] = allocated_bytes(nbytes, step or device)
    return tuple(sizes.values())


def _tensors(tree: Any) -> Iterator[torch.Tensor]:
    return (leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, torch.Tensor))
