"""From a joint graph and a budget to a plan and the graphs that carry it out."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import fx

from fxremat import torch_compat
from fxremat.budget import Budget
from fxremat.ir import Backward, Chain, Costs, Event, Schedule, Solved, Timeline
from fxremat.passes.chain import build_chain, build_costs
from fxremat.passes.cost import CostCache, Progress, measure_line
from fxremat.passes.emit import ScheduleModule
from fxremat.passes.joint import JointGraph, build_joint_graph
from fxremat.passes.linearize import linearize
from fxremat.passes.options import Kept, Options, find_options
from fxremat.passes.program import BlockCache, Program, build_program, keep_all
from fxremat.passes.rewrite import BlockModules, rewrite
from fxremat.passes.surroundings import Caller, surroundings_of
from fxremat.passes.sweep import Surroundings, Sweep, Sweeper
from fxremat.report.plan import Plan
from fxremat.simulate import simulate

SLOTS = 500
"""Slots of each table; a few tables with ever lower ceilings keep rounding small."""

_COSTS = CostCache()


@dataclass(frozen=True, slots=True)
class Planned:
    """A plan and its graphs."""

    plan: Plan
    forward: ScheduleModule
    backward: ScheduleModule


@dataclass(frozen=True, slots=True)
class Candidate:
    """A schedule with the exact peak of its graphs and its time."""

    program: Program
    schedule: Schedule
    kept: Kept
    sweep: Sweep
    seconds: tuple[float, ...]

    @property
    def total_s(self) -> float:
        """Seconds of the step."""
        return sum(self.seconds)


def plan_step(
    module: fx.GraphModule,
    *,
    forward_output_count: int,
    inputs: Mapping[int, torch.Tensor],
    budget: Budget,
    caller: Caller,
    progress: Progress,
) -> Planned:
    """Plan one captured step.

    Args:
        module: AOTAutograd's joint graph.
        forward_output_count: how many of its outputs are the forward's.
        inputs: real values of primals, by index.
        budget: what the peak may reach.
        caller: what is needed beside the step.
        progress: told how far measuring and solving have come.

    Raises:
        BudgetError: no schedule that was found fits the budget.
        CaptureError, GraphError, CostError: as the passes raise them.
    """
    joint = build_joint_graph(
        module,
        forward_output_count=forward_output_count,
        mutated_primals=torch_compat.mutated_primals(module),
    )
    real = {joint.primals[i]: tensor for i, tensor in inputs.items()}
    search = Search.of(joint, real=real, caller=caller, progress=progress)
    resolved = budget.resolve(
        full_bytes=search.baseline.sweep.peak_bytes,
        least_bytes=search.least.sweep.peak_bytes,
        needed_by=search.describe_peak(search.least),
    )
    return search.emit(search.fastest_within(resolved), resolved)


@dataclass(frozen=True, slots=True)
class Search:
    """All candidate schedules of one joint graph.

    The solver's model rounds and simplifies; the graphs that would be emitted are swept
    exactly. Solving for many budgets and keeping each schedule's exact peak finds, for
    any budget, the fastest schedule that truly fits, and makes time and peak monotonic
    in the budget.
    """

    joint: JointGraph
    chain: Chain
    costs: Costs
    surroundings: Surroundings
    candidates: tuple[Candidate, ...]
    baseline: Candidate
    options: Options
    candidate: Callable[[Schedule, Kept | None], Candidate]

    @staticmethod
    def of(
        joint: JointGraph,
        *,
        real: Mapping[fx.Node, torch.Tensor],
        caller: Caller,
        progress: Progress,
    ) -> Search:
        """Linearize, measure and solve."""
        line = linearize(joint)
        blocks = BlockCache(line)
        measured = measure_line(line, blocks, real=real, cache=_COSTS, progress=progress)
        line = measured.line
        surroundings = surroundings_of(line.joint, real, caller)
        sweeper = Sweeper(line, measured.workspace_bytes)
        options = find_options(measured, blocks)
        chain = build_chain(line, blocks, options)
        costs = build_costs(measured, chain, blocks, sweeper, surroundings, options)

        def candidate(schedule: Schedule, kept: Kept | None = None) -> Candidate:
            kept = options.kept_by(schedule) if kept is None else kept
            program = build_program(line, schedule, blocks, options.missing(kept))
            sweep = sweeper.sweep(program, surroundings)
            return Candidate(
                program, schedule, kept, sweep, _seconds(program, costs, options.recompute_s(kept))
            )

        baseline = candidate(keep_all(len(chain)))
        schedules = _distinct(_schedules(chain, costs, progress))
        candidates = (baseline, *(candidate(schedule) for schedule in schedules))
        return Search(
            line.joint, chain, costs, surroundings, candidates, baseline, options, candidate
        )

    @property
    def least(self) -> Candidate:
        """The schedule of the lowest peak; the fastest among those."""
        return min(self.candidates, key=lambda c: (c.sweep.peak_bytes, c.total_s))

    def fastest_within(self, budget_bytes: int) -> Candidate:
        """The fastest schedule whose exact peak fits; of the lowest peak among equals.

        Where everything can be kept nothing is recomputed, be it free.
        """
        if self.baseline.sweep.peak_bytes <= budget_bytes:
            return self.baseline
        fitting = [c for c in self.candidates if c.sweep.peak_bytes <= budget_bytes]
        return min(fitting, key=lambda c: (c.total_s, c.sweep.peak_bytes))

    def describe_peak(self, candidate: Candidate) -> str:
        """Where a schedule's peak is."""
        sweep = candidate.sweep
        peak = sweep.peak_bytes
        if peak == sweep.turn_bytes:
            return "the turn between forward and backward"
        if peak == sweep.end_bytes:
            return "the end of the backward, when all gradients are there"
        return f"operation {candidate.program.calls[sweep.peaks_bytes.index(peak)].op}"

    def emit(self, chosen: Candidate, budget_bytes: int) -> Planned:
        """Write the graphs of ``chosen`` and the plan that tells of them."""
        forward, backward = rewrite(chosen.program, chosen.sweep, BlockModules())
        plan = Plan(
            budget_bytes=budget_bytes,
            least_budget_bytes=self.least.sweep.peak_bytes,
            predicted_peak_bytes=chosen.sweep.peak_bytes,
            predicted_s=chosen.total_s,
            baseline_peak_bytes=self.baseline.sweep.peak_bytes,
            baseline_s=self.baseline.total_s,
            schedule=chosen.schedule,
            timeline=_timeline(chosen),
            chain=self.chain,
            costs=self.costs,
            forward_code=forward.code,
            backward_code=backward.code,
        )
        return Planned(plan, forward, backward)


