"""Memory of a step that no stage allocates: what the caller holds."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import fx

from fxremat import torch_compat
from fxremat.costs.workspaces import library_workspaces
from fxremat.passes.joint.graph import JointGraph, StorageTable, allocated_bytes, is_tensor
from fxremat.passes.joint.sizes import Values, layouts_of, number_at
from fxremat.runtime.steps import SCALAR_BYTES
from fxremat.units import Counted

FULL_PRECISION_BYTES = 4
"""Of a number in a loss outside the model that nobody told of: it computes with no fewer."""

SCALARS = 5
"""Numbers that a step holds beside all else: the loss, its gradient, its token, the loss
before it, and their like."""


@dataclass(frozen=True, slots=True)
class ContextBytes:
    """Memory of a step that no block allocates.

    Attributes:
        given_bytes: held throughout: parameters, buffers, inputs, constants, gradients
            that are accumulated into, and what the caller reserves.
        turn_bytes: needed at the turn, by a loss outside the model.
        tangent_bytes: held when the backward begins, beyond what the forward has left: gradients
            of the outputs, less what is there in the forward only. What of it the backward does
            not release is held to the end.
        end_bytes: needed once the backward has returned, beside all gradients.
        device: of the step.
        given_each_bytes: of ``given_bytes``, what is known one by one: each was asked of the
            device's allocator by itself.
        tangent_each_bytes: the same of ``tangent_bytes``.
        added: primals whose gradient is added to one that exists, as soon as it is made.
        host_bytes: of host memory, for what travels; ``None``: as much as it takes.
        turn_small_bytes: of ``turn_bytes``, what is asked for in small blocks.
        released_bytes: of ``given_bytes``, what its holder releases between the forward and the
            loss, such as the previous step's outputs.
        cleared_bytes: of ``given_bytes``, gradients that are gone when the backward begins; they
            are taken off ``tangent_bytes``.
        tangents_stay: somebody else holds gradients of the outputs to the end of the backward.
    """

    given_bytes: int
    turn_bytes: int
    tangent_bytes: int
    end_bytes: int = 0
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    given_each_bytes: tuple[int, ...] = ()
    tangent_each_bytes: tuple[int, ...] = ()
    added: frozenset[int] = frozenset()
    host_bytes: int | None = None
    turn_small_bytes: int = 0
    released_bytes: int = 0
    cleared_bytes: int = 0
    tangents_stay: bool = False

    def releases(self, joint: JointGraph) -> frozenset[int]:
        """Storages of tangents that the backward of ``joint`` releases after their last reader."""
        return frozenset() if self.tangents_stay else joint.released

    @property
    def loss_point_bytes(self) -> int:
        """Bytes that the loss point takes beyond what is held when the forward begins."""
        return self.turn_bytes - self.released_bytes

    @property
    def backward_bytes(self) -> int:
        """Bytes that are held when the backward begins, beyond those when the forward begins."""
        return self.tangent_bytes - self.released_bytes


@dataclass(frozen=True, slots=True)
class Caller:
    """What the caller of the step needs beside it.

    Attributes:
        reserve_bytes: to be left alone.
        held_bytes: of each other tensor that is held throughout, such as optimizer state.
        accumulate: gradients are added to existing ones, even if there are none yet.
        in_flight: so many steps may wait for their backward.
        loss_bytes: measured peak of the loss outside the model, None if unknown.
        loss_left_bytes: of it, what is held as long as its value is.
        target_bytes: of each storage that the loss compares the outputs with, held throughout.
        outputs_bytes: gradients of the outputs for which loss and target are told: others take in
            proportion to theirs. ``None``: those of the graph that is planned first.
        loss_small_bytes: the most of it that was in small blocks.
        resident: tensors that the step holds whether its graph reads them or not: the
            model's parameters and buffers, the arguments of the call.
        budget_on: what the budget is for.
        library_bytes: of each workspace that libraries hold on the device; ``None``: they are
            asked.
    """

    reserve_bytes: int = 0
    held_bytes: tuple[int, ...] = ()
    accumulate: bool = False
    in_flight: int = 1
    loss_bytes: int | None = None
    loss_left_bytes: int = 0
    loss_small_bytes: int = 0
    target_bytes: tuple[int, ...] = ()
    outputs_bytes: int | None = None
    resident: tuple[torch.Tensor, ...] = ()
    budget_on: Counted = "allocated"
    library_bytes: tuple[int, ...] | None = None

    def library_bytes_on(self, device: torch.device) -> tuple[int, ...]:
        """Bytes of each workspace that libraries hold on a device."""
        return library_workspaces(device) if self.library_bytes is None else self.library_bytes

    def of_outputs(self, outputs_bytes: int) -> Caller:
        """What is needed where the gradients of the outputs take so many bytes."""
        if not self.outputs_bytes or outputs_bytes == self.outputs_bytes:
            return self
        share = outputs_bytes / self.outputs_bytes
        return replace(
            self,
            loss_bytes=None if self.loss_bytes is None else math.ceil(self.loss_bytes * share),
            loss_left_bytes=math.ceil(self.loss_left_bytes * share),
            loss_small_bytes=math.ceil(self.loss_small_bytes * share),
            target_bytes=tuple(math.ceil(nbytes * share) for nbytes in self.target_bytes),
            outputs_bytes=outputs_bytes,
        )


def context_bytes_of(
    joint: JointGraph,
    real: Mapping[fx.Node, torch.Tensor],
    caller: Caller,
    *,
    values: Values | None = None,
) -> ContextBytes:
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
    caller = caller.of_outputs(sum(tangents))
    loss_bytes = caller.loss_bytes
    if loss_bytes is None:
        loss_bytes = sum(
            _unknown_loss_bytes(node, sizes) for node in joint.tangents if is_tensor(node)
        )
    given = (
        *_each(table, table.of(joint.given)),
        *_unread_bytes(joint, real, caller),
        *_unread_gradient_bytes(real, caller),
        *caller.held_bytes,
        *caller.target_bytes,
        *caller.library_bytes_on(joint.device),
        *[allocated_bytes(SCALAR_BYTES, joint.device)] * SCALARS,
    )
    return ContextBytes(
        given_bytes=sum(given) + caller.reserve_bytes,
        # A loop's variable holds the last loss until it has the next.
        turn_bytes=max(loss_bytes, sum(tangents)) + caller.loss_left_bytes,
        tangent_bytes=sum(tangents) + caller.loss_left_bytes,
        end_bytes=_largest_copied_gradient(joint, sizes),
        device=joint.device,
        given_each_bytes=given,
        tangent_each_bytes=tangents,
        turn_small_bytes=caller.loss_small_bytes,
    )


def model_bytes(resident: Iterable[torch.Tensor], caller: Caller, device: torch.device) -> int:
    """What is held around a step of several graphs, whatever these are.

    Args:
        resident: parameters and buffers of the model, arguments of its call.
        caller: what is needed beside the step.
        device: of the model.
    """
    tensors = list(resident)
    leaves = [t for t in tensors if t.is_leaf]
    gradients = [t.grad for t in leaves if t.grad is not None]
    each = [*torch_compat.storages_on(device, (*tensors, *gradients)).values()]
    if caller.accumulate:
        made = [t for t in leaves if t.requires_grad and t.grad is None]
        each += [torch_compat.nbytes_of(torch_compat.local_part(t)) for t in made]
    allocated = sum(allocated_bytes(nbytes, device) for nbytes in each)
    held = sum(caller.held_bytes) + sum(caller.target_bytes) + caller.reserve_bytes
    return allocated + held + sum(caller.library_bytes_on(device))


def _unknown_loss_bytes(tangent: fx.Node, sizes: Mapping[str, int]) -> int:
    """Set aside for what a loss outside the model does with an output.

    A cross entropy keeps its logarithms, their gradient and that of its input; where the output
    is of less precision, a copy of it in full, too.
    """
    own = tangent.meta["val"].element_size()
    full = max(own, FULL_PRECISION_BYTES)
    copied = full if own < full else 0
    return _elements(tangent, sizes) * int(copied + 2 * full + own)


def _each(table: StorageTable, ids: Iterable[int]) -> tuple[int, ...]:
    """Bytes of each of the storages ``ids``, in order of the graph."""
    return tuple(table.nbytes[i] for i in sorted(ids))


def _unread_bytes(
    joint: JointGraph, real: Mapping[fx.Node, torch.Tensor], caller: Caller
) -> Iterator[int]:
    """Of each resident tensor on the step's device that is none of its primals."""
    counted = {key for t in real.values() for key in torch_compat.storages_of(t)}
    for tensor in map(torch_compat.local_part, caller.resident):
        for key, nbytes in torch_compat.storages_of(tensor).items():
            if key not in counted and tensor.device == joint.device:
                counted.add(key)
                yield allocated_bytes(nbytes, tensor.device)


