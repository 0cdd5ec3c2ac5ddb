"""A network of independent branches that meet in a trunk, its costs, and the problem to solve."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fxremat.ir.chain import Chain, Storage
from fxremat.ir.costs import StageCosts
from fxremat.ir.problem import check_bytes, check_chain, check_stage_costs


@dataclass(frozen=True, slots=True)
class Join:
    """Branches that share no activation, and a trunk that reads the ends of all branches.

    Stages are numbered consecutively: those of branch 0 first, then those of branch 1, and so on,
    then those of the trunk. A *line* is a branch or the trunk; the trunk is line ``len(branches)``.

    Attributes:
        branches: at least one chain, each of at least one stage. All chains of a join have the same
            ``storages``; no storage is in two branches.
        trunk: the stages after the branches meet, including the loss; at least one.
            ``trunk.boundaries[0]`` is the concatenation of the branches' last boundaries. A storage
            may cross from a branch into the trunk, in one contiguous run.
    """

    branches: tuple[Chain, ...]
    trunk: Chain

    def __len__(self) -> int:
        return sum(map(len, self.lines))

    @property
    def storages(self) -> tuple[Storage, ...]:
        """Storages of the network, which all lines share."""
        return self.trunk.storages

    @property
    def lines(self) -> tuple[Chain, ...]:
        """Chains of the branches, then that of the trunk."""
        return (*self.branches, self.trunk)

    @property
    def first_stages(self) -> tuple[int, ...]:
        """Number of the first stage of each line, and last the number of stages of the join."""
        firsts = [0]
        for line in self.lines:
            firsts.append(firsts[-1] + len(line))
        return tuple(firsts)

    def nbytes(self, ids: Sequence[int]) -> int:
        """Return the total bytes of the distinct storages among ``ids``."""
        return self.trunk.nbytes(ids)


@dataclass(frozen=True, slots=True)
class JoinCosts:
    """Seconds and bytes of the stages of a join.

    While the trunk's backward runs, gradients take ``gradient_bytes`` of the trunk stage whose
    backward comes next. After that *every* branch holds the gradient at its position:
    ``gradient_bytes`` of its own next stage, or its ``done_bytes`` if it has none left. The trunk
    leaves ``trunk_done_bytes``.

    Attributes:
        branches: for each branch, the costs of each stage.
        trunk: costs of each trunk stage.
        fixed_bytes: bytes held during the whole step under any schedule.
        done_bytes: for each branch, the bytes that its backward leaves until the step ends
            (gradients of its input and parameters). If empty, all are 0.
        trunk_done_bytes: the bytes that the trunk's backward leaves in addition to the gradients of
            the branches' ends (gradients of its parameters).
    """

    branches: tuple[tuple[StageCosts, ...], ...]
    trunk: tuple[StageCosts, ...]
    fixed_bytes: int = 0
    done_bytes: tuple[int, ...] = ()
    trunk_done_bytes: int = 0

    @property
    def lines(self) -> tuple[tuple[StageCosts, ...], ...]:
        """Costs of the stages of each branch, then of the trunk."""
        return (*self.branches, self.trunk)

    @property
    def stages(self) -> tuple[StageCosts, ...]:
        """Costs of all stages, in the join's numbering."""
        return tuple(stage for line in self.lines for stage in line)

    @property
    def left_bytes(self) -> tuple[int, ...]:
        """Bytes that each branch's backward leaves until the step ends, also if all are 0."""
        return self.done_bytes or (0,) * len(self.branches)


@dataclass(frozen=True, slots=True)
class JoinProblem:
    """The problem of finding the fastest schedule of ``join`` within ``budget_bytes``.

    Attributes:
        join: the network.
        costs: seconds and bytes of its stages.
        budget_bytes: device memory in bytes, including ``costs.fixed_bytes``.

    Raises:
        ValueError: on construction, naming the field and index of the first malformed entry
            (negative, not finite, of wrong length, out of range, or bytes that are not a whole
            number).
    """

    join: Join
    costs: JoinCosts
    budget_bytes: int

    def __post_init__(self) -> None:
        _check_lines(self.join)
        _check_trunk_input(self.join)
        _check_disjoint(self.join)
        _check_costs(self.join, self.costs)
        check_bytes(self.budget_bytes, name="budget_bytes")


def _line_names(join: Join) -> list[str]:
    return [*(f"join.branches[{i}]" for i in range(len(join.branches))), "join.trunk"]


def _check_lines(join: Join) -> None:
    if not join.branches:
        raise ValueError("join.branches is empty")
    for name, line in zip(_line_names(join), join.lines, strict=True):
        if line.storages != join.storages:
            raise ValueError(f"{name}.storages differs from join.trunk.storages")
        check_chain(line, name=name)


def _check_trunk_input(join: Join) -> None:
    ends = tuple(i for branch in join.branches for i in branch.boundaries[-1])
    if join.trunk.boundaries[0] != ends:
        raise ValueError(
            f"join.trunk.boundaries[0] is {join.trunk.boundaries[0]}, the branches end in {ends}"
        )


def _check_disjoint(join: Join) -> None:
    """Raise ``ValueError`` if two lines have the same storage, unless it crosses into the trunk."""
    owner: dict[int, int] = {}
    names = _line_names(join)
    ends = set(join.trunk.boundaries[0])
    for line, chain in enumerate(join.lines):
        saved = [stage.saved for stage in chain.stages]
        used = {i for ids in (*chain.boundaries, *saved) for i in ids}
        for storage in sorted(used):
            before = owner.setdefault(storage, line)
            crosses = line == len(join.branches) and storage in ends
            if before != line and not crosses:
                raise ValueError(
                    f"{names[line]} has storage {storage}, which {names[before]} has too"
                )


def _check_costs(join: Join, costs: JoinCosts) -> None:
    if len(costs.branches) != len(join.branches):
        raise ValueError(
            f"costs.branches has {len(costs.branches)} entries, expected {len(join.branches)}"
        )
    names = [*(f"costs.branches[{i}]" for i in range(len(costs.branches))), "costs.trunk"]
    for name, line, stages in zip(names, join.lines, costs.lines, strict=True):
        check_stage_costs(line, stages, name=name)
    if costs.done_bytes and len(costs.done_bytes) != len(join.branches):
        raise ValueError(
            f"costs.done_bytes has {len(costs.done_bytes)} entries, expected {len(join.branches)}"
        )
    for i, nbytes in enumerate(costs.done_bytes):
        check_bytes(nbytes, name=f"costs.done_bytes[{i}]")
    for name in ("fixed_bytes", "trunk_done_bytes"):
        check_bytes(getattr(costs, name), name=f"costs.{name}")
