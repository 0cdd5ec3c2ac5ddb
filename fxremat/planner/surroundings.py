"""Memory of a step that no stage allocates: what the caller holds."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

import torch
from torch import fx

from fxremat import torch_compat
from fxremat.costs.workspaces import library_workspaces
from fxremat.passes.joint.graph import JointGraph
from fxremat.passes.joint.sizes import Values, layouts_of, number_at
from fxremat.passes.joint.storage import StorageTable, allocated_bytes
from fxremat.units import Counted

LOSS_FACTOR = 3
"""Bytes set aside for a loss outside the model, in multiples of the outputs' bytes: a
cross entropy keeps its logarithms, their gradient and that of its input."""


SCALARS = 4
"""Numbers that a step holds beside all else: the loss, its gradient, and their like."""


@dataclass(frozen=True, slots=True)
class Surroundings:
    """Memory of a step that no block allocates.

    Attributes:
        given_bytes: held throughout: parameters, buffers, inputs, constants, gradients
            that are accumulated into, and what the caller reserves.
        turn_bytes: needed at the turn, by a loss outside the model.
        tangent_bytes: gradients of the outputs, held through the backward.
        end_bytes: needed once the backward has returned, beside all gradients.
        device: of the step.
        given_each_bytes: of ``given_bytes``, what is known one by one: each was asked of the
            device's allocator by itself.
        tangent_each_bytes: the same of ``tangent_bytes``.
    """

    given_bytes: int
    turn_bytes: int
    tangent_bytes: int
    end_bytes: int = 0
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    given_each_bytes: tuple[int, ...] = ()
    tangent_each_bytes: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Caller:
    """What the caller of the step needs beside it.

    Attributes:
        reserve_bytes: to be left alone.
        held_bytes: of each other tensor that is held throughout, such as optimizer state.
        accumulate: gradients are added to existing ones, even if there are none yet.
        loss_bytes: measured peak of the loss outside the model, None if unknown.
        resident: tensors that the step holds whether its graph reads them or not: the
            model's parameters and buffers, the arguments of the call.
        budget_on: what the budget is for.
    """

    reserve_bytes: int = 0
    held_bytes: tuple[int, ...] = ()
    accumulate: bool = False
    loss_bytes: int | None = None
    resident: tuple[torch.Tensor, ...] = ()
    budget_on: Counted = "allocated"


def surroundings_of(
    joint: JointGraph,
    real: Mapping[fx.Node, torch.Tensor],
    caller: Caller,
    *,
    values: Values | None = None,
) -> Surroundings:
    """Add up what is held around the graphs.

    Args:
        joint: the step, its storages as large as they are at the size that is meant.
        real: values of primals, where known.
        caller: what is needed beside the step.
        values: the size that is meant; that of the capture if None.
    """
    sizes = joint.sizes.named(joint.sizes.hints if values is None else values)
    table = joint.storages
    tangents = _each(table, table.of(joint.tangents))
    loss_bytes = caller.loss_bytes
    if loss_bytes is None:
        loss_bytes = LOSS_FACTOR * sum(tangents)
    given = (
        *_each(table, table.of(joint.given)),
        *_unread_bytes(joint, real, caller),
        *_existing_gradient_bytes(joint, real, caller, sizes),
        *caller.held_bytes,
        *filter(None, (library_workspaces(joint.device),)),
        *[allocated_bytes(8, joint.device)] * SCALARS,
    )
    return Surroundings(
        given_bytes=sum(given) + caller.reserve_bytes,
        turn_bytes=max(loss_bytes, sum(tangents)),
        tangent_bytes=sum(tangents),
        end_bytes=_largest_copied_gradient(joint, sizes),
        device=joint.device,
        given_each_bytes=given,
        tangent_each_bytes=tangents,
    )


def _each(table: StorageTable, ids: Iterable[int]) -> tuple[int, ...]:
    """Bytes of each of the storages ``ids``, in order of the graph."""
    return tuple(table.nbytes[i] for i in sorted(ids))


def _unread_bytes(
    joint: JointGraph, real: Mapping[fx.Node, torch.Tensor], caller: Caller
) -> Iterator[int]:
    """Of each resident tensor on the step's device that is none of its primals."""
    counted = {torch_compat.storage_key(t) for t in real.values()}
    for tensor in caller.resident:
        key = torch_compat.storage_key(tensor)
        if key not in counted and tensor.device == joint.device:
            counted.add(key)
            yield allocated_bytes(tensor.untyped_storage().nbytes(), tensor.device)


def _tensor_bytes(node: fx.Node, sizes: Mapping[str, int]) -> int:
    """Of the elements of a tensor, whatever its storage."""
    (layout,), value = layouts_of(node), node.meta["val"]
    elements = math.prod(number_at(n, sizes) for n in layout.shape)
    return allocated_bytes(elements * value.element_size(), value.device)


def _existing_gradient_bytes(
    joint: JointGraph,
    real: Mapping[fx.Node, torch.Tensor],
    caller: Caller,
    sizes: Mapping[str, int],
) -> Iterator[int]:
    """Of each gradient that is there before the step: a second set beside the new ones."""
    counted: set[int] = set()
    for primal, gradient in zip(joint.primals, joint.backward_outputs, strict=True):
        tensor = real.get(primal)
        exists = tensor is not None and tensor.is_leaf and tensor.grad is not None
        if tensor is not None:
            counted.add(id(tensor))
        if exists or (caller.accumulate and isinstance(gradient, fx.Node)):
            yield _tensor_bytes(primal, sizes)
    for tensor in caller.resident:
        if id(tensor) not in counted and tensor.is_leaf and tensor.grad is not None:
            yield allocated_bytes(tensor.grad.untyped_storage().nbytes(), tensor.device)


def _largest_copied_gradient(joint: JointGraph, sizes: Mapping[str, int]) -> int:
    """Autograd copies a gradient whose strides are not its parameter's, one at a time."""
    largest = 0
    of_node = joint.storages.of_node
    times = Counter(of_node[n] for n in joint.backward_outputs if isinstance(n, fx.Node))
    for primal, gradient in zip(joint.primals, joint.backward_outputs, strict=True):
        if isinstance(gradient, fx.Node):
            wanted, made = primal.meta["val"], gradient.meta["val"]
            # Autograd cannot take over what others share, nor a part of a storage.
            shared = times[of_node[gradient]] > 1
            part = made.untyped_storage().nbytes() > made.numel() * made.element_size()
            if wanted.stride() != made.stride() or shared or part:
                largest = max(largest, _tensor_bytes(gradient, sizes))
    return largest
