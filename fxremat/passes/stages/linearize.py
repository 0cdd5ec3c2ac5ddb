"""Cut the forward into stages."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import IntEnum
from itertools import accumulate

from torch import fx

from fxremat.effort import Effort
from fxremat.passes.joint import batchnorm, rng
from fxremat.passes.joint.constraints import constrained_storages
from fxremat.passes.joint.graph import JointGraph, is_tensor, runs_once
from fxremat.passes.stages.branches import are_independent, find_branches, place_backward
from fxremat.passes.stages.cuts import Crossing, cut_segments
from fxremat.passes.stages.position import Positions, Segments, locate

UNCUT_BYTES = 1 << 62
"""Added to what crosses a cut at which no plan may hold it: no cut is more expensive."""


@dataclass(frozen=True, slots=True)
class StageNodes:
    """The operations of a stage, and the tensors that it exchanges with other stages.

    Attributes:
        forward, backward: operations, in the order in which they run.
        boundary: tensors that cross the cut before the stage.
        saved: tensors computed in the stage that its backward reads.
        pinned: tensors computed in the stage that are kept for the whole step.
        results: tensors of its backward that other stages read or the step returns.
    """

    forward: tuple[fx.Node, ...]
    backward: tuple[fx.Node, ...]
    boundary: tuple[fx.Node, ...]
    saved: tuple[fx.Node, ...]
    pinned: tuple[fx.Node, ...]
    results: tuple[fx.Node, ...]


class Role(IntEnum):
    """How stages hold a tensor. Blocks list their inputs in this order.

    Attributes:
        GRADIENT: a tangent, or a tensor of the backward.
        BOUNDARY: crosses a cut between stages of the forward.
        SAVED: any other tensor of the forward.
        PINNED: kept for the whole step.
        GIVEN: a primal or a constant.
    """

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
        stages: the stages in forward order. Where the loss is outside of the graph, the last one
            has no operations, and stands for the loss point.
        pinned: tensors of the forward that are kept from the moment they are computed.
        views: views of parameters and other given tensors. They take no memory, so each block makes
            the views that it reads, and none crosses a cut.
        stage_of: the stage of each operation.
        role_of: the role of each tensor.
        order: the index of each node in the joint graph.
        segments: the stages as segments, each with at least one stage; a line without branches is
            a single segment, the trunk.
        drawing: stages whose first forward has an effect: it draws random numbers, or prints.
        sums: backward nodes that read gradients of several branches, with the stages whose
            backwards give these. Each such node is in the backward of the lowest of these stages,
            and runs with the one that comes last in a schedule.
        unsaved: storages that no plan holds from forward to backward. They cross no cut.
        offloaded: storages that every plan has in host memory from forward to backward. They are
            pinned.
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
        """The index of the stage after each outermost branch; empty without branches."""
        return tuple(branch.stop for branch in self.segments.branches(1))

    @property
    def ends_at_loss_point(self) -> bool:
        """Whether the last stage has no operations, and stands for the loss point."""
        last = self.stages[-1]
        return not last.forward and not last.backward

    def name_of(self, stage: int) -> str:
        """Return the name of a stage, as reports and emitted code have it."""
        if self.ends_at_loss_point and stage == len(self.stages) - 1:
            return "loss point"
        if not self.segments.ends:
            return f"stage{stage}"
        return f"{self.segments.name_of(self.segments.at(stage))}_stage{stage}"

    @property
    def nodes(self) -> tuple[fx.Node, ...]:
        """The nodes of the joint graph, in graph order."""
        return tuple(self.order)

    def rank(self, node: fx.Node) -> tuple[int, int]:
        """Return a key that sorts tensors by role, then in graph order."""
        return (self.role_of[node], self.order[node])


Lives = dict[int, range]
"""For each storage the positions of the cuts that it crosses: from its owner to its last reader."""


def linearize(joint: JointGraph, effort: Effort) -> Line:
    """Return ``joint`` cut into stages, as many and as large as ``effort`` says.

    Ensures: every forward node is in exactly one stage or is a view of a given tensor; stages have
        them in graph order, branch after branch. Every backward node belongs to a stage whose saved
        set, boundary and pinned tensors hold all forward values that it reads. No backward node
        reads one of a lower stage, and only sums of gradients read one of another branch. Where the
        loss is outside of the graph, only pinned tensors cross the cut before the last stage, so
        that a schedule may hold any part of the other stages at the loss point. What a constraint
        keeps is pinned; what a constraint recomputes is read in its stage only.
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
        lives_of_join = _storage_lives(ordered, placed)
        pinned_of_join = _choose_pinned(ordered, placed, lives_of_join, effort)
        unsaved = constrained_storages(joint, "recompute") - pinned_of_join
        is_whole = not any(_crosses(lives_of_join[s], placed.segments) for s in unsaved)
        if is_whole and are_independent(ordered, placed, pinned_of_join):
            joint, positions, lives, pinned = ordered, placed, lives_of_join, pinned_of_join
            break
    crossing = _crossing(joint, positions, lives, pinned)
    cuts = cut_segments(crossing, positions.segments.ends, effort.most_stages)
    cuts = [cut for cut in cuts if crossing.weights[cut] < UNCUT_BYTES]
    return _assemble(joint, positions, pinned, views, cuts)


