"""Ways to plan a measured step that an ablation compares, all asked through one evaluator."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
from torch._functorch._activation_checkpointing import knapsack

from benchmarks.quality import captured
from fxremat.effort import USUAL, Effort
from fxremat.ir import Backward, Forward, Keep, MeasuredLink, Problem, Schedule, Solved
from fxremat.ir.schedule import coded
from fxremat.planner.context.context_bytes import Caller, context_bytes_of
from fxremat.planner.decision.candidates import Candidate, Pool
from fxremat.planner.search.search import Search
from fxremat.planner.transfers.transfers import HostMemory, Transfers
from fxremat.progress import silent
from fxremat.solvers.named import solve
from tests.harness import Captured, periodic

SHARES = 33
"""Of what could be kept, that a baseline is tried with."""

LINK_BYTES_PER_S = 3e8
"""A third of what a GPT keeps travels within its forward, as on an H100 behind PCIe 5."""

LINK = MeasuredLink(*(LINK_BYTES_PER_S,) * 3, slowdown=1.0, shared=False)

MOST_STAGES = 20
"""Of a chain that CP-SAT is asked for."""

TIME_LIMIT_S = 20.0
"""Of one search of CP-SAT."""

Chosen = Callable[[int], float | None]
"""Seconds of the choice for a budget in bytes; ``None``: nothing fits, or nothing is proved."""


@dataclass(frozen=True, slots=True)
class Case:
    """A model that was captured and measured.

    Attributes:
        step: its graphs.
        whole: the search with all that is on.
    """

    step: Captured
    whole: Search

    @staticmethod
    def of(name: str) -> Case:
        """Capture a model, and measure it."""
        step = captured(name)
        return Case(step, _searched(step, USUAL))

    def searched(self, effort: Effort) -> Search:
        """Search with other generators, or other numbers."""
        return _searched(self.step, effort)


def _searched(step: Captured, effort: Effort) -> Search:
    real = {step.joint.primals[i]: tensor for i, tensor in step.real.items()}
    around = context_bytes_of(step.measured.line.joint, real, Caller())
    return Search.over(step.measured, step.blocks, around, progress=silent, effort=effort)


def fastest(candidates: Iterable[Candidate]) -> Chosen:
    """Chooses among what was evaluated."""
    points = [(candidate.peak_bytes, candidate.total_s) for candidate in candidates]

    def chosen(budget_bytes: int) -> float | None:
        return min((s for nbytes, s in points if nbytes <= budget_bytes), default=None)

    return chosen


# What is kept at the loss point, chosen without a planner


@dataclass(frozen=True, slots=True)
class Kept:
    """Storages that cross the loss point where everything is kept, and can be computed again.

    Attributes:
        found: the search whose evaluator is asked.
        nbytes: size of each.
        seconds: the operation that makes each takes.
    """

    found: Search
    nbytes: dict[int, int]
    seconds: dict[int, float]

    @staticmethod
    def of(case: Case) -> Kept:
        """All of a model's."""
        found = case.whole
        assert found.relaxation is not None
        operations = found.relaxation().operations
        seconds = {s: operation.seconds for operation in operations for s in operation.makes}
        lives = [life for life in found.setting.kept.lives if life.storage in seconds]
        nbytes = {life.storage: life.nbytes for life in lives}
        return Kept(found, nbytes, {s: seconds[s] for s in nbytes})

    def candidates(self, kept: Iterable[int]) -> Iterator[Candidate]:
        """All but ``kept`` dropped, and computed again from boundaries that are held, or not."""
        found, own = self.found, frozenset(kept)
        evaluator, line = found.evaluator, found.measured.line
        arrays, table = evaluator.arrays, line.joint.storages
        flags = np.zeros(arrays.at.nodes, dtype=np.uint8)
        for node, storages in enumerate(arrays.storages):
            flags[node] = bool(storages) and own.issuperset(storages)
        held = np.packbits(flags).tobytes()
        there = own | table.of((*line.joint.given, *line.pinned))
        count = len(line.stages)
        starts = [i for i in range(count) if not i or there >= table.of(line.stages[i].boundary)]
        for begins in (range(count), starts):
            yield evaluator.candidate(coded(_again(begins, count)), held)


def _again(starts: Sequence[int], count: int) -> Schedule:
    """All stages forward, then each segment once more before its backward."""
    ops: list[Forward | Backward] = [Forward(i, Keep.NONE) for i in range(count)]
    for start, end in reversed([*zip(starts, [*starts[1:], count], strict=True)]):
        ops += [Forward(i, Keep.ALL) for i in range(start, end)]
        ops += [Backward(i) for i in reversed(range(start, end))]
    return Schedule(tuple(ops))


