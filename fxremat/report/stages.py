"""The treatment of each stage by a plan, in figures and as text, and groups of equal stages."""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from itertools import groupby

from fxremat.ir import Backward, Compute, Copy, Forward, Keep, Lane
from fxremat.report.facts import Decided
from fxremat.report.modules import blocks_of, common_module, named, pattern_of, span
from fxremat.report.plan import Plan
from fxremat.units import format_bytes, format_seconds

LONGEST_PATTERN = 32
"""The maximum number of groups in a repeating pattern: a few for each layer of a block."""

MOST_ROWS = 40
"""The maximum number of rows of a table; if there would be more, each block is one row."""

MOST_NAMES = 2
"""The maximum number of operations that are named in a row of a table."""

PARTS = 4
"""Kept shares of blocks are equal if they round to the same multiple of 1 over this number."""


@dataclass(frozen=True, slots=True)
class Run:
    """One execution of the forward of a stage.

    Attributes:
        keep: which tensors it leaves in memory.
        seconds: its duration.
        start: index of the stage whose kept input the sequence of forwards up to this one reads.
        rebuilds: whether the stage's backward is the next operation.
        executed: False if the emitted graphs omit it because its results are unused.
        option: number of its save option, 0 for none.
    """

    keep: Keep
    seconds: float
    start: int
    rebuilds: bool
    executed: bool
    option: int = 0


@dataclass(frozen=True, slots=True)
class StageReport:
    """The treatment of one stage in a step.

    The saved set of a stage consists of the tensors that its forward adds to its input if it keeps
    all that its backward reads.

    Attributes:
        index: index of the stage.
        forward_s: seconds of its whole forward.
        boundary_bytes: bytes of the tensors that it passes to later stages.
        saved_bytes: bytes of its saved set, including the boundary.
        held_bytes: bytes of ``saved_bytes`` that are held from its first forward to its backward.
        single_bytes: bytes of ``held_bytes`` in storages that local search keeps in addition to
            those that the schedule keeps.
        moved_bytes: bytes that are on the host for part of the step.
        rebuild_s: seconds that recomputing it once, before its backward, takes.
        rebuilt_s: seconds that its backward spends on rebuilding.
        runs: its forwards, in order.
        executed: False if the emitted graphs run nothing of it, forward or backward, as for a stage
            that represents the loss point.
        decided: its operations that a policy or a tag decides.
    """

    index: int
    forward_s: float
    boundary_bytes: int
    saved_bytes: int
    held_bytes: int
    single_bytes: int
    moved_bytes: int
    rebuild_s: float
    rebuilt_s: float
    runs: tuple[Run, ...]
    executed: bool
    decided: tuple[Decided, ...] = ()

    @property
    def freed_bytes(self) -> int:
        """Bytes saved for its backward that are not held from its first forward to its backward."""
        return self.saved_bytes - self.held_bytes

    @property
    def is_kept(self) -> bool:
        """Whether all that its backward reads is held from its first forward on."""
        return not self.again and not self.rebuilt_s and not self.freed_bytes

    @property
    def is_kept_in_part(self) -> bool:
        """Whether tensors that are not held are computed again only inside its backward."""
        return not self.again and self.rebuilt_s > 0

    @property
    def again(self) -> tuple[Run, ...]:
        """The executions of its forward after the first one, without those that are omitted."""
        return tuple(run for run in self.runs[1:] if run.executed)

    @property
    def extra_s(self) -> float:
        """Seconds spent on recomputing the stage."""
        return sum(run.seconds for run in self.again) + self.rebuilt_s