def _storage_lives(joint: JointGraph, positions: Positions) -> Lives:
    """Return the positions of the cuts that each storage allocated by the forward crosses.

    They go from its owner to its last reader. Those of a storage that a constraint recomputes begin
    at its first reader where that is earlier, because a backward may come before the owner.
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
    """Return whether ``life``, the positions at which a storage lives, spans several segments."""
    return segments.at(life.start) != segments.at(life.stop)


def _choose_pinned(
    joint: JointGraph, positions: Positions, lives: Lives, effort: Effort
) -> frozenset[int]:
    """Return the ids of the storages to keep for the whole step.

    These are outputs, values that cannot be computed again or that a constraint keeps, values that
    the backward of an earlier stage reads, and small values that would cross many cuts.
    """
    pinned = set(joint.storages.of(joint.results))
    pinned |= constrained_storages(joint, "keep", "offload")
    again = constrained_storages(joint, "recompute")
    for node, position in positions.forward.items():
        is_read_earlier = any(positions.backward.get(u, position) < position for u in node.users)
        is_read_earlier &= again.isdisjoint(joint.storages.of_node[node])
        once = joint.is_old_value(node) or rng.is_state(node) or batchnorm.is_new_statistic(node)
        if is_read_earlier or once or runs_once(node):
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
    """Return the bytes of storages that cross the cut after each position."""
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
    """Return the cuts that a storage crosses, as one range for each segment that it lives in.

    These are the segment where ``life`` starts, and those that it flows into.
    """
    spans = [life]
    for segment in segments.path(segments.at(life.start))[:-1]:
        cut = segments.ends[segment]
        if life.stop <= cut:
            break
        after = segments.start(segments.into[segment])
        spans[-1] = range(spans[-1].start, cut)
        spans.append(range(after, max(life.stop, after)))
    return spans


def _assemble(
    joint: JointGraph,
    positions: Positions,
    pinned: frozenset[int],
    views: frozenset[fx.Node],
    cuts: Sequence[int],
) -> Line:
    """Return ``joint`` as a line of stages that end at the positions ``cuts``."""
    located = (*positions.forward.items(), *positions.backward.items())
    stage_of = {node: bisect_left(cuts, position) for node, position in located}
    pinned_nodes = frozenset(
        n
        for n in joint.forward
        if is_tensor(n) and n not in views and pinned.issuperset(joint.storages.of_node[n])
    )
    stages = _stages(joint, stage_of, pinned_nodes, views, len(cuts) + 1)
    ends = tuple(bisect_left(cuts, end) for end in positions.segments.ends)
    unsaved = constrained_storages(joint, "recompute") - pinned
    return Line(
        joint,
        (*stages, *_loss_point(joint, stages)),
        pinned_nodes,
        views,
        stage_of,
        _roles(joint, stages, pinned_nodes),
        order={node: index for index, node in enumerate(joint.module.graph.nodes)},
        segments=replace(positions.segments, ends=ends),
        drawing=tuple(
            i for i, nodes in enumerate(stages) if any(map(rng.has_effect, nodes.forward))
        ),
        sums=_stages_of_sums(joint, positions, stage_of),
        unsaved=unsaved,
        offloaded=constrained_storages(joint, "offload") - joint.storages.of(joint.results),
    )


def _stages(
    joint: JointGraph,
    stage_of: Mapping[fx.Node, int],
    pinned: frozenset[fx.Node],
    views: frozenset[fx.Node],
    count: int,
) -> tuple[StageNodes, ...]:
    """Return the nodes of each of ``count`` stages, given the stage of each node."""
    in_backward = frozenset(joint.backward)
    forward, backward, boundary, saved, results = (
        [list[fx.Node]() for _ in range(count)] for _ in range(5)
    )
    for node in joint.backward:
        stage = stage_of[node]
        backward[stage].append(node)
        if is_tensor(node) and any(stage_of.get(u) != stage for u in node.users):  # or the output
            results[stage].append(node)
    for node in joint.forward:
        if node in views:
            continue
        stage = stage_of[node]
        forward[stage].append(node)
        if is_tensor(node) and node not in pinned:
            last = max((stage_of.get(u, 0) for u in node.users), default=0)
            for cut in range(stage + 1, last + 1):
                boundary[cut].append(node)
            if any(u in in_backward and stage_of[u] == stage for u in node.users):
                saved[stage].append(node)
    return tuple(
        StageNodes(
            tuple(forward[i]),
            tuple(backward[i]),
            tuple(boundary[i]),
            tuple(saved[i]),
            tuple(n for n in forward[i] if n in pinned),
            tuple(results[i]),
        )
        for i in range(count)
    )


def _stages_of_sums(
    joint: JointGraph, positions: Positions, stage_of: Mapping[fx.Node, int]
) -> dict[fx.Node, frozenset[int]]:
    """Return, for each sum of gradients of several branches, the stages that compute its inputs."""
    stages_of: dict[fx.Node, frozenset[int]] = {}
    for node in joint.backward:
        if node in positions.sums:
            sources = (n for n in node.all_input_nodes if n in positions.backward)
            stages_of[node] = frozenset[int]().union(
                *(stages_of[n] if n in stages_of else {stage_of[n]} for n in sources)
            )
    return stages_of


def _loss_point(joint: JointGraph, stages: Sequence[StageNodes]) -> tuple[StageNodes, ...]:
    """Return a stage without operations to append to ``stages``, or nothing.

    It stands for the loss point, and is added if the loss is outside of the graph and no such stage
    exists yet. A loss inside of the graph is a scalar. Its gradient comes from outside as well, but
    takes no memory worth a stage.
    """
    is_outside = any(n.meta["val"].numel() > 1 for n in joint.tangents if is_tensor(n))
    exists = not stages[-1].forward and not stages[-1].backward
    return (StageNodes((), (), (), (), (), ()),) if is_outside and not exists else ()


def _views_of_given(joint: JointGraph) -> frozenset[fx.Node]:
    """Return the operations that are views of primals or constants, except outputs."""
    views = set(joint.given)
    given = joint.storages.of(joint.given)
    results = {*joint.results, *joint.gradients}
    for node in joint.forward:
        sources = node.all_input_nodes
        is_view = is_tensor(node) and given.issuperset(joint.storages.of_node[node])
        if is_view and sources and views.issuperset(sources) and node not in results:
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
