"""What of a model's optimizer state and gradients may live in host memory, and what that costs."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fxremat.ir import MeasuredLink, TrainingState
from fxremat.loop.trial import StepCosts, step_costs
from fxremat.loop.window import KEPT_BYTES
from fxremat.runtime.host_parameter import HostParameter
from fxremat.runtime.slots import slot_bytes

SMALL_SHARE = 0.005
"""The smallest parameters, up to this share of all their bytes, keep gradient and state on the
device: copying them takes longer than their bytes are worth."""

STEPS = 4
"""Into how many parts state, and gradients, are divided for the choice of what is away."""

TEMPORARY = 2.0
"""Bytes that a step of an optimizer is assumed to allocate for each byte of a parameter."""


@dataclass(frozen=True, slots=True)
class Trained:
    """A parameter whose gradient and state may live in host memory.

    Attributes:
        parameter_id: the ``id`` of the parameter.
        nbytes: its bytes.
        state_bytes: bytes of its optimizer state.
        state_host_bytes: bytes that this takes in host memory.
        costs: what its optimizer takes for it.
    """

    parameter_id: int
    nbytes: int
    state_bytes: int
    state_host_bytes: int
    costs: StepCosts

    def step_bytes(self, *, gradient: bool) -> int:
        """Return the bytes that a step of this parameter by itself has on the device.

        They include its state: that is fetched, or is copied so that the step can be undone.

        Args:
            gradient: whether its gradient is in host memory.
        """
        copies = 1 + self.costs.temporary  # it can be undone
        return math.ceil(copies * self.nbytes) + self.state_bytes + gradient * self.nbytes


@dataclass(frozen=True, slots=True)
class Placement:
    """A choice of what is in host memory.

    Attributes:
        state: each parameter, by its ``id``, whose optimizer state is in host memory, and the
            bytes of that.
        gradients: the same for gradients.
        step_bytes: bytes that the optimizers' steps have on the device, at least, in addition to
            what is held between steps.
        host_bytes: bytes of host memory that it takes.
        optimizer_s: predicted seconds of the optimizers' steps, with their transfers.
        backward_s: predicted seconds that the transfers of gradients add to the backward.
        transfer_s: predicted seconds that all transfers add to a training step.
    """

    state: Mapping[int, int]
    gradients: Mapping[int, int]
    step_bytes: int
    host_bytes: int
    optimizer_s: float
    backward_s: float
    transfer_s: float

    @property
    def summary(self) -> TrainingState | None:
        """The bytes and seconds for a plan's record; ``None`` if nothing is in host memory."""
        if not self.host_bytes:
            return None
        return TrainingState(
            self.state_bytes,
            self.gradient_bytes,
            self.step_bytes,
            self.optimizer_s,
            self.backward_s,
            self.transfer_s,
        )

    @property
    def state_bytes(self) -> int:
        """Bytes of optimizer state in host memory."""
        return sum(self.state.values())

    @property
    def gradient_bytes(self) -> int:
        """Bytes of gradients in host memory."""
        return sum(self.gradients.values())


def trained_parameters(
    optimizers: Iterable[torch.optim.Optimizer],
    model: nn.Module,
    state: Mapping[int, Sequence[int]],
) -> list[Trained]:
    """Return the parameters whose gradient and state may live in host memory, the largest first.

    They are plain and dense, and not among the smallest ones, which together have
    :data:`SMALL_SHARE` of the bytes.

    Args:
        optimizers: the optimizers that step them.
        model: the model that they belong to.
        state: bytes of each tensor of optimizer state, by the ``id`` of the parameter.

    Raises:
        ArgumentError: an optimizer cannot step some parameters at a time.
    """
    own = {id(p) for p in model.parameters()}
    costs: dict[int, StepCosts] = {}
    for optimizer in optimizers:
        measured = step_costs(optimizer)
        for group in optimizer.param_groups:
            costs |= {id(p): measured for p in group["params"] if id(p) in own}
    parameters = [p for p in model.parameters() if id(p) in costs and _may_live_on_host(p)]
    return large_parameters(parameters, state, costs)


def _may_live_on_host(parameter: Tensor) -> bool:
    is_plain = type(parameter) in (nn.Parameter, HostParameter)
    return parameter.requires_grad and is_plain and parameter.is_leaf


def large_parameters(
    parameters: Iterable[Tensor],
    state: Mapping[int, Sequence[int]],
    costs: Mapping[int, StepCosts],
) -> list[Trained]:
    """Return the parameters that are not among the smallest ones, the largest first.

    Args:
        parameters: the parameters.
        state: bytes of each tensor of optimizer state, by the ``id`` of the parameter.
        costs: what a step of the optimizer takes, by the ``id`` of the parameter.
    """
    ordered = sorted(parameters, key=lambda p: p.nbytes)
    small_bytes, total_bytes = 0, sum(p.nbytes for p in ordered)
    while ordered and small_bytes + ordered[0].nbytes <= SMALL_SHARE * total_bytes:
        small_bytes += ordered.pop(0).nbytes
    trained = []
    for p in reversed(ordered):
        sizes = [n for n in state.get(id(p), ()) if n > KEPT_BYTES]
        host_bytes = sum(map(slot_bytes, sizes))
        trained.append(Trained(id(p), p.nbytes, sum(sizes), host_bytes, costs[id(p)]))
    return trained


