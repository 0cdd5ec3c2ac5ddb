"""What of a model's optimizer state and gradients may live in host memory, and what that costs."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fxremat import torch_compat
from fxremat.errors import ArgumentError
from fxremat.ir import MeasuredLink, TrainingState
from fxremat.loop.optimizer_state import copied_optimizer
from fxremat.loop.windows import KEPT_BYTES, WindowedStep
from fxremat.runtime.arena import HostLimit
from fxremat.runtime.host_parameter import HostParameter
from fxremat.runtime.host_tensor import HostSpace
from fxremat.runtime.slots import slot_bytes

SMALL_SHARE = 0.005
"""The smallest parameters, up to this share of all their bytes, keep gradient and state on the
device: copying them takes longer than their bytes are worth."""

STEPS = 4
"""Into how many parts state, and gradients, are divided for the choice of what is away."""

TRIAL_BYTES = 16 << 20
"""The most bytes of a parameter on which a step of an optimizer is timed."""


TEMPORARY = 2.0
"""Bytes that a step of an optimizer is assumed to allocate for each byte of a parameter."""


@dataclass(frozen=True, slots=True)
class StepCosts:
    """What a step of an optimizer takes, for each byte of a parameter.

    Attributes:
        temporary: bytes that it allocates and frees.
        seconds: its seconds.
    """

    temporary: float
    seconds: float


@dataclass(frozen=True, slots=True)
class Trained:
    """A parameter whose gradient and state may live in host memory.

    Attributes:
        parameter_id: the ``id`` of the parameter.
        nbytes: its bytes.
        state_bytes: bytes of its optimizer state.
        costs: what its optimizer takes for it.
    """

    parameter_id: int
    nbytes: int
    state_bytes: int
    costs: StepCosts

    def step_bytes(self, *, state: bool, gradient: bool) -> int:
        """Return the bytes that a step of this parameter by itself has on the device.

        Args:
            state: whether its state is in host memory.
            gradient: whether its gradient is.
        """
        copies = 1 + self.costs.temporary  # it can be undone
        return int(copies * self.nbytes) + state * self.state_bytes + gradient * self.nbytes


@dataclass(frozen=True, slots=True)
class Placement:
    """A choice of what is in host memory.

    Attributes:
        state: each parameter, by its ``id``, whose optimizer state is in host memory, and the
            bytes of that.
        gradients: the same for gradients.
        step_bytes: bytes that the optimizers' steps have on the device, at least, in addition to
            what is held between steps.
        optimizer_s: predicted seconds of the optimizers' steps, with their transfers.
        backward_s: predicted seconds that the transfers of gradients add to the backward.
        transfer_s: predicted seconds that all transfers add to a training step.
    """

    state: Mapping[int, int]
    gradients: Mapping[int, int]
    step_bytes: int
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

    @property
    def host_bytes(self) -> int:
        """Bytes of host memory that it takes."""
        each = (*self.state.values(), *self.gradients.values())
        return sum(map(slot_bytes, each))


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
    return [
        Trained(
            id(p), p.nbytes, sum(n for n in state.get(id(p), ()) if n > KEPT_BYTES), costs[id(p)]
        )
        for p in reversed(ordered)
    ]


def placements(trained: Sequence[Trained], link: MeasuredLink, all_bytes: int) -> list[Placement]:
    """Return choices of what is in host memory, from nothing to everything.

    State goes first: gradients take time in the backward as well. Of each, the largest go first.

    Args:
        trained: the parameters, the largest first.
        link: the link to host memory.
        all_bytes: bytes of all parameters that the optimizers step.
    """
    with_state = [own for own in trained if own.state_bytes]
    parts = [_prefix(with_state, step) for step in range(STEPS + 1)]
    made = [_placement(trained, part, [], link, all_bytes) for part in parts]
    for step in range(1, STEPS + 1):
        made.append(_placement(trained, with_state, _prefix(trained, step), link, all_bytes))
    return _distinct(made)


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
    all_bytes: int,
) -> Placement:
    by_state = {own.parameter_id: own.state_bytes for own in state}
    by_gradient = {own.parameter_id: own.nbytes for own in gradients}
    moved = (own for own in trained if own.parameter_id in by_state | by_gradient)
    step_bytes = max(
        (
            own.step_bytes(
                state=own.parameter_id in by_state, gradient=own.parameter_id in by_gradient
            )
            for own in moved
        ),
        default=0,
    )
    computing_s = max((own.costs.seconds for own in trained), default=0.0) * all_bytes
    state_bytes, gradient_bytes = sum(by_state.values()), sum(by_gradient.values())
    to_device_s = (state_bytes + gradient_bytes) / link.prefetch_bytes_per_s
    to_host_s = state_bytes / link.offload_bytes_per_s
    moving_s = to_device_s + to_host_s if link.shared else max(to_device_s, to_host_s)
    is_moved = bool(state_bytes or gradient_bytes)
    optimizer_s = max(computing_s * (link.slowdown if is_moved else 1.0), moving_s)
    backward_s = gradient_bytes / link.offload_bytes_per_s
    return Placement(
        by_state,
        by_gradient,
        step_bytes,
        optimizer_s,
        backward_s,
        optimizer_s - computing_s + backward_s,
    )


def step_costs(optimizer: torch.optim.Optimizer) -> StepCosts:
    """Measure a step of a copy of ``optimizer``, on a parameter like its largest one.

    Raises:
        ArgumentError: the optimizer cannot step some parameters at a time, with the same bits as
            all of them together.
    """
    group, largest = max(
        ((group, p) for group in optimizer.param_groups for p in group["params"]),
        key=lambda pair: pair[1].nbytes,
    )
    rows = max(1, min(largest.shape[0], TRIAL_BYTES * largest.shape[0] // largest.nbytes))
    like = torch.empty((rows, *largest.shape[1:]), dtype=largest.dtype, device=largest.device)
    trial = _copy_for(optimizer, [(group, [like])])
    device = largest.device
    peaks: list[int] = []
    with torch_compat.real_execution():
        torch_compat.step_unseen(trial)  # makes the state
        with torch_compat.noted_bytes(device, peaks.append):
            torch_compat.step_unseen(trial)
        seconds = min(_timed(trial, device) for _ in range(3))
        _check_separable(optimizer)
    return StepCosts(max(peaks, default=0) / like.nbytes, seconds / like.nbytes)


def _timed(optimizer: torch.optim.Optimizer, device: torch.device) -> float:
    """Return the seconds of one step."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    begin_s = time.perf_counter()
    torch_compat.step_unseen(optimizer)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - begin_s


