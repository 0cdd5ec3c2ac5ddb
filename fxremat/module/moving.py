"""Chooses which parameters of a model live in host memory, and plans its first step with them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import replace

from torch import nn

from fxremat.errors import BudgetError
from fxremat.loop.parameters import Moved, among, movable, refuse_unmovable, within
from fxremat.module.runner import Runner
from fxremat.options.arguments import Arguments
from fxremat.planner.transfers.transfers import HostMemory
from fxremat.progress import LOG
from fxremat.report.plan import Plan
from fxremat.units import format_bytes, plural

Planned = Callable[[Arguments], Runner]
"""Plans the first step of a model as it is now, with some options."""


def plan_moving(model: nn.Module, options: Arguments, plan_with: Planned) -> Runner:
    """Plan the first step with as many parameters in host memory as make it faster, or possible.

    None is moved where everything fits on the device. If planning fails, all are on the device
    again.

    Args:
        model: the model.
        options: the arguments of :func:`fxremat.compile`; host memory is among them.
        plan_with: plans the step.

    Raises:
        ArgumentError: a wrapper needs the parameters on the device.
        FxrematError: see :func:`fxremat.compile`.
    """
    host = options.host
    assert host is not None
    refuse_unmovable(model, together=options.ranks is not None)
    parameters = within(movable(model, trained=host.all_parameters), host.limit_bytes)
    if options.kept is not None:
        parameters = among(model, options.kept.parameters_in_host, parameters)
        return _plan_with_all(model, parameters, options, plan_with)
    if not parameters:
        return plan_with(options)
    resident_s: float | None = None  # seconds of the step with all parameters on the device
    if not options.budget.grows:
        try:
            resident = plan_with(options)
        except BudgetError as error:
            budget_bytes = error.budget_bytes
        else:
            if resident.training.regions.several or _keeps_everything(resident):
                return resident
            resident_s = _plan(resident).predicted_s
            budget_bytes = resident.training.loop.budget.nbytes
            _discard(resident)
        if budget_bytes is not None:  # a share is one of what the step takes on the device
            options = replace(options, budget=options.budget.resolved_to(budget_bytes))
    moved = Moved(model, parameters, host)
    try:
        runner = _with_fewer(plan_with(options), moved, options, plan_with)
        if resident_s is not None and resident_s <= _seconds(runner):
            _discard(runner)
            moved.undo()
            return plan_with(options)
    except BaseException as error:
        moved.undo()
        if resident_s is not None and isinstance(error, BudgetError):
            return plan_with(options)
        raise
    nbytes = sum(own.nbytes for own in moved.parameters)
    count = plural(len(moved.parameters), "parameter")
    LOG.info("%s with %s are in host memory", count, format_bytes(nbytes))
    runner.training.moved = moved
    return runner


def _plan_with_all(
    model: nn.Module, parameters: list[nn.Parameter], options: Arguments, plan_with: Planned
) -> Runner:
    """Plan the first step with just ``parameters`` in host memory, as a saved plan has them."""
    host = options.host
    assert host is not None
    moved = Moved(model, parameters, host)
    try:
        runner = plan_with(options)
    except BaseException:
        moved.undo()
        raise
    runner.training.moved = moved
    return runner


@contextlib.contextmanager
def all_in_host(model: nn.Module, host: HostMemory | None) -> Iterator[None]:
    """Have all eligible parameters of ``model`` in host memory inside, if that is allowed.

    Raises:
        ArgumentError: a wrapper needs the parameters on the device.
        HostMemoryError: the memory cannot be allocated.
    """
    if host is None or not host.parameters:
        yield
        return
    refuse_unmovable(model)
    moved = Moved(
        model, within(movable(model, trained=host.all_parameters), host.limit_bytes), host
    )
    try:
        yield
    finally:
        moved.undo()


def _with_fewer(runner: Runner, moved: Moved, options: Arguments, plan_with: Planned) -> Runner:
    """Return ``runner``, or that of a plan with the parameters on the device that have room there.

    These are moved back.

    Args:
        runner: planned with all of ``moved`` in host memory.
        moved: the parameters.
        options: the options of the plan.
        plan_with: plans the step.
    """
    if runner.training.regions.several:
        return runner
    budget_bytes = runner.training.loop.budget.nbytes or 0
    plan = _plan(runner)
    room_bytes = budget_bytes - max(plan.predicted_peak_bytes, plan.least_budget_bytes)
    back = within(moved.parameters, room_bytes)
    if not back:
        return runner
    _discard(runner)
    moved.undo(back)
    return plan_with(options)


def _discard(runner: Runner) -> None:
    """Undo what planning has done outside of the runner, such as to optimizers."""
    runner.training.loop.leave()
    runner.release()


def _plan(runner: Runner) -> Plan:
    return runner.training.latest_record()


def _seconds(runner: Runner) -> float:
    return 0.0 if runner.training.regions.several else _plan(runner).predicted_s


def _keeps_everything(runner: Runner) -> bool:
    plan = _plan(runner)
    return plan.predicted_s <= plan.baseline_s
