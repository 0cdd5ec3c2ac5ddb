"""Constraints of CP-SAT on what a sequence of runs holds in memory.

Variables are 1 where something is held, and may be 1 elsewhere too, since they only count against
the budget.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

from fxremat.ir import Chain, Costs, StageCosts
from fxremat.solvers.papers.cpsat.runs import RunVariables, level

if TYPE_CHECKING:
    from ortools.sat.python.cp_model import CpModel, IntVar, LinearExpr


class HeldStorage(NamedTuple):
    """A storage of boundaries ``first … last``, which stage ``first - 1`` writes.

    ``units`` is its size in units of bytes that all sizes are multiples of.
    """

    units: int
    first: int
    last: int


def add_memory(
    model: CpModel,
    chain: Chain,
    costs: Costs,
    every: Sequence[RunVariables],
    *,
    persistent: bool,
    unit_bytes: int,
    budget: IntVar,
) -> None:
    """Add constraints that bound the peak of every forward and backward by ``budget``.

    Args:
        chain, costs: the chain.
        every: variables of every run.
        persistent: whether schedules are memory-persistent, which never hold a storage twice.
        unit_bytes: bytes of a unit, in which ``budget`` is.
        budget: the variable of the budget.
    """
    count = len(chain)
    used: list[list[LinearExpr | int]] = [
        [_rest(chain, costs, every[k], at, unit_bytes) for at in range(count + 1)]
        for k in range(len(every))
    ]
    for crossing in crossings(chain, unit_bytes):
        written = crossing.first < crossing.last and crossing.first > 0 and not persistent
        add = _add_instances if written else _add_once
        for k, at, held in add(model, every, crossing):
            used[k][at] += crossing.units * held
    fixed = costs.fixed_bytes // unit_bytes
    for k, run in enumerate(every):
        gradient = sum(
            stage.gradient_bytes // unit_bytes * level(run, i)
            for i, stage in enumerate(costs.stages)
        )
        for i, stage in enumerate(costs.stages):
            ways = list(_ways(chain, stage, i))
            peak = (
                stage.forward_extra_bytes // unit_bytes * (run.none[i] + run.ck[i])
                + sum(
                    (way.keep_extra_bytes + way.private_bytes) // unit_bytes * chosen
                    for way, chosen in zip(ways, run.option[i], strict=True)
                )
                + stage.rebuild_bytes // unit_bytes * run.rebuild[i]
            )
            model.add(used[k][i] + peak + gradient + fixed <= budget).only_enforce_if(
                run.forward[i]
            )
            for way, held in zip(ways, run.held_after[i], strict=True):
                extra = (way.backward_extra_bytes + stage.gradient_bytes) // unit_bytes
                model.add(used[k][count] + extra + fixed <= budget).only_enforce_if(
                    run.back[i], ~run.rebuild[i], held
                )


def all_bytes(chain: Chain, costs: Costs) -> Iterator[int]:
    """Yield the bytes of every storage, gradient and workspace that ``add_memory`` counts."""
    yield costs.fixed_bytes
    for boundary in chain.boundaries:
        yield from (chain.storages[i].nbytes for i in boundary)
    for i, stage in enumerate(costs.stages):
        yield stage.gradient_bytes
        yield stage.forward_extra_bytes
        yield stage.rebuild_bytes
        for way in _ways(chain, stage, i):
            yield from way


def crossings(chain: Chain, unit_bytes: int) -> list[HeldStorage]:
    """Return the storages that are in boundaries, without those of size 0.

    Their sizes are in units of ``unit_bytes``.
    """
    runs: dict[int, tuple[int, int]] = {}
    for at, boundary in enumerate(chain.boundaries):
        for storage in boundary:
            runs[storage] = (runs.get(storage, (at, at))[0], at)
    return [
        HeldStorage(chain.storages[storage].nbytes // unit_bytes, *ends)
        for storage, ends in runs.items()
        if chain.storages[storage].nbytes
    ]


class _Way(NamedTuple):
    """Bytes of a choice of what a forward keeps for its backward.

    ``private_bytes`` are those of kept storages that are in neither boundary of the stage; the
    others are as in ``SaveOption``.
    """

    private_bytes: int
    keep_extra_bytes: int
    backward_extra_bytes: int


def _ways(chain: Chain, costs: StageCosts, stage: int) -> Iterator[_Way]:
    """Yield the bytes of each choice of what a forward keeps: everything, then the save options."""
    after = set(chain.boundaries[stage + 1])
    for option in costs.choices(chain.stages[stage].saved):
        private_bytes = chain.nbytes(chain.added(stage, option.kept) - after)
        yield _Way(private_bytes, option.keep_extra_bytes, option.backward_extra_bytes)


def _rest(
    chain: Chain, costs: Costs, run: RunVariables, at: int, unit_bytes: int
) -> LinearExpr | int:
    """Return the units that saved sets hold beyond boundaries at one place of a run.

    It is at the forward of stage ``at``, or at the backward if ``at`` is the number of stages.
    """
    return sum(
        way.private_bytes // unit_bytes * held
        for i, stage in enumerate(costs.stages)
        for way, held in zip(
            _ways(chain, stage, i), (run.held_after if i < at else run.held)[i], strict=True
        )
    )


def _holders(crossing: HeldStorage, count: int) -> tuple[range, range]:
    """Return the boundaries that contain the storage, and the stages whose saved sets do.

    Args:
        crossing: the storage.
        count: number of stages.
    """
    kept = range(crossing.first, min(crossing.last, count - 1) + 1)
    return kept, range(max(crossing.first - 1, 0), crossing.last)


def _add_once(
    model: CpModel, every: Sequence[RunVariables], crossing: HeldStorage
) -> Iterator[tuple[int, int, IntVar]]:
    """Yield run, place and a variable that is 1 if a storage, never held twice, is held there.

    Place ``i`` is the forward of stage ``i``; the place after all stages is the run's backward.
    """
    count = len(every[0].done)
    kept, saved = _holders(crossing, count)
    for k, run in enumerate(every):
        for at in range(count + 1):
            held = model.new_bool_var("")
            for b in kept:
                model.add_implication((run.kept_after if b < at else run.kept)[b], held)
            for i in saved:
                model.add_implication((run.saved_after if i < at else run.saved)[i], held)
            if at < count and crossing.first <= at <= crossing.last:
                model.add_implication(run.forward[at], held)
            if at < count and at + 1 == crossing.first:
                model.add(held >= run.forward[at] - run.rebuild[at])
            yield k, at, held


def _add_instances(
    model: CpModel, every: Sequence[RunVariables], crossing: HeldStorage
) -> Iterator[tuple[int, int, IntVar]]:
    """Yield run, place and a variable that is 1 if an instance of a storage is held there.

    Every run that writes the storage makes an instance. Places are as in ``_add_once``.
    """
    count = len(every[0].done)
    kept, saved = _holders(crossing, count)
    writer = crossing.first - 1
    for origin, wrote in enumerate(every):
        in_kept: dict[int, IntVar] = {}
        in_saved: dict[int, IntVar] = {}
        for k in range(origin, len(every)):
            run = every[k]
            if k == origin:
                source = wrote.forward[writer]
            else:
                source = model.new_bool_var("")  # the run starts at a boundary with the instance
                for s in kept:
                    model.add_bool_or(~run.starts[s], ~in_kept[s], source)
                for i in saved:
                    if i + 1 < count:
                        model.add_bool_or(~run.starts[i + 1], ~in_saved[i], source)
            kept_after = {b: model.new_bool_var("") for b in kept}
            saved_after = {i: model.new_bool_var("") for i in saved}
            for b in kept:
                model.add_bool_or(~source, ~run.ck[b], kept_after[b])
                model.add_bool_or(~source, ~run.all[b], kept_after[b])
                if b in in_kept:
                    model.add_bool_or(~in_kept[b], ~run.kept_after[b], kept_after[b])
            for i in saved:
                model.add_bool_or(~source, ~run.all[i], saved_after[i])
                if i in in_saved:
                    model.add_implication(in_saved[i], saved_after[i])
            for at in range(count + 1):
                held = model.new_bool_var("")
                for b in kept:
                    holder = kept_after.get(b) if b < at else in_kept.get(b)
                    if holder is not None:
                        model.add_implication(holder, held)
                for i in saved:
                    holder = saved_after.get(i) if i < at else in_saved.get(i)
                    if holder is not None:
                        model.add_implication(holder, held)
                if at < count and crossing.first <= at <= crossing.last:
                    model.add_bool_or(~run.forward[at], ~source, held)
                if k == origin and at == writer:
                    model.add(held >= run.forward[at] - run.rebuild[at])
                yield k, at, held
            in_kept = {b: model.new_bool_var("") for b in kept}
            in_saved = {i: model.new_bool_var("") for i in saved}
            for b in kept:
                model.add_bool_or(~kept_after[b], run.back[b], in_kept[b])
            for i in saved:
                model.add_bool_or(~saved_after[i], run.back[i], in_saved[i])
