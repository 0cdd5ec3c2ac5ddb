"""Cut the forward into stages."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import IntEnum
from itertools import accumulate

from torch import fx

from fxremat.effort import Effort
from fxremat.passes.joint import batchnorm, rng, user_kernels
from fxremat.passes.joint.constraints import constrained_storages
from fxremat.passes.joint.graph import JointGraph, is_tensor
from fxremat.passes.stages.branches import find_branches, is_apart, place_backward
from fxremat.passes.stages.cuts import Crossing, cut_segments
from fxremat.passes.stages.position import Positions, Segments, locate

UNCUT_BYTES = 1 << 62
"""Added to what crosses a cut that would hold what no plan may hold there: none is dearer."""


@dataclass(frozen=True, slots=True)
class StageNodes:
    """The nodes of one stage and the tensors it exchanges with the rest.

    Attributes:
        forward, backward: operations, in the order in which they run.
        boundary: tensors that cross the cut before the stage.
        saved: tensors computed in the stage that its backward reads.
        pinned: tensors computed in the stage that are kept for the whole step.
        results: tensors of its backward that other stages or the step's results read.
    """

    forward: tuple[fx.Node, ...]
    backward: tuple[fx.Node, ...]
    boundary: tuple[fx.Node, ...]
    saved: tuple[fx.Node, ...]
    pinned: tuple[fx.Node, ...]
    results: tuple[fx.Node, ...]


class Role(IntEnum):
    """What a tensor is to the stages, in the order in which calls list them."""

    GRADIENT = 0
    BOUNDARY = 1
    SAVED = 2
    PINNED = 3
    GIVEN = 4


@dataclass(frozen=True, slots=True)
class Line:
    """A joint graph as a line of stages.

    Attributes:
        joint: the graph.
        stages: in forward order. Where the loss is outside the graph the last one has no
            operations: it stands for the turn.
        pinned: tensors of the forward that are kept from the moment they are computed.
        views: views of parameters and other given tensors. They take no memory, so each
            block makes its own, and none crosses a cut.
        stage_of: the stage of each operation.
        role_of: the role of each tensor.
        order: index of each node in the joint graph.
        segments: of stages. Each has a stage at least; where the line is no join there is
            the trunk alone.
        drawing: stages whose first forward advances a random generator.
        sums: backward nodes that read gradients of several branches, and the stages whose
            backwards give these. Each is among the backward of the lowest of them, and
            runs with whichever of them is the last in a schedule.
        unsaved: storages that no plan holds from forward to backward. They cross no cut.
        offloaded: storages that are in host memory meanwhile in every plan. They are pinned.
    """

    joint: JointGraph
    stages: tuple[StageNodes, ...]
    pinned: frozenset[fx.Node]
    views: frozenset[fx.Node]
    stage_of: dict[fx.Node, int]
    role_of: dict[fx.Node, Role]
    order: dict[fx.Node, int]
    segments: Segments = field(default_factory=Segments)
    drawing: tuple[int, ...] = ()
    sums: Mapping[fx.Node, frozenset[int]] = field(default_factory=dict)
    unsaved: frozenset[int] = frozenset()
    offloaded: frozenset[int] = frozenset()

    @property
    def branch_ends(self) -> tuple[int, ...]:
        """The stages after each outermost branch's last; none where the line is no join."""
        return tuple(branch.stop for branch in self.segments.branches(1))

    @property
    def ends_at_turn(self) -> bool:
        """Whether the last stage has no operations: it stands for the turn."""
        last = self.stages[-1]
        return not last.forward and not last.backward

    def name_of(self, stage: int) -> str:
        """For people and emitted code."""
        if self.ends_at_turn and stage == len(self.stages) - 1:
            return "turn"
        if not self.segments.ends:
            return f"stage{stage}"
        return f"{self.segments.name_of(self.segments.at(stage))}_stage{stage}"

    @property
    def nodes(self) -> tuple[fx.Node, ...]:
        """The nodes of the joint graph by their index in it, as in ``order``."""
        return tuple(self.order)

    def rank(self, node: fx.Node) -> tuple[int, int]:
        """Sorts tensors by role, then as they are computed."""
        return (self.role_of[node], self.order[node])


Lives = dict[int, range]
"""By storage the cuts that it crosses, as positions: from its birth to its last reader."""