def _copy_for(
    optimizer: torch.optim.Optimizer, groups: Sequence[tuple[dict[str, Any], Sequence[Tensor]]]
) -> torch.optim.Optimizer:
    """Return a copy of ``optimizer`` without state that steps parameters of made-up numbers.

    Args:
        optimizer: the optimizer.
        groups: its groups, and for each of them tensors like the copy's parameters.
    """
    generator = torch.Generator().manual_seed(0)
    made = copied_optimizer(optimizer)
    made.state = defaultdict(dict)
    made.param_groups = []
    for group, likes in groups:
        parameters = []
        for like in likes:
            parameter = nn.Parameter(_made_up(like, generator))
            parameter.grad = _made_up(like, generator)
            parameters.append(parameter)
        made.param_groups.append({**group, "params": parameters})
    return made


def _made_up(like: Tensor, generator: torch.Generator) -> Tensor:
    values = torch.randn(like.shape, generator=generator)
    return values.to(dtype=like.dtype, device=like.device)


def _check_separable(optimizer: torch.optim.Optimizer) -> None:
    """Check on small parameters that stepping some at a time changes no bit.

    Raises:
        ArgumentError: it changes some, or the optimizer fails.
    """
    shapes = ((48, 64), (96, 40), (2048,), (8, 16, 4, 4), (32, 16, 3))

    def trained(*, windowed: bool) -> list[Tensor]:
        groups = []
        for group in optimizer.param_groups:
            first = group["params"][0] if group["params"] else torch.empty(0)
            dims = {p.dim() for p in group["params"]}
            chosen = [s for s in shapes if len(s) in dims] or [shapes[0]]
            likes = [torch.empty(s, dtype=first.dtype, device=first.device) for s in chosen]
            groups.append((group, likes))
        made = _copy_for(optimizer, groups)
        parameters = [p for group in made.param_groups for p in group["params"]]
        if windowed:
            space = HostSpace(parameters[0].device, folder=None, limit=HostLimit())
            step = WindowedStep(made, space=space, is_hosted=lambda _: True)
        for _ in range(3):
            if windowed:
                with torch.no_grad():
                    step.run(made)
            else:
                torch_compat.step_unseen(made)
        return [p.detach() for p in parameters] + list(_state_tensors(made, parameters))

    name = type(optimizer).__name__
    try:
        together, separately = trained(windowed=False), trained(windowed=True)
    except Exception as error:  # of the user's class
        raise _refused(
            optimizer, f"a trial step of {name} for some parameters failed: {error}"
        ) from (error)
    same = len(together) == len(separately) and all(map(_same, together, separately))
    if not same:
        raise _refused(
            optimizer,
            f"{name} gives other numbers when it steps some parameters at a time: a parameter's "
            "step depends on others, or on how often step() is called",
        )


def _same(one: Tensor, other: Tensor) -> bool:
    return torch.equal(one.nan_to_num(), other.nan_to_num())


def _state_tensors(
    optimizer: torch.optim.Optimizer, parameters: Iterable[Tensor]
) -> Iterator[Tensor]:
    for parameter in parameters:
        for value in optimizer.state.get(parameter, {}).values():
            if isinstance(value, Tensor) and value.layout is torch.strided:
                yield value.detach().clone()


def _refused(optimizer: object, why: str) -> ArgumentError:
    return ArgumentError(
        f"{why}. Its state stays on the device: pass HostMemory(state=False)",
        argument="optimizer",
        value=optimizer,
        code="FXR411",
    )
