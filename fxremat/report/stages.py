"""What a plan does with each stage, read off its schedule and timeline."""

from __future__ import annotations

from dataclasses import dataclass

from fxremat.ir import Backward, Compute, Event, Forward, Keep
from fxremat.report.plan import Plan


@dataclass(frozen=True, slots=True)
class Run:
    """One forward of a stage.

    Attributes:
        keep: what it leaves in memory.
        seconds: how long it takes.
        start: the stage whose held input this run of forwards set out from.
        rebuilds: the stage's backward is the next operation.
        executed: False where the emitted graphs leave it out: nobody reads what it gives.
    """

    keep: Keep
    seconds: float
    start: int
    rebuilds: bool
    executed: bool


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
        rebuild_s: seconds that recomputing it once, before its backward, takes.
        runs: its forwards, in order.
    """

    index: int
    name: str
    forward_s: float
    boundary_bytes: int
    saved_bytes: int
    freed_bytes: int
    rebuild_s: float
    runs: tuple[Run, ...]

    @property
    def is_kept(self) -> bool:
        """Whether the first forward keeps all that the backward needs."""
        return self.runs[0].keep is Keep.ALL

    @property
    def again(self) -> tuple[Run, ...]:
        """Its recomputations."""
        return tuple(run for run in self.runs[1:] if run.executed)

    @property
    def extra_s(self) -> float:
        """Seconds spent on recomputing it."""
        return sum(run.seconds for run in self.again)


def tell_stages(plan: Plan) -> tuple[StageStory, ...]:
    """One story a stage, in forward order."""
    chain = plan.chain
    runs = _runs(plan)
    stories = []
    for index, stage in enumerate(chain.stages):
        saved = chain.saved_set(index)
        costs = plan.costs.stages[index]
        stories.append(
            StageStory(
                index=index,
                name=stage.name,
                forward_s=costs.forward_s,
                boundary_bytes=chain.nbytes(chain.boundaries[index + 1]),
                saved_bytes=chain.nbytes(saved),
                freed_bytes=chain.nbytes(saved - _held(plan, runs, index)),
                rebuild_s=costs.rebuild_s,
                runs=tuple(runs[index]),
            )
        )
    return tuple(stories)


def _held(plan: Plan, runs: list[list[Run]], index: int) -> frozenset[int]:
    """What is held of the saved set of stage ``index`` after the first forward."""
    chain = plan.chain
    if runs[index][0].keep is Keep.ALL:
        return chain.saved_set(index)
    if index + 1 < len(chain) and runs[index + 1][0].keep is not Keep.NONE:
        return frozenset(chain.boundaries[index + 1])
    return frozenset()


def _runs(plan: Plan) -> list[list[Run]]:
    """The forwards of each stage.

    A forward whose predecessor is the forward of the stage before reads what that one
    wrote; any other reads an input that was held, so a run of forwards starts there.
    """
    ops = plan.schedule.computations
    runs: list[list[Run]] = [[] for _ in range(len(plan.chain))]
    start = 0
    before: Compute | None = None
    for op, event, after in zip(ops, _events(plan), (*ops[1:], None), strict=True):
        if isinstance(op, Forward):
            if not (isinstance(before, Forward) and before.stage + 1 == op.stage):
                start = op.stage
            seconds = 0.0 if event is None else event.end_s - event.start_s
            rebuilds = after == Backward(op.stage)
            runs[op.stage].append(Run(op.keep, seconds, start, rebuilds, event is not None))
        before = op
    return runs


def _events(plan: Plan) -> list[Event | None]:
    """For each operation of the schedule the event that carries it out, if one does.

    Events are in the order of the schedule, so the first that fits is the one.
    """
    found: list[Event | None] = []
    events = list(plan.timeline.events)
    for op in plan.schedule.computations:
        fits = bool(events) and events[0].op == op
        found.append(events.pop(0) if fits else None)
    return found
