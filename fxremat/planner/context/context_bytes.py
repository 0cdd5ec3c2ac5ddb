"""Memory of a step that no stage allocates: parameters, inputs, gradients, needs of the loss."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import fx

from fxremat import torch_compat
from fxremat.costs.measured.workspaces import library_workspaces
from fxremat.passes.joint.graph import JointGraph, StorageTable, allocated_bytes, is_tensor
from fxremat.passes.joint.sizes import Values, layouts_of, number_at
from fxremat.runtime.steps import SCALAR_BYTES
from fxremat.units import Counted

FULL_PRECISION_BYTES = 4
"""Bytes per number that a loss outside the model is assumed to compute with, at least."""

SCALARS = 5
"""How many scalars a step holds in addition: the loss, its gradient, the step's token, the previous
loss, and the like."""


@dataclass(frozen=True, slots=True)
class ContextBytes:
    """Bytes of memory that a step needs besides what its planned graphs allocate.

    The loss point is the moment between forward and backward.

    Attributes:
        given_bytes: bytes held throughout: parameters, buffers, inputs, constants, gradients that
            are accumulated into, and what the caller reserves.
        loss_point_bytes: bytes that a loss outside the model needs at the loss point.
        tangent_bytes: bytes held when the backward begins beyond those that the forward has left:
            gradients of the outputs, less what is held in the forward only. What the backward does
            not release of these is held to the end.
        end_bytes: bytes needed after the backward has returned, in addition to all gradients.
        end_is_step: whether ``end_bytes`` are of the optimizer's step, not of a copied gradient.
        device: the device of the step.
        given_each_bytes: the parts of ``given_bytes`` that are known as single allocations.
        tangent_each_bytes: the parts of ``tangent_bytes``, one each.
        added: indices of the primals whose new gradient is released as soon as it is computed: it
            is added to an existing one, or a hook takes it.
        host_bytes: available bytes of host memory; ``None``: no limit.
        loss_point_small_bytes: the part of ``loss_point_bytes`` that is allocated in small blocks.
        released_bytes: the part of ``given_bytes`` that is released between the forward and the
            loss, such as the previous step's outputs.
        cleared_each_bytes: those of ``given_each_bytes`` that are released before the backward
            begins, namely cleared gradients. ``tangent_bytes`` accounts for them.
        tangents_stay: the caller holds gradients of the outputs until the backward ends.
        gradient_each_bytes: bytes of the gradient of each primal, whether or not it exists; 0 for a
            primal that is no dense tensor.
    """

    given_bytes: int
    loss_point_bytes: int
    tangent_bytes: int
    end_bytes: int = 0
    end_is_step: bool = False
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    given_each_bytes: tuple[int, ...] = ()
    tangent_each_bytes: tuple[int, ...] = ()
    added: frozenset[int] = frozenset()
    host_bytes: int | None = None
    loss_point_small_bytes: int = 0
    released_bytes: int = 0
    cleared_each_bytes: tuple[int, ...] = ()
    tangents_stay: bool = False
    gradient_each_bytes: tuple[int, ...] = ()

    def releases(self, joint: JointGraph) -> frozenset[int]:
        """Return ids of storages of output gradients that the backward frees after the last use."""
        return frozenset() if self.tangents_stay else joint.released

    @property
    def cleared_bytes(self) -> int:
        """The sum of ``cleared_each_bytes``."""
        return sum(self.cleared_each_bytes)

    @property
    def loss_point_more_bytes(self) -> int:
        """Bytes that the loss needs between forward and backward, less ``released_bytes``."""
        return self.loss_point_bytes - self.released_bytes

    @property
    def backward_bytes(self) -> int:
        """Bytes that the start of the backward adds to memory, less ``released_bytes``."""
        return self.tangent_bytes - self.released_bytes


@dataclass(frozen=True, slots=True)
class Caller:
    """Memory that the caller of a step needs outside of it, and which peak the budget limits.

    Attributes:
        reserve_bytes: bytes that the plan leaves unused.
        held_bytes: size of each other tensor that is held throughout, such as optimizer state.
        accumulate: gradients are added to existing ones, even if there are none yet.
        in_flight: how many steps may have a pending backward.
        loss_bytes: measured peak of the loss outside the model; ``None`` if it was not measured.
        loss_left_bytes: the part of it that is held as long as the value of the loss.
        loss_small_bytes: the most of it that was allocated in small blocks.
        target_bytes: size of each storage that the loss compares the outputs with, held throughout.
        outputs_bytes: bytes of the outputs' gradients for which loss and target were given; for
            others they are scaled. ``None``: those of the first graph that is planned.
        resident: tensors that the step holds whether its graph reads them or not: parameters and
            buffers of the model, and arguments of the call.
        budget_on: which peak the budget limits.
        library_bytes: size of each workspace that libraries hold on the device; ``None``: the
            libraries are asked.
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
        """Return the bytes of each workspace that libraries such as cuBLAS hold on ``device``."""
        return library_workspaces(device) if self.library_bytes is None else self.library_bytes

    def of_outputs(self, outputs_bytes: int) -> Caller:
        """Return a copy with loss and target scaled to ``outputs_bytes`` of output gradients."""
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
    """Return the bytes that a step needs besides what the graphs of ``joint`` allocate.

    Args:
        joint: the step, with the storages of the size in question.
        real: the tensors of primals, as far as they are available.
        caller: what the caller needs in addition.
        values: values of the symbolic sizes; ``None``: those of the capture.
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
        # A variable of the loop holds the last loss until it is assigned the next one.
        loss_point_bytes=max(loss_bytes, sum(tangents)) + caller.loss_left_bytes,
        tangent_bytes=sum(tangents) + caller.loss_left_bytes,
        end_bytes=_largest_copied_gradient(joint, sizes),
        device=joint.device,
        given_each_bytes=given,
        tangent_each_bytes=tangents,
        loss_point_small_bytes=caller.loss_small_bytes,
        gradient_each_bytes=tuple(
            _dense_bytes(node, sizes, joint.device) for node in joint.primals
        ),
    )


def model_bytes(resident: Iterable[torch.Tensor], caller: Caller, device: torch.device) -> int:
    """Return the bytes that are held throughout a step of several graphs, outside of these graphs.

    ``resident`` are parameters and buffers of the model, and arguments of its call.
    """
    tensors = list(resident)
    leaves = [t for t in tensors if t.is_leaf]
    gradients = [t.grad for t in leaves if t.grad is not None]
    each = [*torch_compat.storages_on(device, (*tensors, *gradients)).values()]
    if caller.accumulate:
        made = [t for t in leaves if t.requires_grad and t.grad is None]
        each += [torch_compat.nbytes_of(t) for t in made]
    allocated = sum(allocated_bytes(nbytes, device) for nbytes in each)
    held = sum(caller.held_bytes) + sum(caller.target_bytes) + caller.reserve_bytes
    return allocated + held + sum(caller.library_bytes_on(device))


def _unknown_loss_bytes(tangent: fx.Node, sizes: Mapping[str, int]) -> int:
    """Return the bytes that a loss outside the model is assumed to need for one output.

    ``tangent`` is the output's gradient. A cross entropy holds log probabilities, their gradient
    and the gradient of its input; if the output has less precision, also a copy of it in full
    precision.
    """
    item_bytes = tangent.meta["val"].element_size()
    full = max(item_bytes, FULL_PRECISION_BYTES)
    copied = full if item_bytes < full else 0
    return _element_count(tangent, sizes) * int(copied + 2 * full + item_bytes)


def _each(table: StorageTable, ids: Iterable[int]) -> tuple[int, ...]:
    """Return the bytes of each of the storages ``ids``, by ascending id."""
    return tuple(table.nbytes[i] for i in sorted(ids))


def _unread_bytes(
    joint: JointGraph, real: Mapping[fx.Node, torch.Tensor], caller: Caller
) -> Iterator[int]:
    """Yield the bytes of each storage of ``caller.resident`` that no primal has.

    Storages on other devices than the step's are left out.
    """
    counted = {key for t in real.values() for key in torch_compat.storages_of(t)}
    for tensor in caller.resident:
        for key, nbytes in torch_compat.storages_of(tensor).items():
            if key not in counted and tensor.device == joint.device:
                counted.add(key)
                yield allocated_bytes(nbytes, tensor.device)


def _dense_bytes(primal: fx.Node, sizes: Mapping[str, int], device: torch.device) -> int:
    """Return the bytes of a gradient of ``primal`` on ``device``; 0 if it is no dense tensor."""
    if not (is_tensor(primal) and len(layouts_of(primal)) == 1):
        return 0
    return allocated_bytes(
        _element_count(primal, sizes) * primal.meta["val"].element_size(), device
    )


def _tensor_bytes(node: fx.Node, sizes: Mapping[str, int]) -> int:
    """Return the bytes that are allocated for a tensor's elements, even if its storage has more."""
    value = node.meta["val"]
    return allocated_bytes(_element_count(node, sizes) * value.element_size(), value.device)


