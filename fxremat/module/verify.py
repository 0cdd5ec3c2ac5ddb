"""Checks of a plan: against an exact solver, and against the CUDA allocator."""

from __future__ import annotations

import copy
import gc
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from fxremat.capture.isolation import in_training
from fxremat.capture.sample import Sample
from fxremat.costs.measured.workspaces import forget_workspaces
from fxremat.errors import ArgumentError
from fxremat.ir import Infeasible, Problem, Solved
from fxremat.loop.optimizer_state import counted_state, optimizer_bytes
from fxremat.module.first_plan import plan_first_step
from fxremat.module.runner import Runner
from fxremat.optional import find
from fxremat.options.arguments import Arguments
from fxremat.options.loss import Compared
from fxremat.report.estimate import Verified
from fxremat.report.facts import CrossCheck
from fxremat.report.plan import Plan
from fxremat.solvers.named import solve
from fxremat.units import format_bytes

MOST_STAGES = 12
"""The most stages of a chain: for more, CP-SAT rarely proves anything within a minute."""

TIME_LIMIT_S = 60.0
"""The time limit of one search, in seconds."""

STEPS = 3
"""The number of steps that run: the first one may allocate more than the others."""


def check_solver_usable(offload: object) -> None:
    """Raise ``ArgumentError`` if ``check=True`` cannot work, since CP-SAT cannot check the plan.

    Args:
        offload: the argument ``offload`` of :func:`fxremat.plan`.

    Raises:
        ArgumentError: ``offload`` is given, or ortools is not installed.
    """
    if offload:
        raise ArgumentError(
            f"offload is {offload!r}, but must be False with check=True, since CP-SAT models only "
            "schedules that recompute. Omit one of them",
            argument="offload",
            value=offload,
            code="FXR407",
        )
    if find("ortools.sat.python.cp_model") is None:
        raise ArgumentError(
            "check=True requires ortools for CP-SAT: pip install ortools",
            argument="check",
            value=True,
            code="FXR408",
        )


def cross_checked(plan: Plan) -> Plan:
    """Return ``plan`` with ``cross_check``: its seconds compared with CP-SAT's fastest schedule."""
    return replace(plan, cross_check=_cross_check(plan))


def _cross_check(plan: Plan) -> CrossCheck:
    count = len(plan.chain)
    if plan.branch_ends:
        return CrossCheck(plan.predicted_s, why_not="it does not support joins of branches")
    if count > MOST_STAGES:
        why = f"the chain has {count} stages, more than {MOST_STAGES}"
        return CrossCheck(plan.predicted_s, why_not=why)
    problem = Problem(plan.chain, plan.costs, plan.budget_bytes)
    result = solve("cpsat", problem, time_limit_s=TIME_LIMIT_S)
    if isinstance(result, Infeasible):
        least = format_bytes(result.least_budget_bytes)
        why = f"no schedule of whole stages fits; the lowest one takes {least}"
        return CrossCheck(plan.predicted_s, proven=True, why_not=why)
    best = result if isinstance(result, Solved) else result.incumbent
    if best is None:
        return CrossCheck(plan.predicted_s, why_not=f"no schedule found in {TIME_LIMIT_S:.0f} s")
    return CrossCheck(plan.predicted_s, best.makespan_s, proven=isinstance(result, Solved))


def verified(model: nn.Module, call: Sample, options: Arguments) -> Verified:
    """Plan a copy of a model on the current CUDA device, run steps of it, and measure their peaks.

    Memory that was allocated before is not counted. All memory is freed afterwards.

    Args:
        model: the model whose shapes the copy has; it is not changed.
        call: a call whose tensors are replaced by zeros.
        options: the arguments of :func:`fxremat.compile`.

    Returns:
        The plan and the measured bytes of the step with the highest peak.

    Raises:
        torch.OutOfMemoryError: the device does not have as much memory.
        FxrematError: see :func:`fxremat.compile`.
    """
    device = torch.device("cuda", torch.cuda.current_device())
    forget_workspaces()  # so that the step allocates new ones
    _free_unused()
    before_bytes = torch.cuda.memory_allocated(device), torch.cuda.memory_reserved(device)
    try:
        return _run_steps(model, call, options, device, before_bytes)
    finally:
        _free_unused()