def _schedules(chain: Chain, costs: Costs, progress: Progress) -> Iterator[Schedule]:
    """Optimal persistent schedules for budgets from the least to all that can be used."""
    # Loading numba takes longer than all else in the package: not at import.
    from fxremat.solvers.rotor import RotorTable, least_budget  # noqa: PLC0415

    full_bytes = simulate(chain, costs, keep_all(len(chain))).peak_bytes
    least_bytes, least = least_budget(chain, costs)
    yield least
    ceiling, done = full_bytes, 0
    while ceiling > least_bytes:
        progress("solving", done, done + 1)
        table = RotorTable.build(chain, costs, max_budget_bytes=ceiling, slots=SLOTS)
        for budget_bytes in table.distinct_budgets():
            solution = table.schedule(budget_bytes)
            if isinstance(solution, Solved):
                yield solution.schedule
        floor = costs.fixed_bytes
        ceiling, done = floor + (ceiling - floor) // 4, done + 1
    progress("solving", done, done)


def _distinct(schedules: Iterable[Schedule]) -> list[Schedule]:
    return list(dict.fromkeys(schedules))


def _seconds(program: Program, costs: Costs, recompute_s: Mapping[int, float]) -> tuple[float, ...]:
    seconds = []
    for call in program.calls:
        stage = costs.stages[call.op.stage]
        if isinstance(call.op, Backward):
            seconds.append(stage.backward_s + recompute_s.get(call.op.stage, 0.0))
        else:
            seconds.append(stage.rebuild_s if call.rebuilds else stage.forward_s)
    return tuple(seconds)


def _timeline(chosen: Candidate) -> Timeline:
    events, now = [], 0.0
    for call, seconds, peak, held in zip(
        chosen.program.calls,
        chosen.seconds,
        chosen.sweep.peaks_bytes,
        chosen.sweep.held_bytes,
        strict=True,
    ):
        events.append(Event(call.op, now, now + seconds, peak, held))
        now += seconds
    return Timeline(tuple(events))