def report_stages(plan: Plan) -> tuple[StageReport, ...]:
    """Return a report of each stage, in forward order."""
    chain, events = plan.chain, plan.timeline.events
    runs = _runs(plan)
    backward_s = {
        event.op.stage: event.end_s - event.start_s
        for event in events
        if isinstance(event.op, Backward)
    }
    moved_bytes = [0] * len(chain)
    for event in events:
        if isinstance(event.op, Copy) and event.lane is Lane.D2H:
            moved_bytes[event.op.stage] += event.op.nbytes
    reports = []
    for index in range(len(chain)):
        saved, costs = chain.saved_set(index), plan.costs.stages[index]
        saved_bytes = chain.nbytes(saved)
        held_bytes = chain.nbytes(saved & _held(plan, runs, index)) + plan.held_bytes[index]
        # A backward that runs while something is copied is slower, too.
        in_part = runs[index][-1].option > 0
        rebuilt_s = backward_s.get(index, 0.0) - costs.backward_s if in_part else 0.0
        reports.append(
            StageReport(
                index=index,
                forward_s=costs.forward_s,
                boundary_bytes=chain.nbytes(chain.boundaries[index + 1]),
                saved_bytes=saved_bytes,
                held_bytes=min(held_bytes, saved_bytes),
                single_bytes=plan.held_bytes[index],
                moved_bytes=moved_bytes[index],
                rebuild_s=costs.rebuild_s,
                rebuilt_s=rebuilt_s if rebuilt_s > 1e-9 else 0.0,  # less is a rounding error
                runs=tuple(runs[index]),
                executed=index in backward_s or any(run.executed for run in runs[index]),
                decided=tuple(own for own in plan.decided if own.stage == index),
            )
        )
    return tuple(reports)


def executed_stages(plan: Plan) -> tuple[StageReport, ...]:
    """Return reports of the stages that the emitted graphs run."""
    return tuple(report for report in report_stages(plan) if report.executed)


def _held(plan: Plan, runs: list[list[Run]], index: int) -> frozenset[int]:
    """Return the storages of a stage that are held after its first forward.

    Args:
        plan: the plan.
        runs: the forwards of each stage.
        index: the index of the stage.
    """
    chain, first = plan.chain, runs[index][0]
    if first.keep is Keep.ALL:
        options = plan.costs.stages[index].options
        kept = options[first.option - 1].kept if first.option else chain.stages[index].saved
        return chain.added(index, kept)
    if index + 1 < len(chain) and runs[index + 1][0].keep is not Keep.NONE:
        return frozenset(chain.boundaries[index + 1])
    return frozenset()


def _runs(plan: Plan) -> list[list[Run]]:
    """Return the forwards of each stage in a plan, by index of the stage.

    A forward that follows the forward of the previous stage reads its result. Any other forward,
    and the first one of a branch, reads an input that was held.
    """
    ops = plan.schedule.computations
    runs: list[list[Run]] = [[] for _ in range(len(plan.chain))]
    # In the order of the schedule, but for operations that the graphs leave out.
    events = deque(event for event in plan.timeline.events if not isinstance(event.op, Copy))
    start = 0
    before: Compute | None = None
    for op, after in zip(ops, (*ops[1:], None), strict=True):
        event = events.popleft() if events and events[0].op == op else None
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


def describe(*stages: StageReport) -> str:
    """Return the treatment of a stage, or of several stages with the same treatment, as text."""
    words = _describe_computations(stages[0]) if len(stages) == 1 else _describe_all(stages)
    moved_bytes = sum(stage.moved_bytes for stage in stages)
    return words + f", {format_bytes(moved_bytes)} on the host meanwhile" * (moved_bytes > 0)


def _describe_all(stages: tuple[StageReport, ...]) -> str:
    saved, held = sum(s.saved_bytes for s in stages), sum(s.held_bytes for s in stages)
    again = [stage for stage in stages if stage.extra_s > 0]
    if not again:
        return "kept" if held == saved else _kept(held, saved)
    most = max(len(stage.again) for stage in again)
    words = "computed again" if most else "rebuilt"
    words += f" up to {most} times" * (most > 1)
    if len(again) < len(stages):
        words += f" in {len(again)} of {len(stages)} stages"
    return f"{_kept(held, saved)}, rest {words}" if held else words


def _kept(part: int, whole: int) -> str:
    return f"{format_bytes(part)} of {format_bytes(whole)} kept" if part else "nothing kept"