def _element_count(node: fx.Node, sizes: Mapping[str, int]) -> int:
    (layout,) = layouts_of(node)
    return math.prod(number_at(n, sizes) for n in layout.shape)


def _unread_gradient_bytes(real: Mapping[fx.Node, torch.Tensor], caller: Caller) -> Iterator[int]:
    """Yield the bytes of each ``.grad`` of tensors in ``caller.resident`` that are no primals."""
    read = {id(tensor) for tensor in real.values()}
    for tensor in caller.resident:
        if torch_compat.is_wrapper(tensor):
            continue  # see wrapped_gradient_bytes
        if id(tensor) not in read and tensor.is_leaf and tensor.grad is not None:
            for nbytes in torch_compat.storages_of(tensor.grad).values():
                yield allocated_bytes(nbytes, tensor.device)


def wrapped_gradient_bytes(resident: Iterable[torch.Tensor]) -> int:
    """Return the bytes of existing gradients of tensors of wrapper subclasses.

    ``resident`` are parameters and buffers of the model, and arguments of its call. A graph reads
    only the tensors that these wrap, which have no gradient themselves.
    """
    wrappers = (t for t in resident if torch_compat.is_wrapper(t) and t.is_leaf)
    # A graph that reads a parameter in host memory counts its gradient.
    leaves = [t for t in wrappers if not isinstance(t, torch_compat.OffDevice)]
    gradients = [leaf.grad for leaf in leaves if leaf.grad is not None]
    return sum(
        allocated_bytes(nbytes, gradient.device)
        for gradient in gradients
        for nbytes in torch_compat.storages_of(gradient).values()
    )