def linearize(joint: JointGraph, effort: Effort) -> Line:
    """Cut the forward into stages, as many and as large as ``effort`` says.

    Requires: ``joint`` is functional and verified.
    Ensures: every forward node is in exactly one stage, in graph order, or branch after
        branch, or a view of a given tensor; every backward node belongs to a stage whose
        saved set, input and pinned tensors hold all forward values that it reads; none
        reads a backward node of a lower stage, and none but sums one of another branch.
        Where the loss is outside, nothing crosses the cut before the last stage but what is
        pinned, so a schedule may hold any part of the other stages at the turn. What a
        constraint keeps is pinned; what one has computed again is read in its own stage only.
    """
    views = _views_of_given(joint)
    positions = locate(joint, views=views)
    lives = _storage_lives(joint, positions)
    pinned = _choose_pinned(joint, positions, lives, effort)
    for branches in find_branches(
        joint,
        views=views,
        pinned=pinned,
        least_share=effort.branch_share,
        least_operations=effort.branch_operations,
    ):
        ordered = replace(joint, forward=branches.forward)
        placed = place_backward(ordered, branches, locate(ordered, views=views))
        if placed is None:
            continue
        own_lives = _storage_lives(ordered, placed)
        kept = _choose_pinned(ordered, placed, own_lives, effort)
        unsaved = constrained_storages(joint, "recompute") - kept
        is_whole = not any(_crosses(own_lives[s], placed.segments) for s in unsaved)
        if is_whole and is_apart(ordered, placed, kept):
            joint, positions, lives, pinned = ordered, placed, own_lives, kept
            break
    crossing = _crossing(joint, positions, lives, pinned)
    cuts = cut_segments(crossing, positions.segments.ends, effort.most_stages)
    cuts = [cut for cut in cuts if crossing.weights[cut] < UNCUT_BYTES]
    return _assemble(joint, positions, pinned, views, cuts)


def _storage_lives(joint: JointGraph, positions: Positions) -> Lives:
    """Return the lives of the storages that forward operations allocate.

    What is computed again lives from its first reader on: a backward may stand before it.
    """
    lives: Lives = {}
    table, again = joint.storages, constrained_storages(joint, "recompute")
    for storage in table.of(positions.forward) - table.of(joint.given):
        birth = positions.forward[table.owner[storage]]
        found = (positions.of(reader) for reader in table.readers[storage])
        reads = [at for at in found if at is not None]
        begin = min((birth, *reads)) if storage in again else birth
        lives[storage] = range(begin, max(reads, default=birth))
    return lives


def _crosses(life: range, segments: Segments) -> bool:
    """Return whether a life goes from one segment into another."""
    return segments.at(life.start) != segments.at(life.stop)


