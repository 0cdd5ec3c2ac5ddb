"""From the chain of a line with branches to the joins that the solver works on.

The solver knows branches and a trunk. Where branches meet within a branch, the line is such a
join in several ways: with the outermost branches, each a line of its own; with all of them, and
what they flow into as one trunk; and with those of each depth between.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

from torch import fx

from fxremat.ir import Chain, Costs, Join, JoinCosts, Schedule, StageCosts
from fxremat.passes.stages.linearize import Line
from fxremat.planner.context_bytes import ContextBytes
from fxremat.planner.handed import staying

TRUNK = -1
"""In place of the number of a branch."""


@dataclass(frozen=True, slots=True)
class Branching:
    """One way to see a line as branches and a trunk.

    Attributes:
        stages: of the line, in the order of the join: branch after branch, then the trunk.
        ends: the places in ``stages`` after each branch's last.
    """

    stages: tuple[int, ...]
    ends: tuple[int, ...]

    def branch_at(self, place: int) -> int:
        """The branch that holds a place in ``stages``, or ``TRUNK``."""
        branch = bisect_right(self.ends, place)
        return branch if branch < len(self.ends) else TRUNK

    @property
    def places(self) -> dict[int, int]:
        """Where each stage of the line is in ``stages``."""
        return {stage: place for place, stage in enumerate(self.stages)}

    def on_line(self, schedule: Schedule) -> Schedule:
        """A schedule of the join as one of the line."""
        return Schedule(
            tuple(replace(op, stage=self.stages[op.stage]) for op in schedule.computations)
        )


def branchings_of(line: Line) -> list[Branching]:
    """All ways to see ``line`` as a join, the outermost branches first; none if it is none."""
    found = []
    for depth in range(1, line.segments.depth + 1):
        branches = line.segments.branches(depth)
        stages = [stage for branch in branches for stage in branch]
        trunk = sorted(set(range(len(line.stages))).difference(stages))
        found.append(Branching((*stages, *trunk), tuple(accumulate(map(len, branches)))))
    return found


def build_join(chain: Chain, branching: Branching) -> Join:
    """The stages of ``chain`` as branches and a trunk; storages keep their numbers.

    What crosses a branch from one before it is no part of the branch's boundaries.

    Requires: ``chain`` is that of a line that ``branching`` is of.
    """
    places = branching.places
    lives: dict[int, tuple[int, int]] = {}
    for stage, boundary in enumerate(chain.boundaries):
        for storage in boundary:
            first, _ = lives.get(storage, (places[max(stage - 1, 0)], 0))
            lives[storage] = first, places[stage]

    def crossing(place: int, branch: int | None = None) -> tuple[int, ...]:
        return tuple(
            storage
            for storage, (first, last) in lives.items()
            if first < place <= last and branch in (None, branching.branch_at(first))
        )

    own = [chain.stages[stage] for stage in branching.stages]
    branches = []
    for branch, (first, end) in enumerate(pairwise((0, *branching.ends))):
        boundaries = [crossing(place, branch) for place in range(first, end + 1)]
        branches.append(Chain(chain.storages, tuple(boundaries), tuple(own[first:end])))
    ends = tuple(s for branch in branches for s in branch.boundaries[-1])
    start, count = branching.ends[-1], len(own)
    boundaries = [ends, *map(crossing, range(start + 1, count)), ()]
    return Join(tuple(branches), Chain(chain.storages, tuple(boundaries), tuple(own[start:])))


def build_join_costs(
    costs: Costs, line: Line, branching: Branching, context_bytes: ContextBytes
) -> JoinCosts:
    """The costs of ``line``'s chain, with the gradients that each branch holds for itself."""
    held = _Gradients.of(line, branching, staying(line, context_bytes))
    own = [costs.stages[stage] for stage in branching.stages]
    branches: list[tuple[StageCosts, ...]] = []
    done = []
    for branch, (first, end) in enumerate(pairwise((0, *branching.ends))):
        levels = held.of_branch(branch, first, end)
        done.append(levels[0])
        branches.append(
            tuple(
                replace(stage, gradient_bytes=nbytes)
                for stage, nbytes in zip(own[first:end], levels[1:], strict=True)
            )
        )
    return JoinCosts(
        branches=tuple(branches),
        trunk=tuple(own[branching.ends[-1] :]),
        fixed_bytes=costs.fixed_bytes,
        done_bytes=tuple(done),
        trunk_done_bytes=max(0, context_bytes.tangent_bytes + held.left_by_trunk()),
    )


@dataclass(frozen=True, slots=True)
class _Gradient:
    """A storage that the backward allocates.

    Attributes:
        born: the place whose backward does.
        readers: for each branch that reads it: the lowest of its places that does.
        nbytes: its size, shared out among those who have to hold it.
        stays: until the end of the step.
    """

    born: int
    readers: dict[int, int]
    nbytes: int
    stays: bool


@dataclass(frozen=True, slots=True)
class _Gradients:
    """All of them, and where the branches are."""

    found: tuple[_Gradient, ...]
    branching: Branching

    @staticmethod
    def of(line: Line, branching: Branching, stays: frozenset[fx.Node]) -> _Gradients:
        """Those of a line, of which ``stays`` are there to the end.

        Of the gradient of a parameter that several branches share, each holds its part: when
        all have gone back there is one, and before that one at most where branches go back
        one at a time.
        """
        table, places = line.joint.storages, branching.places
        outside = table.of((*line.joint.given, *line.joint.tangents, *line.joint.forward))
        returned = table.of(stays)
        nodes: dict[int, list[fx.Node]] = {}
        for node in line.joint.backward:
            if node not in line.sums:
                for storage in set(table.of_node[node]) - outside:
                    nodes.setdefault(storage, []).append(node)
        found = []
        for storage, own in nodes.items():
            users = [u for node in own for u in node.users]
            summed = [line.sums[u] for u in users if u in line.sums]
            readers: dict[int, int] = {}
            for place in (places[line.stage_of[u]] for u in users if u in line.stage_of):
                branch = branching.branch_at(place)
                readers[branch] = min(place, readers.get(branch, place))
            parts = max((_branch_count(stages, branching) for stages in summed), default=1)
            lasts = storage in returned or bool(summed)
            if not lasts:
                parts = max(len(readers.keys() - {TRUNK}), 1)
            nbytes = -(-table.nbytes[storage] // parts)
            found.append(_Gradient(places[line.stage_of[own[0]]], readers, nbytes, lasts))
        return _Gradients(tuple(found), branching)

    def of_branch(self, branch: int, first: int, end: int) -> Sequence[int]:
        """What it holds when its stages from ``first + i`` on are done, for each ``i``."""
        return [self._held(branch, level) for level in range(first, end + 1)]

    def _held(self, branch: int, level: int) -> int:
        total = 0
        for gradient in self.found:
            owner = self.branching.branch_at(gradient.born)
            if owner not in (branch, TRUNK) or (owner == branch and gradient.born < level):
                continue
            if gradient.stays:
                total += gradient.nbytes if owner == branch else 0
            elif gradient.readers.get(branch, level) < level:
                total += gradient.nbytes
        return total

    def left_by_trunk(self) -> int:
        """What the trunk's backward leaves until the step ends."""
        own = (g for g in self.found if self.branching.branch_at(g.born) == TRUNK)
        return sum(gradient.nbytes for gradient in own if gradient.stays)


def _branch_count(stages: Iterable[int], branching: Branching) -> int:
    places = branching.places
    return max(len({branching.branch_at(places[stage]) for stage in stages} - {TRUNK}), 1)