def _describe_computations(stage: StageReport) -> str:
    """Return text that says whether a stage is kept or how it is recomputed."""
    if not stage.runs[0].executed:
        return "nothing"
    if stage.is_kept:
        return "kept"
    keeps_input = stage.runs[0].keep is Keep.INPUT
    if not stage.again:
        kept = _kept(stage.held_bytes, stage.saved_bytes)
        if stage.is_kept_in_part:
            return kept + (", rest rebuilt" if stage.held_bytes else ", rebuilt in its backward")
        return "checkpoint" if keeps_input else kept
    if len(stage.again) > 1:
        words = f"recomputed {len(stage.again)} times"
    else:
        last = stage.again[0]
        words = "rebuilt right before its backward" if last.rebuilds else "recomputed once"
    words += _sources(stage)
    if stage.single_bytes:
        words += f", {format_bytes(stage.single_bytes)} of it kept"
    return f"checkpoint, {words}" if keeps_input else words


def _sources(stage: StageReport) -> str:
    """Return text that names the stages from whose kept inputs a stage is recomputed.

    Return ``""`` if that is only the stage itself.
    """
    starts = sorted({run.start for run in stage.again})
    if starts == [stage.index]:
        return ""
    if len(starts) == 1:
        return f" from stage {starts[0]}'s checkpoint"
    listed = f"{', '.join(map(str, starts[:-1]))} and {starts[-1]}"
    return f" from the checkpoints of stages {listed}"


def explain(*stages: StageReport) -> str:
    """Return text with the bytes and seconds that the treatment of ``stages`` takes or saves."""
    saved, freed = sum(s.saved_bytes for s in stages), sum(s.freed_bytes for s in stages)
    extra_s = sum(stage.extra_s for stage in stages)
    if not any(stage.runs[0].executed for stage in stages):
        return "its forward computes nothing"
    if all(stage.is_kept for stage in stages):
        if saved == 0:
            return "keeping it takes no memory"
        rebuild_s = sum(stage.rebuild_s for stage in stages)
        cost = f", {format_seconds(rebuild_s)} to recompute" if rebuild_s else ""
        return f"takes {format_bytes(saved)}{cost}"
    if not any(stage.again or stage.is_kept_in_part for stage in stages):
        return "its backward needs nothing more"
    cost = f"costs {format_seconds(extra_s)}" if extra_s else "costs no time"
    return f"frees {format_bytes(freed)}, {cost}" if freed else f"needed by later stages, {cost}"


def deciders(*stages: StageReport) -> str:
    """Return text that names the operations of ``stages`` that a policy or a tag decided.

    The planner decided about all others. If it decided about all, return ``"planner"``.
    """
    by_decider: dict[str, dict[str, list[str]]] = {}
    for own in (each for stage in stages for each in stage.decided):
        by_decider.setdefault(own.by, {}).setdefault(own.answer, []).append(own.operation)
    return (
        "; ".join(
            f"{by}: " + ", ".join(f"{answer} {_listed(names)}" for answer, names in answers.items())
            for by, answers in by_decider.items()
        )
        or "planner"
    )


def _listed(names: Sequence[str]) -> str:
    """Return ``names`` as text, or, above ``MOST_NAMES``, only their number."""
    return ", ".join(names) if len(names) <= MOST_NAMES else f"{len(names)} operations"


@dataclass(frozen=True, slots=True)
class StageGroup:
    """Stages with the same treatment: a row of a table.

    Attributes:
        runs: one run of consecutive stages, or one for each repetition of a pattern, in forward
            order.
        module: path of the module that contains them.
    """

    runs: tuple[tuple[StageReport, ...], ...]
    module: str

    @property
    def stages(self) -> tuple[StageReport, ...]:
        """All stages of the group."""
        return tuple(stage for run in self.runs for stage in run)

    @property
    def label(self) -> str:
        """The indices of its stages as text, such as ``"3"``, ``"3–14"``, or ``"3, 7 … 43"``."""
        names = [span(run[0].index, run[-1].index) for run in self.runs]
        first, last = self.stages[0].index, self.stages[-1].index
        if last - first == len(self.stages) - 1:
            return span(first, last)
        return ", ".join(names) if len(names) < 3 else f"{names[0]} … {names[-1]}"