def own_gradients(joint: JointGraph) -> frozenset[int]:
    """Return indices of the primals whose gradient has a storage to itself.

    The gradient fills this storage, and the backward allocates it.
    """
    sole_owners = _sole_owners(joint)
    return frozenset(
        i
        for i, gradient in enumerate(joint.backward_outputs)
        if isinstance(gradient, fx.Node)
        and gradient in sole_owners
        and joint.made_backward.issuperset(joint.storages.of_node[gradient])
    )


def taken_as_made(joint: JointGraph) -> frozenset[int]:
    """Return indices of the primals whose gradient can be put into ``.grad`` without a copy.

    A post-accumulate hook can then take it away as soon as it is computed.
    """
    own = own_gradients(joint)
    pairs = enumerate(zip(joint.primals, joint.backward_outputs, strict=True))
    return frozenset(
        i
        for i, (primal, gradient) in pairs
        if i in own and isinstance(gradient, fx.Node) and _is_made_like(primal, gradient)
    )


def _is_made_like(primal: fx.Node, gradient: fx.Node) -> bool:
    value, made = primal.meta["val"], gradient.meta["val"]
    return (
        value.layout is made.layout is torch.strided
        and value.dtype == made.dtype
        and value.stride() == made.stride()
    )


def _largest_copied_gradient(joint: JointGraph, sizes: Mapping[str, int]) -> int:
    """Return the bytes of the largest gradient that autograd copies into ``.grad``; 0 if none.

    Only one copy is made at a time. Copied is a gradient whose strides differ from its parameter's,
    and one that shares its storage.
    """
    largest = 0
    sole_owners = _sole_owners(joint)
    for primal, gradient in zip(joint.primals, joint.backward_outputs, strict=True):
        if isinstance(gradient, fx.Node):
            wanted, made = primal.meta["val"], gradient.meta["val"]
            is_sparse = wanted.layout is not torch.strided
            if is_sparse or wanted.stride() != made.stride() or gradient not in sole_owners:
                largest = max(largest, _tensor_bytes(gradient, sizes))
    return largest


def _sole_owners(joint: JointGraph) -> set[fx.Node]:
    """Return the gradients that fill their whole storage and share it with no other gradient."""
    of_node = joint.storages.of_node
    times = Counter(of_node[n] for n in joint.gradients)

    def is_whole(value: torch.Tensor) -> bool:
        return value.untyped_storage().nbytes() <= value.numel() * value.element_size()

    return {n for n in joint.gradients if times[of_node[n]] == 1 and is_whole(n.meta["val"])}


def as_bytes(caller: Caller, joint: JointGraph, real: Mapping[fx.Node, torch.Tensor]) -> Caller:
    """Return a copy of ``caller`` with the bytes of its tensors in place of references to them."""
    unread = (*_unread_bytes(joint, real, caller), *_unread_gradient_bytes(real, caller))
    return replace(
        caller,
        held_bytes=(*caller.held_bytes, *unread),
        resident=(),
        library_bytes=caller.library_bytes_on(joint.device),
    )


def made_outputs(joint: JointGraph) -> tuple[int, ...]:
    """Return indices of forward outputs whose storage the forward allocates, one for each storage.

    New values of mutated primals are left out: they are copied into the primals.
    """
    table = joint.storages
    given = table.of(joint.given)
    index_of: dict[int, int] = {}
    for index in range(len(joint.mutated), len(joint.forward_outputs)):
        output = joint.forward_outputs[index]
        storages = table.of_node[output] if isinstance(output, fx.Node) else ()
        if len(storages) == 1 and storages[0] not in given:
            index_of.setdefault(storages[0], index)
    return tuple(index_of.values())