def tensor_bytes(node: fx.Node, sizes: Mapping[str, int]) -> int:
    """Of the elements of a tensor, whatever its storage."""
    value = node.meta["val"]
    return allocated_bytes(_elements(node, sizes) * value.element_size(), value.device)


def _elements(node: fx.Node, sizes: Mapping[str, int]) -> int:
    (layout,) = layouts_of(node)
    return math.prod(number_at(n, sizes) for n in layout.shape)


def _unread_gradient_bytes(real: Mapping[fx.Node, torch.Tensor], caller: Caller) -> Iterator[int]:
    """Of each gradient that is there before the step, of what the step does not read."""
    read = {id(tensor) for tensor in real.values()}
    for tensor in caller.resident:
        spread = torch_compat.local_part(tensor) is not tensor
        if not spread and id(tensor) not in read and tensor.is_leaf and tensor.grad is not None:
            for nbytes in torch_compat.storages_of(tensor.grad).values():
                yield allocated_bytes(nbytes, tensor.device)


def spread_gradient_bytes(resident: Iterable[torch.Tensor]) -> int:
    """Of this process's parts of gradients that exist of tensors that several share.

    A graph reads its part of such a tensor, which knows of no gradient.
    """
    leaves = (t for t in resident if t.is_leaf and torch_compat.local_part(t) is not t)
    parts = [torch_compat.local_part(leaf.grad) for leaf in leaves if leaf.grad is not None]
    return sum(
        allocated_bytes(nbytes, part.device)
        for part in parts
        for nbytes in torch_compat.storages_of(part).values()
    )


