"""Valid sequences of operations as variables of CP-SAT, regardless of memory."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, pairwise
from typing import TYPE_CHECKING, Any

from fxremat.ir import Backward, Compute, Forward, Keep
from fxremat.solvers.papers.cpsat.search import new_search

if TYPE_CHECKING:
    from ortools.sat.python.cp_model import CpModel, IntVar, LinearExpr


@dataclass(frozen=True, slots=True)
class RunVariables:
    """Variables of a run, which is consecutive forwards and at most one backward.

    Each is 0 or 1, and a list has one per stage.

    Attributes:
        none, ck, all, rebuild: how the stage runs in this run, if it does.
        forward: whether the stage runs.
        starts: whether the run starts with the stage.
        back: whether the run ends with the stage's backward.
        done: whether its backward has run before.
        kept, saved: whether its boundary and saved set are held before the run.
        kept_after, saved_after: whether they are held after the run's forwards.
        option: for each option, 0 for everything, whether ``F_all`` runs with it.
        held, held_after: for each option, whether its saved set is held before the run and after
            its forwards. They may be 1 where it is not, since they only count against memory and
            time.
    """

    none: list[IntVar]
    ck: list[IntVar]
    all: list[IntVar]
    rebuild: list[IntVar]
    forward: list[IntVar]
    starts: list[IntVar]
    back: list[IntVar]
    done: list[IntVar]
    kept: list[IntVar]
    saved: list[IntVar]
    kept_after: list[IntVar]
    saved_after: list[IntVar]
    option: list[list[IntVar]]
    held: list[list[IntVar]]
    held_after: list[list[IntVar]]


def add_runs(
    model: CpModel, options: Sequence[int], runs: int, *, persistent: bool
) -> list[RunVariables]:
    """Add variables for every valid sequence of at most ``runs`` runs, and return them by run.

    Args:
        options: number of ways to run ``F_all`` of each stage.
        runs: number of runs.
        persistent: whether only memory-persistent schedules are valid.
    """
    count = len(options)

    def row(name: str, k: int) -> list[IntVar]:
        return [model.new_bool_var(f"{name}_{k}_{i}") for i in range(count)]

    def rows(name: str, k: int) -> list[list[IntVar]]:
        return [
            [model.new_bool_var(f"{name}_{k}_{i}_{o}") for o in range(options[i])]
            for i in range(count)
        ]

    by_option = ("option", "held", "held_after")
    every = []
    for k in range(runs):
        fields: dict[str, Any] = {
            name: rows(name, k) if name in by_option else row(name, k)
            for name in RunVariables.__dataclass_fields__
        }
        every.append(RunVariables(**fields))
    for run in every:
        _add_forwards(model, run)
        _add_backward(model, run)
        if persistent:
            _add_persistent(model, run)
    for before, run in pairwise(every):
        _add_next(model, before, run)
    _add_ends(model, every)
    return every


def level(run: RunVariables, stage: int) -> LinearExpr:
    """Return an expression that is 1 if the backward of ``stage`` is next before ``run``."""
    after = run.done[stage + 1] if stage + 1 < len(run.done) else 1
    return after - run.done[stage]


def _add_forwards(model: CpModel, run: RunVariables) -> None:
    count = len(run.done)
    for i in range(count):
        forward = run.forward[i]
        model.add(run.none[i] + run.ck[i] + run.all[i] + run.rebuild[i] == forward)
        model.add_implication(forward, ~run.done[i])
        # A boundary that is held is not written.
        model.add_implication(forward, ~run.saved[i])
        if i + 1 < count:
            model.add_implication(forward, ~run.kept[i + 1])
        earlier = run.forward[i - 1] if i else 0
        model.add(run.starts[i] >= forward - earlier)
        model.add(run.starts[i] <= forward)
        if i:
            model.add(run.starts[i] + earlier <= 1)
        # A boundary is kept after: kept in this run, or before and not read. Rebuilds keep nothing.
        after = run.kept_after[i]
        model.add(after >= run.ck[i] + run.all[i])
        model.add(after >= run.kept[i] - forward)
        model.add(after <= run.ck[i] + run.all[i] + run.kept[i])
        model.add(after <= run.ck[i] + run.all[i] + 1 - forward)
        model.add(run.saved_after[i] == run.all[i] + run.saved[i])
        model.add(sum(run.option[i]) == run.all[i])
        for chosen, held, held_after in zip(
            run.option[i], run.held[i], run.held_after[i], strict=True
        ):
            model.add_implication(chosen, held_after)
            model.add_implication(held, held_after)
    model.add_at_most_one(run.starts)


def _add_backward(model: CpModel, run: RunVariables) -> None:
    count = len(run.done)
    model.add_at_most_one(run.back)
    for i in range(count):
        model.add_implication(run.back[i], ~run.done[i])
        model.add_implication(run.rebuild[i], run.back[i])
        model.add_bool_or(~run.back[i], run.rebuild[i], run.saved_after[i])
        if i + 1 < count:
            model.add_implication(run.back[i], run.done[i + 1])
            model.add_implication(run.rebuild[i], run.done[i + 1])
            # A repeated F_all with its B is a rebuild. Only the last stage runs for the first
            # time while its backward is next, see _add_ends.
            model.add_bool_or(~run.back[i], ~run.all[i])


def _add_persistent(model: CpModel, run: RunVariables) -> None:
    count = len(run.done)
    for i in range(count):
        last = i + 1 == count
        # A forward that reads a kept boundary keeps it, and what F_none writes is read.
        model.add_bool_or(~run.none[i], ~run.starts[i], ~run.kept[i])
        model.add_implication(run.none[i], ~run.done[i + 1] if not last else ~run.none[i])
        if not last:
            model.add_bool_or(~run.forward[i], run.forward[i + 1], run.done[i + 1])
        # Forwards start from the deepest boundary in memory.
        for b in range(i + 1, count):
            model.add_implication(run.starts[i], ~run.kept[b])
            model.add_implication(run.starts[i], ~run.saved[b - 1])
        for start in run.starts:
            model.add(start + run.saved[i] + level(run, i) <= 2)


def _add_next(model: CpModel, before: RunVariables, run: RunVariables) -> None:
    for i in range(len(run.done)):
        model.add(run.done[i] == before.done[i] + before.back[i])
        for now, after in (
            (run.kept[i], before.kept_after[i]),
            (run.saved[i], before.saved_after[i]),
        ):
            model.add(now >= after - before.back[i])
            model.add_implication(now, after)
            model.add_implication(now, ~before.back[i])
        for held, held_after in zip(run.held[i], before.held_after[i], strict=True):
            model.add(held >= held_after - before.back[i])
        where = [run.kept[i], *([run.saved[i - 1]] if i else [])]
        model.add_bool_or(~run.starts[i], *where)
    # Every run has an operation until all is done, and no backward that fits into the run before.
    model.add(sum(run.starts) + sum(run.back) <= 2 * (sum(before.starts) + sum(before.back)))
    model.add(sum(run.back) <= sum(run.starts) + sum(before.back))


def _add_ends(model: CpModel, every: Sequence[RunVariables]) -> None:
    first, count = every[0], len(every[0].done)
    for i in range(count):
        for fact in (first.done[i], first.kept[i], first.saved[i]):
            model.add(fact == 0)
        if i:
            model.add(first.starts[i] == 0)
        model.add_exactly_one([run.back[i] for run in every])
        # Redundant, but tightens the bound: the first forward of a stage is not a rebuild.
        model.add(sum(run.forward[i] - run.rebuild[i] for run in every) >= 1)
    last = count - 1
    for k, run in enumerate(every):
        ran = [other.forward[last] for other in every[:k]]
        model.add_bool_or(~run.rebuild[last], *ran)
        for forward in ran:
            model.add_bool_or(~run.all[last], ~run.back[last], ~forward)


def add_hint(model: CpModel, every: Sequence[RunVariables], ops: Sequence[Compute]) -> bool:
    """Give a schedule to the search as its start.

    Requires:
        The schedule is valid, and ``F_all`` followed by its ``B`` is a rebuild unless the stage
        runs for the first time.

    Returns:
        Whether the schedule has few enough runs.
    """
    parts = _split(ops)
    if len(parts) > len(every):
        return False
    decided, ran = model.clone(), set[int]()
    parts += [[] for _ in range(len(every) - len(parts))]
    for run, part in zip(every, parts, strict=True):
        chosen = [_variable(run, op, part[-1], ran) for op in part]
        for variable in (*run.none, *run.ck, *run.rebuild, *run.back, *chain(*run.option)):
            decided.add(variable == any(variable is other for other in chosen))
    search = new_search(time_limit_s=math.inf, workers=1)
    search.parameters.stop_after_first_solution = True
    search.parameters.cp_model_presolve = False
    search.solve(decided)  # determines the other variables
    for index in range(len(model.proto.variables)):
        variable = model.get_int_var_from_proto_index(index)
        model.add_hint(variable, search.value(variable))
    return True


def _variable(run: RunVariables, op: Compute, last: Compute, ran: set[int]) -> IntVar:
    """Return the variable of ``run`` that is 1 if it runs ``op`` and ends with ``last``.

    ``ran`` are the stages that have run, to which that of ``op`` is added.
    """
    i = op.stage
    if isinstance(op, Backward):
        return run.back[i]
    if op.keep is not Keep.ALL:
        variable = run.ck[i] if op.keep is Keep.INPUT else run.none[i]
    elif i in ran and last == Backward(i):
        variable = run.rebuild[i]
    else:
        variable = run.option[i][op.option]
    ran.add(i)
    return variable


def _split(ops: Sequence[Compute]) -> list[list[Compute]]:
    """Split operations into runs, which end with a backward or before a non-consecutive stage."""
    parts: list[list[Compute]] = []
    before: Compute | None = None
    for op in ops:
        follows = isinstance(before, Forward) and (
            isinstance(op, Backward) or op.stage == before.stage + 1
        )
        parts = [*parts[:-1], [*parts[-1], op]] if follows else [*parts, [op]]
        before = op
    return parts
