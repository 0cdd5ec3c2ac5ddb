"""From the chain of a line with branches to the join that the solver works on."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from torch import fx

from fxremat.ir import Chain, Costs, Join, JoinCosts, StageCosts
from fxremat.passes.branches import TRUNK, branch_at
from fxremat.passes.linearize import Line
from fxremat.passes.sweep import Surroundings


def build_join(chain: Chain, line: Line) -> Join:
    """The stages of ``chain`` as branches and a trunk; stages and storages keep their numbers.

    What crosses a branch from one before it is no part of the branch's boundaries.

    Requires: ``chain`` is that of ``line``, which has branches.
    """
    firsts = (0, *line.branch_ends)
    born: dict[int, int] = {}
    for index, boundary in enumerate(chain.boundaries):
        for storage in boundary:
            born.setdefault(storage, branch_at(line.branch_ends, index - 1))
    branches = []
    for branch, (first, end) in enumerate(zip(firsts, line.branch_ends, strict=False)):
        boundaries = [
            tuple(s for s in boundary if born[s] == branch)
            for boundary in chain.boundaries[first : end + 1]
        ]
        branches.append(Chain(chain.storages, tuple(boundaries), chain.stages[first:end]))
    ends = tuple(s for branch in branches for s in branch.boundaries[-1])
    start = line.branch_ends[-1]
    boundaries = [ends, *chain.boundaries[start + 1 :]]
    trunk = Chain(chain.storages, tuple(boundaries), chain.stages[start:])
    return Join(tuple(branches), trunk)


def build_join_costs(costs: Costs, line: Line, surroundings: Surroundings) -> JoinCosts:
    """The costs of ``line``'s chain, with the gradients that each branch holds for itself."""
    held = _Gradients.of(line)
    firsts = (0, *line.branch_ends)
    branches: list[tuple[StageCosts, ...]] = []
    done = []
    for branch, (first, end) in enumerate(zip(firsts, line.branch_ends, strict=False)):
        levels = held.of_branch(branch, first, end)
        done.append(levels[0])
        branches.append(
            tuple(
                replace(stage, gradient_bytes=nbytes)
                for stage, nbytes in zip(costs.stages[first:end], levels[1:], strict=True)
            )
        )
    return JoinCosts(
        branches=tuple(branches),
        trunk=costs.stages[line.branch_ends[-1] :],
        fixed_bytes=costs.fixed_bytes,
        done_bytes=tuple(done),
        trunk_done_bytes=surroundings.tangent_bytes + held.left_by_trunk(),
    )


@dataclass(frozen=True, slots=True)
class _Gradient:
    """A storage that the backward allocates.

    Attributes:
        born: the stage whose backward does.
        readers: for each branch that reads it: the lowest of its stages that does.
        nbytes: its size, shared out among those who have to hold it.
        stays: until the end of the step.
    """

    born: int
    readers: dict[int, int]
    nbytes: int
    stays: bool


@dataclass(frozen=True, slots=True)
class _Gradients:
    """All of them, and where the branches end."""

    found: tuple[_Gradient, ...]
    ends: tuple[int, ...]

    @staticmethod
    def of(line: Line) -> _Gradients:
        """Those of a line.

        Of the gradient of a parameter that several branches share, each holds its part: when
        all have gone back there is one, and before that one at most where branches go back
        one at a time.
        """
        table, ends = line.joint.storages, line.branch_ends
        outside = table.of((*line.joint.given, *line.joint.tangents, *line.joint.forward))
        returned = table.of(n for n in line.joint.backward_outputs if isinstance(n, fx.Node))
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
            for stage in (line.stage_of[u] for u in users if u in line.stage_of):
                branch = branch_at(ends, stage)
                readers[branch] = min(stage, readers.get(branch, stage))
            parts = max((_branch_count(stages, ends) for stages in summed), default=1)
            stays = storage in returned or bool(summed)
            if not stays:
                parts = max(len(readers.keys() - {TRUNK}), 1)
            nbytes = -(-table.nbytes[storage] // parts)
            found.append(_Gradient(line.stage_of[own[0]], readers, nbytes, stays))
        return _Gradients(tuple(found), ends)

    def of_branch(self, branch: int, first: int, end: int) -> Sequence[int]:
        """What it holds when its stages from ``first + i`` on are done, for each ``i``."""
        return [self._held(branch, level) for level in range(first, end + 1)]

    def _held(self, branch: int, level: int) -> int:
        total = 0
        for gradient in self.found:
            owner = branch_at(self.ends, gradient.born)
            if owner not in (branch, TRUNK) or (owner == branch and gradient.born < level):
                continue
            if gradient.stays:
                total += gradient.nbytes if owner == branch else 0
            elif gradient.readers.get(branch, level) < level:
                total += gradient.nbytes
        return total

    def left_by_trunk(self) -> int:
        """What the trunk's backward leaves until the step ends."""
        return sum(
            g.nbytes for g in self.found if g.stays and branch_at(self.ends, g.born) == TRUNK
        )


def _branch_count(stages: Iterable[int], ends: tuple[int, ...]) -> int:
    return max(len({branch_at(ends, stage) for stage in stages} - {TRUNK}), 1)