def check_device_present() -> None:
    """Raise ``ArgumentError`` if ``verify=True`` cannot run a step.

    Raises:
        ArgumentError: there is no CUDA device.
    """
    if not torch.cuda.is_available():
        raise ArgumentError(
            "verify=True runs the step on a CUDA device or on a stand-in for one, but there is "
            "none: omit it",
            argument="verify",
            value=True,
            code="FXR408",
        )


def _free_unused() -> None:
    gc.collect()
    torch.cuda.empty_cache()


def _run_steps(
    model: nn.Module,
    call: Sample,
    options: Arguments,
    device: torch.device,
    before_bytes: tuple[int, int],
) -> Verified:
    """Plan a copy of a model, run steps of it, and return the measurements of the highest peak.

    Args:
        model: the model whose shapes the copy has.
        call: a call whose tensors are replaced by zeros.
        options: the arguments of :func:`fxremat.compile`.
        device: the CUDA device.
        before_bytes: bytes allocated and bytes reserved before; they are subtracted.
    """
    begun_s = time.perf_counter()
    own = _empty_copy(model, device)
    sample = call.map(lambda value: _zeros(value, device))
    if isinstance(options.loss, Compared):
        options = replace(options, loss=options.loss.map(lambda value: _zeros(value, device)))
    kept = counted_state(optimizer_bytes(options.optimizers, own), own, None)
    state = [torch.empty(nbytes, dtype=torch.uint8, device=device) for nbytes in kept]
    runner = plan_first_step(own, sample, options, hooked=False)
    planned_s = time.perf_counter() - begun_s
    steps: list[Verified] = []
    for _ in range(STEPS):
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
        _run_step(own, runner, sample, options.loss)
        torch.cuda.synchronize(device)
        steps.append(
            Verified(
                device=torch.cuda.get_device_name(device),
                plan=runner.training.latest_record(),
                allocated_bytes=torch.cuda.max_memory_allocated(device) - before_bytes[0],
                reserved_bytes=torch.cuda.max_memory_reserved(device) - before_bytes[1],
                budget_on=options.budget_on,
                planned_s=planned_s,
                seconds=time.perf_counter() - begun_s,
            )
        )
        own.zero_grad()
    del state
    runner.training.close()
    runner.release()
    return max(steps, key=lambda step: step.peak_bytes)


def _run_step(
    model: nn.Module,
    runner: Runner,
    call: Sample,
    loss: Callable[[Any], torch.Tensor] | None,
) -> None:
    with in_training(model), torch.enable_grad():
        outputs = runner.run(call.args, call.kwargs)
        ends = outputs if loss is None else loss(outputs)
        roots = [t for t in tree_leaves(ends) if isinstance(t, torch.Tensor) and t.requires_grad]
        torch.autograd.backward(roots, [torch.ones_like(t) for t in roots])


def _empty_copy(model: nn.Module, device: torch.device) -> nn.Module:
    """Return a copy of a model with uninitialized tensors; shared tensors stay shared."""
    memo: dict[int, Any] = {}
    for tensor in (*model.parameters(), *model.buffers()):
        empty = torch.empty_like(tensor, device=device, requires_grad=False)
        if isinstance(tensor, nn.Parameter):
            empty = nn.Parameter(empty, tensor.requires_grad)
        memo[id(tensor)] = empty
    return copy.deepcopy(model, memo)


def _zeros(value: Any, device: torch.device) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    zeros = torch.zeros_like(value, device=device, requires_grad=False)
    return zeros.requires_grad_(value.requires_grad)