def _choose_pinned(
    joint: JointGraph, positions: Positions, lives: Lives, effort: Effort
) -> frozenset[int]:
    """Storages to keep for the whole step.

    Outputs; what cannot be computed again, or by a constraint is not to be; what a backward reads
    from a later stage; and what is small but would cross many cuts.
    """
    pinned = set(joint.storages.of(joint.results))
    pinned |= constrained_storages(joint, "keep", "offload")
    again = constrained_storages(joint, "recompute")
    for node, position in positions.forward.items():
        late = any(positions.backward.get(user, position) < position for user in node.users)
        late = late and again.isdisjoint(joint.storages.of_node[node])
        once = joint.is_old_value(node) or rng.is_state(node) or batchnorm.is_new_statistic(node)
        if late or once or user_kernels.runs_once(node):
            pinned.update(joint.storages.of_node[node])
    small_bytes = int(effort.pin_share * joint.storages.total(joint.saved))
    long_life = max(effort.long_life, positions.count // effort.long_share)
    for storage, life in lives.items():
        is_small = joint.storages.nbytes[storage] <= small_bytes
        if is_small and len(life) > long_life and storage not in again:
            pinned.add(storage)
    return frozenset(pinned)


def _crossing(
    joint: JointGraph, positions: Positions, lives: Lives, pinned: frozenset[int]
) -> Crossing:
    count = positions.count
    change, reach, saved_bytes = [0] * (count + 1), [0] * count, [0] * count
    again = constrained_storages(joint, "recompute")
    for storage, life in lives.items():
        if storage in pinned:
            continue
        nbytes, saved = joint.storages.nbytes[storage], storage in joint.saved
        nbytes += UNCUT_BYTES if storage in again else 0
        for span in _spans(life, positions.segments):
            change[span.start] += nbytes * (1 if saved else 2)
            change[span.stop] -= nbytes * (1 if saved else 2)
            for position in span:
                reach[position] = max(reach[position], span.stop)
        saved_bytes[life.start] += joint.storages.nbytes[storage] * saved
    return Crossing(tuple(accumulate(change[:count])), tuple(reach), tuple(saved_bytes))


def _spans(life: range, segments: Segments) -> list[range]:
    """Cuts that a storage crosses in its own segment and those after it, in no other branch."""
    found = [life]
    for segment in segments.path(segments.at(life.start))[:-1]:
        cut = segments.ends[segment]
        if life.stop <= cut:
            break
        after = segments.start(segments.into[segment])
        found[-1] = range(found[-1].start, cut)
        found.append(range(after, max(life.stop, after)))
    return found


def _assemble(
    joint: JointGraph,
    where: Positions,
    pinned: frozenset[int],
    views: frozenset[fx.Node],
    cuts: Sequence[int],
) -> Line:
    stage_of = {
        n: bisect_left(cuts, p) for n, p in (*where.forward.items(), *where.backward.items())
    }
    fixed = frozenset(
        n
        for n in joint.forward
        if is_tensor(n) and n not in views and pinned.issuperset(joint.storages.of_node[n])
    )
    count = len(cuts) + 1
    forward, backward, boundary, saved, results = (
        [list[fx.Node]() for _ in range(count)] for _ in range(5)
    )
    for node in joint.backward:
        own = stage_of[node]
        backward[own].append(node)
        if is_tensor(node) and any(stage_of.get(u) != own for u in node.users):  # or the output
            results[own].append(node)
    for node in joint.forward:
        if node in views:
            continue
        own = stage_of[node]
        forward[own].append(node)
        if is_tensor(node) and node not in fixed:
            for cut in range(own + 1, max((stage_of.get(u, 0) for u in node.users), default=0) + 1):
                boundary[cut].append(node)
            if any(u in where.backward and stage_of[u] == own for u in node.users):
                saved[own].append(node)
    stages = tuple(
        StageNodes(
            tuple(forward[i]),
            tuple(backward[i]),
            tuple(boundary[i]),
            tuple(saved[i]),
            tuple(n for n in forward[i] if n in fixed),
            tuple(results[i]),
        )
        for i in range(count)
    )
    ends = tuple(bisect_left(cuts, end) for end in where.segments.ends)
    unsaved = constrained_storages(joint, "recompute") - pinned
    return Line(
        joint,
        (*stages, *_turn_of(joint, stages)),
        fixed,
        views,
        stage_of,
        _roles(joint, stages, fixed),
        order={node: index for index, node in enumerate(joint.module.graph.nodes)},
        segments=replace(where.segments, ends=ends),
        drawing=tuple(i for i, own in enumerate(forward) if any(map(rng.draws, own))),
        sums=_stages_of_sums(joint, where, stage_of),
        unsaved=unsaved,
        offloaded=constrained_storages(joint, "offload") - joint.storages.of(joint.results),
    )


def _stages_of_sums(
    joint: JointGraph, where: Positions, stage_of: Mapping[fx.Node, int]
) -> dict[fx.Node, frozenset[int]]:
    """For each sum the stages whose backwards give what it reads."""
    found: dict[fx.Node, frozenset[int]] = {}
    for node in joint.backward:
        if node in where.sums:
            sources = (n for n in node.all_input_nodes if n in where.backward)
            found[node] = frozenset[int]().union(
                *(found[n] if n in found else {stage_of[n]} for n in sources)
            )
    return found


def _turn_of(joint: JointGraph, stages: Sequence[StageNodes]) -> tuple[StageNodes, ...]:
    """A stage without operations for a loss outside the graph, where there is none yet.

    A loss inside leaves the gradients of its scalars to come from outside, which take no
    memory worth a stage.
    """
    outside = any(n.meta["val"].numel() > 1 for n in joint.tangents if is_tensor(n))
    there = not stages[-1].forward and not stages[-1].backward
    return (StageNodes((), (), (), (), (), ()),) if outside and not there else ()


def _views_of_given(joint: JointGraph) -> frozenset[fx.Node]:
    """Operations that only look at given tensors, but for outputs."""
    views = set(joint.given)
    given = joint.storages.of(joint.given)
    results = {*joint.results, *joint.gradients}
    for node in joint.forward:
        sources = node.all_input_nodes
        looks = is_tensor(node) and given.issuperset(joint.storages.of_node[node])
        if looks and sources and views.issuperset(sources) and node not in results:
            views.add(node)
    return frozenset(views - joint.given)


def _roles(
    joint: JointGraph, stages: Sequence[StageNodes], pinned: frozenset[fx.Node]
) -> dict[fx.Node, Role]:
    roles = dict.fromkeys(joint.given, Role.GIVEN)
    roles.update(dict.fromkeys((*joint.tangents, *joint.backward), Role.GRADIENT))
    roles.update(dict.fromkeys(joint.forward, Role.SAVED))
    roles.update(dict.fromkeys((n for stage in stages for n in stage.boundary), Role.BOUNDARY))
    roles.update(dict.fromkeys(pinned, Role.PINNED))
    return roles
