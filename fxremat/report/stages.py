"""What a plan does with each stage, read off its schedule and timeline."""

from __future__ import annotations

from dataclasses import dataclass

from fxremat.ir import Backward, Compute, Copy, Event, Forward, Keep, Lane
from fxremat.report.facts import PlanFacts


@dataclass(frozen=True, slots=True)
class Run:
    """One forward of a stage.

    Attributes:
        keep: what it leaves in memory.
        seconds: how long it takes.
        start: the stage whose held input this run of forwards set out from.
        rebuilds: the stage's backward is the next operation.
        option: which save option, 0 for none.
        executed: False where the emitted graphs leave it out: nobody reads what it gives.
    """

    keep: Keep
    seconds: float
    start: int
    rebuilds: bool
    executed: bool
    option: int = 0


@dataclass(frozen=True, slots=True)
class StageStory:
    """What happens to one stage in a step.

    Attributes:
        index: which stage.
        name: its name.
        forward_s: seconds of its whole forward.
        boundary_bytes: bytes that cross the cut after it.
        saved_bytes: bytes that keeping its saved set takes, the boundary included.
        freed_bytes: bytes that are not held between its first forward and its backward,
            compared with keeping its saved set; 0 if that is kept.
        held_bytes: of ``saved_bytes``, held all that time.
        single_bytes: of those, kept storage by storage, beside what the schedule keeps.
        moved_bytes: on the host for a while.
        rebuild_s: seconds that recomputing it once, before its backward, takes.
        rebuilt_s: seconds that its backward spends on rebuilding.
        runs: its forwards, in order.
        executed: False where the emitted graphs run nothing of it, forward or backward: it
            may stand for the turn.
    """

    index: int
    name: str
    forward_s: float
    boundary_bytes: int
    saved_bytes: int
    freed_bytes: int
    held_bytes: int
    single_bytes: int
    moved_bytes: int
    rebuild_s: float
    rebuilt_s: float
    runs: tuple[Run, ...]
    executed: bool

    @property
    def is_kept(self) -> bool:
        """Whether all of its saved set is held from its first forward to its backward."""
        return not self.again and not self.rebuilt_s and self.held_bytes == self.saved_bytes

    @property
    def is_kept_in_part(self) -> bool:
        """Whether its backward alone rebuilds what is not held."""
        return not self.again and self.rebuilt_s > 0

    @property
    def again(self) -> tuple[Run, ...]:
        """Its recomputations."""
        return tuple(run for run in self.runs[1:] if run.executed)

    @property
    def extra_s(self) -> float:
        """Seconds spent on recomputing it."""
        return sum(run.seconds for run in self.again) + self.rebuilt_s


def tell_stages(plan: PlanFacts) -> tuple[StageStory, ...]:
    """One story a stage, in forward order."""
    chain = plan.chain
    runs = _runs(plan)
    backward_s = {
        event.op.stage: event.end_s - event.start_s
        for event in plan.timeline.events
        if isinstance(event.op, Backward)
    }
    moved_bytes = [0] * len(chain)
    for event in plan.timeline.events:
        if isinstance(event.op, Copy) and event.lane is Lane.D2H:
            moved_bytes[event.op.stage] += event.op.nbytes
    stories = []
    for index, stage in enumerate(chain.stages):
        saved = chain.saved_set(index)
        costs = plan.costs.stages[index]
        saved_bytes = chain.nbytes(saved)
        held_bytes = chain.nbytes(saved & _held(plan, runs, index)) + plan.held_bytes[index]
        held_bytes = min(held_bytes, saved_bytes)
        # A backward beside copies is slower, too.
        in_part = runs[index][-1].option > 0
        rebuilt_s = max(backward_s.get(index, 0.0) - costs.backward_s, 0.0) if in_part else 0.0
        stories.append(
            StageStory(
                index=index,
                name=stage.name,
                forward_s=costs.forward_s,
                boundary_bytes=chain.nbytes(chain.boundaries[index + 1]),
                saved_bytes=saved_bytes,
                freed_bytes=saved_bytes - held_bytes,
                held_bytes=held_bytes,
                single_bytes=plan.held_bytes[index],
                moved_bytes=moved_bytes[index],
                rebuild_s=costs.rebuild_s,
                rebuilt_s=rebuilt_s if rebuilt_s > 1e-9 else 0.0,  # else from rounding
                runs=tuple(runs[index]),
                executed=index in backward_s or any(run.executed for run in runs[index]),
            )
        )
    return tuple(stories)


def _held(plan: PlanFacts, runs: list[list[Run]], index: int) -> frozenset[int]:
    """What is held of the saved set of stage ``index`` after the first forward."""
    chain, first = plan.chain, runs[index][0]
    if first.keep is Keep.ALL:
        options = plan.costs.stages[index].options
        kept = options[first.option - 1].kept if first.option else chain.stages[index].saved
        return chain.added(index, kept)
    if index + 1 < len(chain) and runs[index + 1][0].keep is not Keep.NONE:
        return frozenset(chain.boundaries[index + 1])
    return frozenset()


def _runs(plan: PlanFacts) -> list[list[Run]]:
    """The forwards of each stage.

    A forward whose predecessor is the forward of the stage before reads what that one
    wrote; any other reads an input that was held, so a run of forwards starts there, and so
    it does at the beginning of a branch.
    """
    ops = plan.schedule.computations
    runs: list[list[Run]] = [[] for _ in range(len(plan.chain))]
    start = 0
    before: Compute | None = None
    for op, event, after in zip(ops, _events(plan), (*ops[1:], None), strict=True):
        if isinstance(op, Forward):
            goes_on = isinstance(before, Forward) and before.stage + 1 == op.stage
            if not goes_on or op.stage in plan.branch_ends[:-1]:
                start = op.stage
            seconds = 0.0 if event is None else event.end_s - event.start_s
            rebuilds = after == Backward(op.stage)
            run = Run(op.keep, seconds, start, rebuilds, event is not None, op.option)
            runs[op.stage].append(run)
        before = op
    return runs


def _events(plan: PlanFacts) -> list[Event | None]:
    """For each operation of the schedule the event that carries it out, if one does.

    Events are in the order of the schedule, so the first that fits is the one.
    """
    found: list[Event | None] = []
    events = [event for event in plan.timeline.events if not isinstance(event.op, Copy)]
    for op in plan.schedule.computations:
        fits = bool(events) and events[0].op == op
        found.append(events.pop(0) if fits else None)
    return found
