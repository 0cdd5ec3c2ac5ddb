"""Trials of an optimizer's step on made-up parameters: its costs, and whether it can be divided."""

from __future__ import annotations

import contextlib
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from fxremat import torch_compat
from fxremat.errors import ArgumentError, HostMemoryError
from fxremat.loop.optimizer_state import copied_optimizer
from fxremat.loop.windowed_step import WindowedStep
from fxremat.runtime.arena import HostLimit
from fxremat.runtime.host_tensor import HostSpace

TRIAL_BYTES = 16 << 20
"""The most bytes of a parameter on which a step of an optimizer is timed."""


@dataclass(frozen=True, slots=True)
class StepCosts:
    """What a step of an optimizer takes.

    Attributes:
        temporary: bytes that it allocates and frees, for each byte of a parameter.
        seconds: its seconds for each byte of a parameter.
        call_s: its seconds for each parameter, whatever its size.
        hosted_call_s: seconds that each parameter takes in addition if its state or gradient lives
            in host memory, without those of the copies.
    """

    temporary: float
    seconds: float
    call_s: float = 0.0
    hosted_call_s: float = 0.0


def step_costs(optimizer: torch.optim.Optimizer) -> StepCosts:
    """Measure a step of a copy of ``optimizer``, on a parameter like its largest one.

    Raises:
        ArgumentError: the optimizer cannot step some parameters at a time, with the same bits as
            all of them together.
        HostMemoryError: there is no host memory for the state of small parameters.
    """
    name = type(optimizer).__name__
    pairs = [(group, p) for group in optimizer.param_groups for p in group["params"]]
    group, largest = max(pairs, key=lambda pair: pair[1].nbytes)
    if not largest.nbytes:
        return StepCosts(0.0, 0.0)
    device, part = largest.device, _part_of(largest)
    peaks: list[int] = []
    with torch_compat.real_execution(), _same_numbers(device):
        try:
            trial = _copy_for(optimizer, [(group, [part])])
            torch_compat.step_unseen(trial)  # makes the state
            with torch_compat.noted_bytes(device, peaks.append):
                torch_compat.step_unseen(trial)
            seconds = min(_timed(lambda: torch_compat.step_unseen(trial), device) for _ in range(3))
        except Exception as error:  # of the user's class
            raise _refused(optimizer, f"a trial step of {name} failed: {error}") from error
        calls_s = _check_separable(optimizer)
    return StepCosts(max(peaks, default=0) / part.nbytes, seconds / part.nbytes, *calls_s)


def _same_numbers(device: torch.device) -> contextlib.AbstractContextManager[None]:
    """Return a context after which random numbers go on as if nothing had been drawn in it."""
    return torch.random.fork_rng([device] if device.type == "cuda" else [])


