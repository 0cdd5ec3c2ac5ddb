"""A plan that is held against something else: an exact solver, or what CUDA's allocator does."""

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
from fxremat.costs.workspaces import forget_workspaces
from fxremat.errors import ArgumentError
from fxremat.ir import Infeasible, Problem, Solved
from fxremat.loop.optimizer_state import counted_state, optimizer_bytes
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
"""Stages of a chain: of more, CP-SAT rarely proves anything within a minute."""

TIME_LIMIT_S = 60.0
"""Seconds that one search may take."""

STEPS = 3
"""Steps that are run: the first one may take what none takes again."""


def refuse_check(offload: object) -> None:
    """Raise ``ArgumentError`` where no plan can be checked, before there is one.

    Args:
        offload: the argument of that name.
    """
    if offload:
        raise ArgumentError(
            f"offload is {offload!r} with check=True: must be False, since CP-SAT knows schedules "
            "that recompute alone. Leave one of them out",
            argument="offload",
            value=offload,
        )
    if find("ortools.sat.python.cp_model") is None:
        raise ArgumentError(
            "check is True, but ortools, which has CP-SAT, cannot be imported: pip install ortools",
            argument="check",
            value=True,
        )


def cross_checked(plan: Plan) -> Plan:
    """``plan`` with ``cross_check``, which is found from the plan alone."""
    return replace(plan, cross_check=_found(plan))


def _found(plan: Plan) -> CrossCheck:
    count = len(plan.chain)
    if plan.branch_ends:
        return CrossCheck(plan.predicted_s, why_not="too large for it, being a join of branches")
    if count > MOST_STAGES:
        why = f"too large for it, being of {count} stages, more than {MOST_STAGES}"
        return CrossCheck(plan.predicted_s, why_not=why)
    problem = Problem(plan.chain, plan.costs, plan.budget_bytes)
    found = solve("cpsat", problem, time_limit_s=TIME_LIMIT_S)
    if isinstance(found, Infeasible):
        least = format_bytes(found.least_budget_bytes)
        why = f"no schedule of whole stages fits, which take {least} at the least"
        return CrossCheck(plan.predicted_s, proven=True, why_not=why)
    best = found if isinstance(found, Solved) else found.incumbent
    if best is None:
        return CrossCheck(plan.predicted_s, why_not=f"it found none in {TIME_LIMIT_S:.0f} s")
    return CrossCheck(plan.predicted_s, best.makespan_s, proven=isinstance(found, Solved))


def verified(model: nn.Module, call: Sample, asked: Arguments) -> Verified:
    """Plan and run steps of a copy without data on the CUDA device that is here.

    What others hold on the device is not counted, and nothing is left there.

    Args:
        model: whose shapes are meant; it is not changed.
        call: of which its tensors are made up: zeros.
        asked: as of :func:`fxremat.compile`.

    Raises:
        torch.OutOfMemoryError: there is not as much memory on it. What planning raises, is raised.
    """
    device = torch.device("cuda", torch.cuda.current_device())
    forget_workspaces()  # of whoever took them: they are the step's again
    _drop_unused()
    others = torch.cuda.memory_allocated(device), torch.cuda.memory_reserved(device)
    try:
        return _followed(model, call, asked, device, others)
    finally:
        _drop_unused()


def check_verifiable() -> None:
    """Have an estimate that is to be followed refused where that cannot be.

    Raises:
        ArgumentError: there is no CUDA device.
    """
    if not torch.cuda.is_available():
        raise ArgumentError(
            "verify=True runs the step on a CUDA device, or on what stands in for one, and there "
            "is none: leave it out",
            argument="verify",
            value=True,
        )


def _drop_unused() -> None:
    gc.collect()
    torch.cuda.empty_cache()


def _followed(
    model: nn.Module,
    call: Sample,
    asked: Arguments,
    device: torch.device,
    others: tuple[int, int],
) -> Verified:
    """Plan and run steps, beside what ``others`` hold, allocated and reserved."""
    begun_s = time.perf_counter()
    own = _empty_copy(model, device)
    sample = call.map(lambda value: _zeros(value, device))
    if isinstance(asked.loss, Compared):
        asked = replace(asked, loss=asked.loss.map(lambda value: _zeros(value, device)))
    kept = counted_state(optimizer_bytes(asked.optimizers, own), own, None)
    state = [torch.empty(nbytes, dtype=torch.uint8, device=device) for nbytes in kept]
    runner = Runner.of(own, sample, asked, hooked=False)
    planned_s = time.perf_counter() - begun_s
    found: list[Verified] = []
    for _ in range(STEPS):
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
        _step(own, runner, sample, asked.loss)
        torch.cuda.synchronize(device)
        found.append(
            Verified(
                device=torch.cuda.get_device_name(device),
                plan=runner.training.latest_record(),
                allocated_bytes=torch.cuda.max_memory_allocated(device) - others[0],
                reserved_bytes=torch.cuda.max_memory_reserved(device) - others[1],
                budget_on=asked.budget_on,
                planned_s=planned_s,
                seconds=time.perf_counter() - begun_s,
            )
        )
        own.zero_grad()
    del state
    runner.training.close()
    runner.release()
    return max(found, key=lambda own: own.peak_bytes)


def _step(
    model: nn.Module,
    runner: Runner,
    call: Sample,
    loss: Callable[[Any], torch.Tensor] | None,
) -> None:
    with in_training(model), torch.enable_grad():
        outputs = runner.run(call.args, call.kwargs)
        ends = outputs if loss is None else loss(outputs)
        made = [t for t in tree_leaves(ends) if isinstance(t, torch.Tensor) and t.requires_grad]
        torch.autograd.backward(made, [torch.ones_like(t) for t in made])


def _empty_copy(model: nn.Module, device: torch.device) -> nn.Module:
    """A copy of a model whose tensors have no data, shared where they were."""
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
    made = torch.zeros_like(value, device=device, requires_grad=False)
    return made.requires_grad_(value.requires_grad)