def placements(
    trained: Sequence[Trained],
    link: MeasuredLink,
    sizes: Sequence[int],
    *,
    limit_bytes: int | None = None,
) -> list[Placement]:
    """Return choices of what is in host memory, from nothing to everything that the limit allows.

    State goes first: gradients take time in the backward as well. Of each, the largest go first.

    Args:
        trained: the parameters, the largest first.
        link: the link to host memory.
        sizes: bytes of each parameter that the optimizers step.
        limit_bytes: the most host memory that a choice may take; ``None``: no limit.
    """
    left_bytes = math.inf if limit_bytes is None else limit_bytes
    with_state, left_bytes = _within(
        [(own, own.state_host_bytes) for own in trained if own.state_bytes], left_bytes
    )
    parts = [_prefix(with_state, step) for step in range(STEPS + 1)]
    made = [_placement(trained, part, [], link, sizes) for part in parts]
    with_gradient, _ = _within([(own, slot_bytes(own.nbytes)) for own in trained], left_bytes)
    for step in range(1, STEPS + 1):
        gradients = _prefix(with_gradient, step)
        made.append(_placement(trained, with_state, gradients, link, sizes))
    return _distinct(made)


def with_least_memory(made: Sequence[Placement]) -> list[Placement]:
    """Return those of :func:`placements` that may have the least peak.

    The last one leaves forward and backward the most memory. Another one can only be better if an
    optimizer's step, which comes at the end, has fewer bytes on the device.
    """

    def at_the_end_bytes(own: Placement) -> int:
        return own.step_bytes - own.state_bytes - own.gradient_bytes

    *others, last = made
    most_bytes = at_the_end_bytes(last)
    return [*(own for own in others if at_the_end_bytes(own) < most_bytes), last]


def _within(
    sized: Iterable[tuple[Trained, int]], limit_bytes: float
) -> tuple[list[Trained], float]:
    """Return the parameters, in order, whose bytes fit the limit together; and what is left."""
    taken = []
    for own, nbytes in sized:
        if nbytes <= limit_bytes:
            taken.append(own)
            limit_bytes -= nbytes
    return taken, limit_bytes


def _distinct(made: Iterable[Placement]) -> list[Placement]:
    by_sets = {(frozenset(own.state), frozenset(own.gradients)): own for own in made}
    return list(by_sets.values())


def _prefix(trained: Sequence[Trained], step: int) -> list[Trained]:
    """Return the first parameters, with ``step`` of :data:`STEPS` parts of all bytes."""
    total_bytes, taken_bytes = sum(own.nbytes for own in trained), 0
    taken: list[Trained] = []
    for own in trained:
        if taken_bytes * STEPS >= step * total_bytes:
            break
        taken.append(own)
        taken_bytes += own.nbytes
    return taken


def _placement(
    trained: Sequence[Trained],
    state: Sequence[Trained],
    gradients: Sequence[Trained],
    link: MeasuredLink,
    sizes: Sequence[int],
) -> Placement:
    by_state = {own.parameter_id: own.state_bytes for own in state}
    by_gradient = {own.parameter_id: own.nbytes for own in gradients}
    is_moved = bool(by_state or by_gradient)
    stepped = (own.step_bytes(gradient=own.parameter_id in by_gradient) for own in trained)
    host_bytes = sum([own.state_host_bytes for own in state])
    host_bytes += sum([slot_bytes(own.nbytes) for own in gradients])
    nothing = StepCosts(0.0, 0.0)
    slowest = max((own.costs for own in trained), key=lambda own: own.seconds, default=nothing)
    computing_s = slowest.seconds * sum(sizes) + slowest.call_s * len(sizes)
    calls_s = slowest.hosted_call_s * len(by_state.keys() | by_gradient.keys())
    state_bytes, gradient_bytes = sum(by_state.values()), sum(by_gradient.values())
    to_device_s = (state_bytes + gradient_bytes) / link.prefetch_bytes_per_s
    to_host_s = state_bytes / link.offload_bytes_per_s
    moving_s = to_device_s + to_host_s if link.shared else max(to_device_s, to_host_s)
    optimizer_s = max(computing_s * (link.slowdown if is_moved else 1.0), moving_s) + calls_s
    backward_s = gradient_bytes / link.offload_bytes_per_s
    return Placement(
        by_state,
        by_gradient,
        max(stepped) if is_moved else 0,
        host_bytes,
        optimizer_s,
        backward_s,
        optimizer_s - computing_s + backward_s,
    )
