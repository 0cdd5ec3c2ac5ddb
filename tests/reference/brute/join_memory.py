"""What memory holds during the exhaustive search of joins, see ``join``."""

from __future__ import annotations

from typing import NamedTuple

from fxremat.ir import JoinProblem, StageCosts
from tests.reference.brute.instances import Instances, union


class State(NamedTuple):
    """Memory between two operations; values are bit masks of storage instances.

    Attributes:
        levels: of each line: the backwards of its stages from there on are done.
        last_ran: the trunk's last stage has run. All others have where it matters.
        pending: the operation before was a second ``F_all`` of the stage whose backward may
            come next. That may not follow: together they are a rebuild, a step of its own.
        at: of each line, the boundary in flight, -1 if none.
        flight: their values.
        kept: of each stage, its boundary if kept, else -1.
        saved: of each stage, its saved set with the boundary after it if held, else -1.
        order: stages whose boundary is kept, the one last read or written at the end.
        option: the save option of each saved set that is held, 0 where none is.
    """

    levels: tuple[int, ...]
    last_ran: bool
    pending: bool
    at: tuple[int, ...]
    flight: tuple[int, ...]
    kept: tuple[int, ...]
    saved: tuple[int, ...]
    order: tuple[int, ...]
    option: tuple[int, ...]


class Held:
    """A join, and what its states hold."""

    def __init__(self, problem: JoinProblem) -> None:
        join = problem.join
        self.problem = problem
        self.lines = join.lines
        self.loss_point = len(self.lines) - 1  # the trunk
        self.first = join.first_stages
        self.costs: list[StageCosts] = [c for stages in problem.costs.lines for c in stages]
        self.sets = [[frozenset(ids) for ids in line.boundaries] for line in self.lines]
        self.lengths = [len(line) for line in self.lines]
        # Of a storage the instances in boundaries that have it, in as many saved sets and one
        # more, in one in flight on either line, and a new one may differ.
        runs = [i for line in self.lines for ids in line.boundaries for i in set(ids)]
        copies = 2 * max(map(runs.count, set(runs)), default=0) + 4
        self.instances = Instances(join.storages, copies)
        self.within = [[self.instances.within(ids) for ids in sets] for sets in self.sets]
        self.touched = [
            [
                [at | frozenset(kept) for kept in (stage.saved, *(o.kept for o in cost.options))]
                for at, stage, cost in zip(sets[1:], line.stages, stages, strict=True)
            ]
            for sets, line, stages in zip(self.sets, self.lines, problem.costs.lines, strict=True)
        ]

    def read(self, state: State, line: int, i: int) -> tuple[int, bool] | None:
        """The value that a reader of boundary ``i`` gets, and whether it was a kept one."""
        if i == 0 and line == self.loss_point:
            return self.meet(state)
        stage = self.first[line] + i
        if state.at[line] == i:
            return state.flight[line], False
        if state.kept[stage] >= 0:
            return state.kept[stage], True
        if i and state.saved[stage - 1] >= 0:
            return state.saved[stage - 1] & self.within[line][i], False
        return None

    def meet(self, state: State) -> tuple[int, bool] | None:
        """Boundary 0 of the trunk, put together from the branches' ends."""
        met, from_kept = 0, False
        kept = state.kept[self.first[self.loss_point]]
        for b in range(self.loss_point):
            end = self.lengths[b]
            last = self.first[b] + end - 1
            if state.at[b] == end:
                value = state.flight[b]
            elif kept >= 0:
                value, from_kept = kept, True
            elif state.saved[last] >= 0:
                value = state.saved[last]
            else:
                return None
            met |= value & self.within[b][end]
        return met, from_kept

    def is_held(self, state: State, line: int, boundary: int) -> bool:
        """Whether a boundary is kept or in a held saved set."""
        stage = self.first[line] + boundary
        if state.saved[stage - 1] >= 0:
            return True
        if boundary < self.lengths[line]:
            return state.kept[stage] >= 0
        return line != self.loss_point and state.kept[self.first[self.loss_point]] >= 0

    def landed(self, state: State, line: int, reads: int) -> State:
        """Without what the line has in flight and an operation reading ``reads`` does not read."""
        if state.at[line] == reads:
            return state
        return state._replace(at=put(state.at, line, -1), flight=put(state.flight, line, 0))

    def without_ends(self, state: State) -> State:
        """Without the branches' ends that are in flight."""
        at, flight = list(state.at), list(state.flight)
        for b in range(self.loss_point):
            if at[b] == self.lengths[b]:
                at[b], flight[b] = -1, 0
        return state._replace(at=tuple(at), flight=tuple(flight))

    def held(self, state: State) -> int:
        """All instances in memory."""
        return union((*state.flight, *state.kept, *state.saved))

    def total(self, state: State, more: int) -> int:
        """Bytes of what is held and of ``more``, with gradients and fixed bytes."""
        nbytes = self.instances.nbytes(self.held(state) | more)
        return nbytes + self.problem.costs.fixed_bytes + self.gradient_bytes(state)

    def gradient_bytes(self, state: State) -> int:
        """What the backwards that are done have left."""
        if state.levels[self.loss_point]:
            return self.costs[
                self.first[self.loss_point] + state.levels[self.loss_point] - 1
            ].gradient_bytes
        costs = self.problem.costs
        held = costs.trunk_done_bytes
        for b, done in enumerate(costs.left_bytes):
            level = state.levels[b]
            held += self.costs[self.first[b] + level - 1].gradient_bytes if level else done
        return held

    def line_of(self, stage: int) -> int:
        """The line of a stage."""
        return next(b for b in range(self.loss_point + 1) if stage < self.first[b + 1])


def put(values: tuple[int, ...], index: int, value: int) -> tuple[int, ...]:
    """``values`` with another one at ``index``."""
    return (*values[:index], value, *values[index + 1 :])