def own_gradients(joint: JointGraph) -> frozenset[int]:
    """Primals whose gradient is all there is in its storage, and made by the backward."""
    alone = _alone_in_storages(joint)
    return frozenset(
        i
        for i, gradient in enumerate(joint.backward_outputs)
        if isinstance(gradient, fx.Node)
        and gradient in alone
        and joint.made_backward.issuperset(joint.storages.of_node[gradient])
    )


def _largest_copied_gradient(joint: JointGraph, sizes: Mapping[str, int]) -> int:
    """Autograd copies a gradient whose strides are not its parameter's, one at a time."""
    largest = 0
    alone = _alone_in_storages(joint)  # others autograd cannot take over
    for primal, gradient in zip(joint.primals, joint.backward_outputs, strict=True):
        if isinstance(gradient, fx.Node):
            wanted, made = primal.meta["val"], gradient.meta["val"]
            if wanted.stride() != made.stride() or gradient not in alone:
                largest = max(largest, tensor_bytes(gradient, sizes))
    return largest


def _alone_in_storages(joint: JointGraph) -> set[fx.Node]:
    """Gradients that share their storage with no other, and are no part of it."""
    of_node = joint.storages.of_node
    times = Counter(of_node[n] for n in joint.gradients)

    def is_whole(value: torch.Tensor) -> bool:
        return value.untyped_storage().nbytes() <= value.numel() * value.element_size()

    return {n for n in joint.gradients if times[of_node[n]] == 1 and is_whole(n.meta["val"])}


def settled(caller: Caller, joint: JointGraph, real: Mapping[fx.Node, torch.Tensor]) -> Caller:
    """``caller`` without its tensors: what they take is counted, and they may go."""
    unread = (*_unread_bytes(joint, real, caller), *_unread_gradient_bytes(real, caller))
    return replace(
        caller,
        held_bytes=(*caller.held_bytes, *unread),
        resident=(),
        library_bytes=caller.library_bytes_on(joint.device),
    )


def made_outputs(joint: JointGraph) -> tuple[int, ...]:
    """Results of the forward, one for each storage that it makes for its caller.

    New values of primals are none: they go into the primals.
    """
    table = joint.storages
    given = table.of(joint.given)
    found: dict[int, int] = {}
    for index in range(len(joint.mutated), len(joint.forward_outputs)):
        output = joint.forward_outputs[index]
        own = table.of_node[output] if isinstance(output, fx.Node) else ()
        if len(own) == 1 and own[0] not in given:
            found.setdefault(own[0], index)
    return tuple(found.values())
