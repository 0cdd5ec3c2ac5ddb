"""When collectives start and are waited for: as far apart as there is room in the budget.

What a decision costs counts collectives as if nothing ran meanwhile. Here each starts earlier, call
by call, until the calls that it passes take as long as its message, and is waited for later in the
same way. It passes a call only where the exact sweep finds room for what it holds meanwhile.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import fx

from fxremat import torch_compat
from fxremat.ir import MeasuredLink, Move, Shift, Timeline
from fxremat.passes.emit.program import Call, Program, blocks_of, link
from fxremat.passes.stages.block import Block
from fxremat.planner.allocations import Allocated
from fxremat.planner.candidates import Candidate, Evaluation
from fxremat.planner.footprints import Footprints
from fxremat.planner.handed import handed_over
from fxremat.planner.moves import replay
from fxremat.planner.search import Search

ROUNDS = 4
"""How often room is looked for again, where the allocator hands out more than is asked for."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """A candidate that is to be emitted.

    Attributes:
        candidate: what was decided.
        program: its calls.
        evaluation: memory and seconds of each.
        timeline: when calls and copies are predicted to run.
        allocated: what it takes of the device.
    """

    candidate: Candidate
    program: Program
    evaluation: Evaluation
    timeline: Timeline
    allocated: Allocated


def may_overlap(device: torch.device) -> bool:
    """Whether collectives of a device's process group may be under way while it computes.

    Not on a CPU: threads of gloo are at work then, on the processors that compute, and torch 2.13
    corrupts memory where a profiler looks at both, torch.profiler as well as our own log.
    """
    return device.type != "cpu"


def overlap_within(
    search: Search,
    candidate: Candidate,
    *,
    link: MeasuredLink | None,
    budget_bytes: int,
    allowed: bool = True,
) -> Outcome:
    """Let collectives of a candidate overlap with its calls.

    Args:
        search: where the candidate was found.
        candidate: what was decided.
        link: on which storages travel.
        budget_bytes: that the candidate keeps to.
        allowed: collectives may overlap; else they stay where the schedule has them.
    """
    program = search.evaluator.program(candidate)
    evaluation = search.evaluator.evaluation(candidate)
    line = program.line
    messages_s = {line.nodes[i]: seconds for i, seconds in search.measured.costs.messages_s}
    aim_bytes = budget_bytes
    for _ in range(ROUNDS if allowed and messages_s else 0):
        state = _Overlap.of(program, evaluation, search, candidate.moves, messages_s, aim_bytes)
        state.start_early()
        state.wait_late()
        changed = replace(program, calls=tuple(state.calls))
        found = _chosen(search, candidate, changed, state.found(evaluation), link, state.shifts)
        over_bytes = found.allocated.counted_bytes(search.allocations.budget_on) - budget_bytes
        if over_bytes <= 0:
            return found
        aim_bytes -= over_bytes
    return _chosen(search, candidate, program, evaluation, link)


def _chosen(
    search: Search,
    candidate: Candidate,
    program: Program,
    evaluation: Evaluation,
    link: MeasuredLink | None,
    shifts: Sequence[Shift] = (),
) -> Outcome:
    """A candidate with ``shifts``, whose calls and what they come to are known."""
    timeline = replay(evaluation, program.line, candidate.moves, link)
    candidate = replace(
        candidate,
        peak_bytes=evaluation.peak_bytes,
        total_s=timeline.makespan_s,
        shifts=tuple(shifts),
    )
    taken = search.allocations.of(candidate, lambda: program)
    return Outcome(candidate, program, evaluation, timeline, taken)


@dataclass(slots=True)
class _Overlap:
    """Calls as they are changed.

    Attributes:
        program: as it was.
        footprints: of its line.
        handed: gradients whose memory nobody holds once they are made and handed over.
        released: storages of tangents that their last reader releases.
        messages_s: collectives, and those seconds of each that others take.
        budget_bytes: what no call's peak may pass, by sums of bytes.
        travelling: storages that travel.
        calls: so far.
        peaks_bytes, held_bytes: during and after each.
        needed: tensors that are read after each.
        spare_s: of each, with no message beside it yet.
        left_s: of messages of a call's collectives, with nothing beside them yet.
        shifts: so far.
    """

    program: Program
    footprints: Footprints
    handed: frozenset[fx.Node]
    released: frozenset[int]
    messages_s: Mapping[fx.Node, float]
    budget_bytes: int
    travelling: frozenset[int]
    calls: list[Call]
    peaks_bytes: list[int]
    held_bytes: list[int]
    spare_s: list[float]
    needed: list[frozenset[fx.Node]]
    left_s: dict[tuple[int, fx.Node], float] = field(default_factory=dict)
    shifts: list[Shift] = field(default_factory=list)

    @staticmethod
    def of(
        program: Program,
        evaluation: Evaluation,
        search: Search,
        moves: Sequence[Move],
        messages_s: Mapping[fx.Node, float],
        budget_bytes: int,
    ) -> _Overlap:
        """Nothing is changed yet."""
        joint, calls = program.line.joint, list(program.calls)
        handed = handed_over(program.line, search.setting.context_bytes)
        results = (*joint.forward_outputs, *(n for n in joint.backward_outputs if n not in handed))
        own_s = zip(calls, evaluation.seconds, strict=True)
        state = _Overlap(
            program,
            search.allocations.footprints,
            handed,
            search.setting.context_bytes.releases(joint),
            messages_s,
            budget_bytes,
            frozenset(move.storage for move in moves),
            calls,
            list(evaluation.peaks_bytes),
            list(evaluation.held_bytes),
            [seconds - _messages_s(call.block, messages_s) for call, seconds in own_s],
            [frozenset(n for n in results if isinstance(n, fx.Node))] * len(calls),
        )
        _, state.needed = state._linked(0, len(calls) - 1, {})
        return state

    def found(self, evaluation: Evaluation) -> Evaluation:
        """What was found of the program, as it is now."""
        return replace(
            evaluation,
            peaks_bytes=tuple(self.peaks_bytes),
            held_bytes=tuple(self.held_bytes),
            seconds=_seconds(evaluation, self.program.calls, self.calls, self.messages_s),
        )

    def start_early(self) -> None:
        """Collectives start as early as there is room, and need of it."""
        for index, call in enumerate(self.program.calls):
            for node in filter(self.messages_s.__contains__, call.block.nodes):
                first = self.program.turn if index >= self.program.turn else 0
                self._pass(node, node, index, range(index - 1, first - 1, -1))

    def wait_late(self) -> None:
        """What is left of a message overlaps with calls before its wait, in the same way."""
        for index in reversed(range(len(self.calls))):
            for node in filter(
                torch_compat.is_wait, reversed(self.program.calls[index].block.nodes)
            ):
                last = self.program.turn if index < self.program.turn else len(self.calls)
                self._pass(node, torch_compat.awaited(node), index, range(index + 1, last))

    def _pass(self, node: fx.Node, collective: fx.Node, index: int, others: Sequence[int]) -> None:
        """A collective, or its wait, goes from call ``index`` to others, one after the other."""
        left_s = self.left_s.get((index, collective), self.messages_s.get(collective, 0.0))
        at, number = index, self.program.line.order[node]
        for target in others:
            if left_s <= 0 or not self._go(Shift(number, at, target)):
                break
            at = target
            beside_s = min(left_s, self.spare_s[at])
            self.spare_s[at] -= beside_s
            left_s -= beside_s
        if at == index and left_s > 0:
            self._go(Shift(number, at, at))
        self.left_s[index, collective] = left_s

    def _go(self, shift: Shift) -> bool:
        """Change calls if that is possible, and there is room."""
        blocks = blocks_of(self.calls, self.program.line, shift)
        if all(block.nodes == self.calls[i].block.nodes for i, block in blocks.items()):
            return False
        new = blocks[shift.target].reads - self.calls[shift.target].block.reads
        if new & self.travelling:
            return False
        low, high = sorted((shift.source, shift.target))
        calls, needed = self._linked(low, high, blocks)
        more_bytes, peaks, held = 0, [], []
        for index, call in zip(range(low, high + 1), calls, strict=True):
            before, now = self._footprint(self.calls[index]), self._footprint(call)
            peaks.append(self.peaks_bytes[index] + more_bytes + now[0] - before[0])
            more_bytes += now[1] - before[1]
            held.append(self.held_bytes[index] + more_bytes)
        if more_bytes or max(peaks) > self.budget_bytes:  # what comes after has what it had
            return False
        these = slice(low, high + 1)
        self.calls[these], self.needed[these] = calls, needed
        self.peaks_bytes[these], self.held_bytes[these] = peaks, held
        self.shifts.append(shift)
        return True

    def _footprint(self, call: Call) -> tuple[int, int]:
        """Most bytes during a call, and bytes after it, less those before it."""
        found = self.footprints.of(call.block, kept=call.kept)
        nbytes = self.program.line.joint.storages.nbytes
        return found.peak_bytes, found.change_bytes - sum(nbytes[s] for s in call.handed)

    def _linked(
        self, low: int, high: int, blocks: Mapping[int, Block]
    ) -> tuple[list[Call], list[frozenset[fx.Node]]]:
        """Calls ``low`` to ``high`` with other blocks, and what is read after each of them."""
        calls = [
            replace(self.calls[i], block=blocks.get(i, self.calls[i].block))
            for i in range(low, high + 1)
        ]
        return link(self.program.line, calls, self.handed, self.released, self.needed[high])


def _messages_s(block: Block, messages_s: Mapping[fx.Node, float]) -> float:
    return sum(messages_s.get(node, 0.0) for node in block.nodes)


def _seconds(
    evaluation: Evaluation,
    before: Sequence[Call],
    calls: Sequence[Call],
    messages_s: Mapping[fx.Node, float],
) -> tuple[float, ...]:
    """Of each call, with what it waits for: messages go one after the other, beside the calls."""
    found, now, free_s = [], 0.0, 0.0
    ends_s: dict[fx.Node, float] = {}
    for index, call in enumerate(calls):
        began, block = now, call.block
        own = _messages_s(before[index].block, messages_s)
        there = {*block.nodes}
        awaited = {torch_compat.awaited(n): n for n in block.nodes if torch_compat.is_wait(n)}
        late = [c for c, wait in awaited.items() if wait in block.guests]
        for node in block.nodes[: block.front]:
            if node in messages_s:
                free_s = ends_s[node] = max(free_s, now) + messages_s[node]
        for node in awaited:
            if node not in late and (node not in there or node in ends_s):
                now = max(now, ends_s.pop(node, now))
        now += evaluation.seconds[index] - own
        for node in block.nodes[block.front :]:
            if node in messages_s:
                free_s = ends_s[node] = max(free_s, now) + messages_s[node]
                now = max(now, ends_s.pop(node)) if node in awaited else now
        for node in late:
            now = max(now, ends_s.pop(node, now))
        found.append(now - began)
    return tuple(found)