def group_alike(stages: Sequence[StageReport], modules: Sequence[str]) -> tuple[StageGroup, ...]:
    """Return all of ``stages`` in groups, in the order of each group's first one.

    Consecutive stages of one block are a run if their treatment is the same. If runs repeat in the
    same order, those at the same place of each repetition are one group.

    Args:
        stages: the stages that run.
        modules: path of the module of each stage; empty if unknown.
    """
    blocks = blocks_of(modules) if modules else [""] * (stages[-1].index + 1 if stages else 0)
    groups = _grouped(_alike_runs(stages, blocks), modules)
    if len(groups) > MOST_ROWS:
        whole = groupby(stages, key=lambda stage: blocks[stage.index])
        groups = _grouped([tuple(own) for _, own in whole], modules)
    return groups


def _alike_runs(
    stages: Sequence[StageReport], blocks: Sequence[str]
) -> list[tuple[StageReport, ...]]:
    """Return runs of consecutive stages of one block with the same treatment.

    A stage of which nothing is kept or recomputed belongs to the run before it.

    Args:
        stages: the stages that run.
        blocks: the block of each stage, by index of the stage.
    """
    runs: list[list[StageReport]] = []
    block, treatment = "", _treatment(stages[0]) if stages else None
    for stage in stages:
        own_block, own = blocks[stage.index], _treatment(stage)
        if not runs or block != own_block or own not in (treatment, None):
            runs.append([])
            treatment = own
        block = own_block
        runs[-1].append(stage)
    return [tuple(run) for run in runs]


def _treatment(stage: StageReport) -> Hashable:
    """Return a value that stages have in common if they are treated alike.

    It says whether the stage is recomputed, kept in part and moved to the host. ``None``: nothing
    of the stage is kept or recomputed.
    """
    if stage.extra_s == 0 and stage.held_bytes == 0:
        return None
    in_part = 0 < stage.held_bytes < stage.saved_bytes
    return stage.extra_s > 0, in_part, stage.moved_bytes > 0


def _grouped(
    runs: Sequence[tuple[StageReport, ...]], modules: Sequence[str]
) -> tuple[StageGroup, ...]:
    """Return a group for each run of stages, or one for all its repetitions in a pattern.

    Args:
        runs: runs of consecutive stages with the same treatment.
        modules: path of the module of each stage; empty if unknown.
    """
    places = [
        common_module(modules[stage.index] for stage in run) if modules else "" for run in runs
    ]
    keys = [(pattern_of(place), _share(run)) for place, run in zip(places, runs, strict=True)]
    groups = []
    begin = 0
    while begin < len(runs):
        length, count = _repetition(keys, begin)
        for place in range(begin, begin + length):
            own = slice(place, begin + length * count, length)
            groups.append(StageGroup(tuple(runs[own]), named(places[own])))
        begin += length * count
    return tuple(groups)


def _share(run: tuple[StageReport, ...]) -> Hashable:
    """Return the treatments in a run of stages, and the share kept as a multiple of 1/``PARTS``."""
    treatments = frozenset(map(_treatment, run)) - {None}
    saved = sum(stage.saved_bytes for stage in run) or 1
    held = sum(stage.held_bytes for stage in run)
    return treatments, round(PARTS * held / saved)


def _repetition(keys: Sequence[Hashable], begin: int) -> tuple[int, int]:
    """Return the length and the number of repetitions of the pattern of ``keys`` at ``begin``.

    It is the pattern whose repetitions reach furthest; (1, 1) if there are none.
    """
    best, furthest = (1, 1), 1
    for length in range(1, min(LONGEST_PATTERN, (len(keys) - begin) // 2) + 1):
        same = 0
        while begin + length + same < len(keys) and (
            keys[begin + same] == keys[begin + length + same]
        ):
            same += 1
        count = same // length + 1
        if count > 1 and length * count > furthest:
            best, furthest = (length, count), length * count
    return best