def uniform(case: Case) -> Chosen:
    """All segments, or all stages, alike."""
    evaluator = case.whole.evaluator
    count = len(case.whole.chain)
    schedules = [periodic(count, length) for length in range(1, count + 1)]
    for step in range(SHARES):
        options = [_of_share(case.whole, i, step / (SHARES - 1)) for i in range(count)]
        forwards = [Forward(i, Keep.ALL, option) for i, option in enumerate(options)]
        schedules.append(Schedule((*forwards, *map(Backward, reversed(range(count))))))
    return fastest(evaluator.candidate(coded(schedule)) for schedule in schedules)


def _of_share(found: Search, stage: int, share: float) -> int:
    """The save option that keeps most within a share of what the backward of a stage reads."""
    options = found.evaluator.options
    numbers, masks = options.parts[stage].numbers, options.masks[stage]
    most = share * numbers.kept_bytes(numbers.required)
    fitting = (i for i, mask in enumerate(masks, 1) if numbers.kept_bytes(mask) <= most)
    return 0 if share == 1 else next(fitting, len(masks))


def greedy(case: Case) -> Chosen:
    """Most bytes a second first."""
    kept = Kept.of(case)
    order = sorted(kept.nbytes, key=lambda s: kept.seconds[s] / max(kept.nbytes[s], 1))
    return fastest(c for first in range(len(order) + 1) for c in kept.candidates(order[first:]))


def by_knapsack(name: str, case: Case) -> Chosen:
    """What one of torch's solvers keeps."""
    kept = Kept.of(case)
    storages, total = list(kept.nbytes), sum(kept.nbytes.values())
    memory = [kept.nbytes[s] / total for s in storages]
    runtimes = [kept.seconds[s] for s in storages]
    found: list[Candidate] = []
    for step in range(SHARES):
        _, saved, _ = getattr(knapsack, name)(memory, runtimes, step / (SHARES - 1))
        found += kept.candidates(storages[i] for i in saved)
    return fastest(found)


# Parts of the planner


def one_start(case: Case) -> Chosen:
    """Local search starts from the best of all generators together, not of each."""
    found = case.searched(Effort(starts=0))
    starts = found.solved.starts(USUAL.starts, USUAL.closer_starts)
    climbed = (c for start in starts for c in found.evaluator.climb(start, USUAL))
    return fastest(Pool.of(found.baseline, (*found.solved.members, *climbed)).members)


def moved(effort: Effort, case: Case, *, alone: bool = True) -> Chosen:
    """With transfers, from the bases of each generator or of all of them together."""
    found = case.searched(effort)
    transfers = Transfers.of(found if alone else replace(found, separate=()), HostMemory(link=LINK))

    def chosen(budget_bytes: int) -> float | None:
        if budget_bytes < transfers.least_bytes:
            return None
        return transfers.fastest_within(budget_bytes).total_s

    return chosen


def by_cpsat(case: Case) -> Chosen:
    """The best schedule of the chain, where that is proved."""
    found = case.whole
    if len(found.chain) > MOST_STAGES:
        raise NotImplementedError(f"more than {MOST_STAGES} stages")

    def chosen(budget_bytes: int) -> float | None:
        problem = Problem(found.chain, found.costs, budget_bytes)
        best = solve("cpsat", problem, time_limit_s=TIME_LIMIT_S)
        if not isinstance(best, Solved):
            return None
        candidate = found.evaluator.candidate(coded(best.schedule))
        return candidate.total_s if candidate.peak_bytes <= budget_bytes else None

    return chosen


def planned(effort: Effort, case: Case) -> Chosen:
    """What the planner chooses with an effort."""
    return fastest(case.searched(effort).pool.members)


WHOLE, MOVED = "+ joins: the whole planner", "+ transfers"

ROTOR = Effort(generators=("rotor",), save_options=0, starts=0)
"""The solver on whole stages, without local search."""

ADDED: dict[str, Callable[[Case], Chosen]] = {
    "uniform": uniform,
    "greedy": greedy,
    "torch's knapsack, dp": partial(by_knapsack, "dp_knapsack"),
    "torch's knapsack, ilp": partial(by_knapsack, "ilp_knapsack"),
    "rotor": partial(planned, ROTOR),
    "+ save options": partial(planned, Effort(generators=("rotor",), starts=0)),
    "+ climbing": partial(planned, Effort(generators=("rotor",))),
    WHOLE: partial(planned, USUAL),
    "CP-SAT": by_cpsat,
    MOVED: partial(moved, USUAL),
}
"""Ways to plan, each with one part more from rotor on."""

WITHOUT: dict[str, Callable[[Case], Chosen]] = {
    "save options": partial(planned, Effort(save_options=0)),
    "climbing": partial(planned, Effort(starts=0)),
    "the join solver": partial(planned, Effort(generators=("rotor", "equiv_chain"))),
    "the equivalent chain": partial(planned, Effort(generators=("rotor", "join"))),
    "both of these": partial(planned, Effort(generators=("rotor",))),
    "climbs from each generator alone": one_start,
    "climbs, for transfers": partial(moved, Effort(away_shares=())),
    "bases of each generator, for transfers": partial(moved, USUAL, alone=False),
}
"""Parts, and how to plan with all but them: most are an effort with one field changed."""