def _part_of(parameter: Tensor) -> Tensor:
    """Return an empty tensor like the first rows of ``parameter``, of :data:`TRIAL_BYTES`."""
    shape = tuple(parameter.shape)
    if shape:
        rows = min(shape[0], TRIAL_BYTES * shape[0] // parameter.nbytes)
        shape = (max(1, rows), *shape[1:])
    return torch.empty(shape, dtype=parameter.dtype, device=parameter.device)


def _timed(step: Callable[[], object], device: torch.device) -> float:
    """Return the seconds of ``step``, with those of the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    begin_s = time.perf_counter()
    step()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - begin_s


def _copy_for(
    optimizer: torch.optim.Optimizer, groups: Sequence[tuple[dict[str, Any], Sequence[Tensor]]]
) -> torch.optim.Optimizer:
    """Return a copy of ``optimizer`` that steps parameters of made-up numbers.

    It has no state, unless the optimizer makes its state when it is created.

    Args:
        optimizer: the optimizer.
        groups: its groups, and for each of them tensors like the copy's parameters.
    """
    made = _copy(optimizer, groups, with_state=False)
    if not optimizer.state:
        return made
    try:
        torch_compat.step_unseen(made)
    except Exception:  # of the user's class
        return _copy(optimizer, groups, with_state=True)
    return _copy(optimizer, groups, with_state=False)


def _copy(
    optimizer: torch.optim.Optimizer,
    groups: Sequence[tuple[dict[str, Any], Sequence[Tensor]]],
    *,
    with_state: bool,
) -> torch.optim.Optimizer:
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
            if with_state:
                made.state[parameter] = _state_like(optimizer, group, parameter)
        made.param_groups.append({**group, "params": parameters})
    return made


def _state_like(
    optimizer: torch.optim.Optimizer, group: dict[str, Any], parameter: Tensor
) -> dict[Any, Any]:
    """Return the state of a parameter of ``group`` with the sizes of another one."""
    own = next((p for p in group["params"] if optimizer.state.get(p)), None)
    state: dict[Any, Any] = {}
    for name, value in optimizer.state.get(own, {}).items() if own is not None else ():
        if isinstance(value, Tensor):
            is_like = own is not None and value.shape == own.shape
            like = parameter if is_like else value
            state[name] = torch.ones_like(like, dtype=value.dtype)
        else:
            state[name] = value
    return state


def _made_up(like: Tensor, generator: torch.Generator) -> Tensor:
    values = torch.randn(like.shape, generator=generator)
    return values.to(dtype=like.dtype, device=like.device)


def _check_separable(optimizer: torch.optim.Optimizer) -> tuple[float, float]:
    """Check on small parameters that stepping some at a time changes no bit.

    Returns:
        Seconds of a step for each parameter, and those that each one in host memory adds.

    Raises:
        ArgumentError: it changes some, or the optimizer fails.
        HostMemoryError: there is no host memory for the state of small parameters.
    """
    name = type(optimizer).__name__
    own = {id(p) for group in optimizer.param_groups for p in group["params"]}
    for attribute, value in vars(optimizer).items():
        held = tree_leaves(value) if attribute not in ("state", "param_groups") else ()
        if any(id(leaf) in own for leaf in held):
            raise _refused(
                optimizer,
                f"{name} has parameters in its attribute {attribute!r}: a parameter's step may "
                "depend on others",
            )
    groups = [(group, _shapes_of(group)) for group in optimizer.param_groups]
    try:
        together, seconds = _trained(_copy_for(optimizer, groups), torch_compat.step_unseen)
        made = _copy_for(optimizer, groups)
        space = HostSpace(_device_of(made), folder=None, limit=HostLimit())
        step = WindowedStep(made, space=space, hosted_bytes=lambda p: 2 * p.nbytes)
        with torch.no_grad():
            separately, hosted_s = _trained(made, step.run)
    except HostMemoryError:
        raise
    except Exception as error:  # of the user's class
        raise _refused(
            optimizer, f"a trial step of {name} for some parameters failed: {error}"
        ) from error
    if not _same(together, separately):
        raise _refused(
            optimizer,
            f"{name} gives other numbers when it steps some parameters at a time: a parameter's "
            "step depends on others, or on how often step() is called",
        )
    count = sum(len(likes) for _, likes in groups)
    return seconds / count, max(0.0, hosted_s - seconds) / count


SHAPES = ((48, 64), (96, 40), (2048,), (8, 16, 4, 4), (32, 16, 3))
"""Shapes of parameters with which an optimizer is tried."""


def _shapes_of(group: dict[str, Any]) -> list[Tensor]:
    """Return small tensors like the parameters of a group, and at least two of them."""
    parameters = group["params"]
    first = parameters[0] if parameters else torch.empty(0)
    dims = {p.dim() for p in parameters}
    shapes = [shape for shape in SHAPES if len(shape) in dims] or [SHAPES[0]]
    return [torch.empty(s, dtype=first.dtype, device=first.device) for s in 2 * shapes]


def _device_of(optimizer: torch.optim.Optimizer) -> torch.device:
    device: torch.device = optimizer.param_groups[0]["params"][0].device
    return device


def _trained(
    optimizer: torch.optim.Optimizer, step: Callable[[torch.optim.Optimizer], object]
) -> tuple[list[Any], float]:
    """Return everything that three steps may change, and the seconds of the fastest step."""
    device = _device_of(optimizer)
    with _same_numbers(device):
        seconds = min(_timed(lambda: step(optimizer), device) for _ in range(3))
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    changed: list[Any] = [p.detach() for p in parameters]
    changed += [_without_identity(optimizer.state.get(p, {})) for p in parameters]
    for group in optimizer.param_groups:
        changed.append(_without_identity({k: v for k, v in group.items() if k != "params"}))
    own = {k: v for k, v in vars(optimizer).items() if k not in ("state", "param_groups")}
    return [*changed, _without_identity(own)], seconds


_VALUES = (Tensor, bool, int, float, complex, str)


def _without_identity(values: dict[Any, Any]) -> list[Any]:
    """Return the numbers and tensors in ``values``, in order."""
    leaves = tree_leaves(values)
    return [
        own.clone() if isinstance(own, Tensor) else own
        for own in leaves
        if isinstance(own, _VALUES)
    ]


def _same(one: Any, other: Any) -> bool:
    """Return whether two results of :func:`_trained` have the same bits."""
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        if (one.shape, one.dtype, one.layout) != (other.shape, other.dtype, other.layout):
            return False
        if one.layout is not torch.strided:
            one, other = one.to_dense(), other.to_dense()
        return torch.equal(one.nan_to_num(), other.nan_to_num())
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(_same, one, other))
    return type(one) is type(other) and (one == other or repr(one) == repr(other))


def _refused(optimizer: object, why: str) -> ArgumentError:
    return ArgumentError(
        f"{why}. Its state stays on the device: pass HostMemory(state=False)",
        argument="optimizer",
        value=optimizer,
        code="FXR411",
    )
