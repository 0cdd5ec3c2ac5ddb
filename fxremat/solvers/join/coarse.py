"""A join with fewer stages: neighbors are merged, so that the table of all heads stays small.

The time of the recurrence in ``general`` is proportional to the product of the branches' lengths.
Where that is too long, neighbors that save least are merged into one stage. A merged stage keeps
what its members keep. Each of its save options combines its members' options, each the best for one
price of a byte. Every schedule of the coarse join is a schedule of the fine join with the same time
and no more memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from fxremat.ir import (
    Backward,
    Chain,
    Compute,
    Forward,
    Join,
    JoinCosts,
    Keep,
    SaveOption,
    Schedule,
    Stage,
    StageCosts,
)
from fxremat.solvers.join.numbers import state_count

MOST_OPTIONS = 8
"""Maximum number of options of a merged stage, in addition to keeping everything."""


@dataclass(frozen=True, slots=True)
class Coarse:
    """A join whose stages are merged neighbors of another join's stages, the fine join's.

    Attributes:
        join, costs: the join of merged stages, and its costs.
        members: for each merged stage, its stages of the fine join, in order.
        choices: for each merged stage and each of its save options, keeping everything first, the
            options of its members.
    """

    join: Join
    costs: JoinCosts
    members: tuple[tuple[int, ...], ...]
    choices: tuple[tuple[tuple[int, ...], ...], ...]

    def refine(self, schedule: Schedule) -> Schedule:
        """Return the schedule of the fine join that corresponds to one of the coarse join."""
        return Schedule(tuple(fine for op in schedule.computations for fine in self._fine_ops(op)))

    def _fine_ops(self, op: Compute) -> Sequence[Compute]:
        stages = self.members[op.stage]
        if isinstance(op, Backward):
            return [Backward(stage) for stage in reversed(stages)]
        if op.keep is Keep.ALL:
            options = self.choices[op.stage][op.option]
            return [Forward(i, Keep.ALL, o) for i, o in zip(stages, options, strict=True)]
        return [Forward(stages[0], op.keep), *(Forward(i, Keep.NONE) for i in stages[1:])]


def with_loss_point(join: Join, costs: JoinCosts, *, extra_bytes: int) -> Coarse:
    """Return the join with its trunk merged into one stage, whose backward follows its forward.

    This is the join of Beaumont, Herrmann, Pallez, Shilova (2019), see ``general``.

    Args:
        join, costs: the fine join.
        extra_bytes: peak of the trunk's forward and backward beyond the branches' ends, with
            everything kept. It cannot be derived from the stages: where one of them is the last to
            read an end, that end is freed and makes room for the other ends' gradients.
    """
    trunk = costs.trunk
    forward_s = sum(cost.forward_s for cost in trunk)
    merged = StageCosts(
        forward_s=forward_s,
        backward_s=sum(cost.backward_s for cost in trunk),
        rebuild_s=forward_s,
        gradient_bytes=trunk[-1].gradient_bytes,
        forward_extra_bytes=extra_bytes,
        keep_extra_bytes=extra_bytes,
        backward_extra_bytes=extra_bytes,
        rebuild_bytes=extra_bytes,
    )
    chain = Chain(
        join.storages,
        (join.trunk.boundaries[0], ()),
        (Stage("trunk", (), join.trunk.stages[0].kind),),
    )
    start = join.first_stages[-2]
    every_options = [cost.options for branch in costs.branches for cost in branch]
    return Coarse(
        Join(join.branches, chain),
        replace(costs, trunk=(merged,)),
        (*((i,) for i in range(start)), tuple(range(start, len(join)))),
        (
            *(tuple((o,) for o in range(len(options) + 1)) for options in every_options),
            ((0,) * len(trunk),),
        ),
    )


def work_of(lengths: Sequence[int]) -> int:
    """Return the number of sums that the solver ``join`` computes for each slot of memory.

    Args:
        lengths: number of stages of each branch, then of the trunk.
    """
    return state_count(lengths) * sum(lengths)


def coarsen(join: Join, costs: JoinCosts, *, most_work: int) -> Coarse:
    """Return the join after merging neighbors until ``work_of`` is at most ``most_work``.

    Those with the fewest saved bytes are merged first.

    A small join is unchanged. A line keeps at least one stage, so a join of many branches may
    exceed ``most_work``.
    """
    groups = [[[i] for i in range(len(line))] for line in join.lines]
    saved = [[line.nbytes(line.saved_set(i)) for i in range(len(line))] for line in join.lines]
    while work_of([len(parts) for parts in groups]) > most_work:
        pairs = [
            (sum(saved[b][i] for i in (*one, *other)), b, place)
            for b, parts in enumerate(groups)
            for place, (one, other) in enumerate(pairwise(parts))
        ]
        if not pairs:
            break
        _, b, place = min(pairs)
        groups[b][place : place + 2] = [groups[b][place] + groups[b][place + 1]]
    chains = [_merged_chain(line, parts) for line, parts in zip(join.lines, groups, strict=True)]
    runs = [
        [_Run(line, [stages[i] for i in part], part[0]) for part in parts]
        for line, stages, parts in zip(join.lines, costs.lines, groups, strict=True)
    ]
    merged = [tuple(run.costs() for run in line_runs) for line_runs in runs]
    firsts = join.first_stages
    return Coarse(
        Join(tuple(chains[:-1]), chains[-1]),
        replace(costs, branches=tuple(merged[:-1]), trunk=merged[-1]),
        tuple(
            tuple(firsts[b] + i for i in part) for b, parts in enumerate(groups) for part in parts
        ),
        tuple(tuple(run.choices()) for line_runs in runs for run in line_runs),
    )


def _merged_chain(line: Chain, parts: Sequence[Sequence[int]]) -> Chain:
    stages = []
    for part in parts:
        members = [line.stages[i] for i in part]
        inner = [s for i in part[1:] for s in line.boundaries[i]]
        saved = dict.fromkeys((*(s for stage in members for s in stage.saved), *inner))
        saved = {s: None for s in saved if s not in line.boundaries[part[0]]}
        name = members[0].name if len(members) == 1 else f"{members[0].name}…{members[-1].name}"
        stages.append(Stage(name, tuple(saved), members[0].kind))
    boundaries = [line.boundaries[part[0]] for part in parts]
    return Chain(line.storages, (*boundaries, line.boundaries[-1]), tuple(stages))


@dataclass(frozen=True, slots=True)
class _Run:
    """Neighboring stages of a line that are merged.

    Attributes:
        line: the line.
        stages: costs of the stages.
        first: number of the first stage in the line.
    """

    line: Chain
    stages: Sequence[StageCosts]
    first: int

    def costs(self) -> StageCosts:
        """Return seconds and bytes of the stage that runs all these stages one after the other."""
        if len(self.stages) == 1:
            return self.stages[0]
        line, members, last = self.line, self.stages, self.stages[-1]
        head = set(line.boundaries[self.first])
        passing = [
            cost.forward_extra_bytes
            + line.nbytes({*line.boundaries[i], *line.boundaries[i + 1]} - head)
            for i, cost in enumerate(members, start=self.first)
        ]
        end_bytes = line.nbytes(set(line.boundaries[self.first + len(members)]) - head)
        choices = self.choices()
        whole, *options = map(self._combined, choices)
        kept, keeping, back = self._peaks(choices[0])
        return StageCosts(
            forward_s=sum(cost.forward_s for cost in members),
            backward_s=sum(cost.backward_s for cost in members),
            rebuild_s=sum(cost.forward_s for cost in members[:-1]) + last.rebuild_s,
            gradient_bytes=last.gradient_bytes,
            forward_extra_bytes=max(0, max(passing) - end_bytes),
            keep_extra_bytes=whole.keep_extra_bytes,
            backward_extra_bytes=whole.backward_extra_bytes,
            rebuild_bytes=max(kept[-2] + last.rebuild_bytes, *keeping[:-1], *back[:-1]),
            options=tuple(options),
        )

    def choices(self) -> list[tuple[int, ...]]:
        """Return the save options of the merged stage, each as the number of an option per member.

        The first keeps everything. Each other one has the least sum of recomputed seconds and of
        bytes times a price, for one of several prices of a byte.
        """
        if len(self.stages) == 1:
            return [(option,) for option in range(len(self.stages[0].options) + 1)]
        every_choices = self._choices()
        nbytes = [[self.line.nbytes(kept) for _, kept in choices] for choices in every_choices]
        seconds = [[option.recompute_s for option, _ in choices] for choices in every_choices]
        prices = {
            takes / (sizes[0] - size)
            for sizes, times in zip(nbytes, seconds, strict=True)
            for size, takes in zip(sizes, times, strict=True)
            if size < sizes[0]
        }
        combinations = {(0,) * len(self.stages): None}
        for price in sorted(prices):
            costs = [
                [price * size + takes for size, takes in zip(*member, strict=True)]
                for member in zip(nbytes, seconds, strict=True)
            ]
            # Of equal costs take the last option, which keeps least.
            best = (max(k for k, c in enumerate(each) if c <= min(each)) for each in costs)
            combinations[tuple(best)] = None
        whole, *others = combinations
        step = -(-len(others) // MOST_OPTIONS) or 1
        return [whole, *others[::-1][::step]]

    def _choices(self) -> list[list[tuple[SaveOption, frozenset[int]]]]:
        """Return for each member its save options, each with the storages that its forward adds."""
        pairs = enumerate(
            zip(self.stages, self.line.stages[self.first :], strict=False), self.first
        )
        return [
            [(option, self.line.added(i, option.kept)) for option in cost.choices(stage.saved)]
            for i, (cost, stage) in pairs
        ]

    def _chosen_options(self, choice: tuple[int, ...]) -> list[tuple[SaveOption, frozenset[int]]]:
        return [options[i] for options, i in zip(self._choices(), choice, strict=True)]

    def _peaks(self, choice: tuple[int, ...]) -> tuple[list[int], list[int], list[int]]:
        """Return for each member bytes kept up to it, and peaks of its forward and its backward.

        They are three lists, without the first member's input and the gradients after the last.

        Args:
            choice: number of the save option of each member.
        """
        held: set[int] = set()
        head = set(self.line.boundaries[self.first])
        kept, keeping, back = [], [], []
        for cost, (option, added) in zip(self.stages, self._chosen_options(choice), strict=True):
            held |= added
            kept.append(self.line.nbytes(held - head))
            more = cost.gradient_bytes - self.stages[-1].gradient_bytes
            keeping.append(kept[-1] + option.keep_extra_bytes)
            back.append(kept[-1] + more + option.backward_extra_bytes)
        return kept, keeping, back

    def _combined(self, choice: tuple[int, ...]) -> SaveOption:
        """Return the save option of the merged stage that combines members' options ``choice``."""
        kept, keeping, back = self._peaks(choice)
        options, added = zip(*self._chosen_options(choice), strict=True)
        return SaveOption(
            tuple(sorted(frozenset[int]().union(*added))),
            sum(option.recompute_s for option in options),
            max(0, max(keeping) - kept[-1]),
            max(0, max(back) - kept[-1]),
        )
