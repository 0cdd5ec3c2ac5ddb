"""Costs of a step at sizes at which it was not measured.

A step is measured at one size, or a few: its *anchors*. What the same line costs at another
size follows from these and from the work of its operations (``costs.work``).

**Seconds** are a guess, and only ever choose between plans. Those of an operation that may be run
again go linearly with its work between anchors and in proportion beyond them; those of a stage
with the sum over its operations. So they are never negative, never fall as work grows, and are
those of an anchor at an anchor.

**Bytes of storages** are exact: expressions of the trace. A kernel that returns more than its
trace says is taken to go by what it reads and makes, of which that counts which has grown most,
or all together where none has grown: the number that ``mse_loss`` returns lies in a storage as
large as what it was computed from.

**Workspaces** are part of the peak. An operation that took none at any anchor is taken to take
none. For others a bound is used that is never too small where a workspace neither shrinks as
the operation's work grows nor grows faster than it: less work than at an anchor takes at most
what it took there, more work at most as many times more as the tensor that has grown most of
those it reads and makes, or what it multiplies, if that has grown more. Of several anchors the
least such bound counts, unless one of them disproves another's. A library that takes another
algorithm at another size can take more, from none on. Convolutions do: ``costs.library`` measures
theirs at the size itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fxremat.costs.cost import stage_blocks
from fxremat.costs.work import Floats, Work, Works, ratio
from fxremat.errors import CostError
from fxremat.ir import RecordedCosts, StageSeconds
from fxremat.passes.joint.sizes import Formulas, Values
from fxremat.passes.stages.block import is_getitem
from fxremat.passes.stages.blocks import BlockCache
from fxremat.passes.stages.linearize import Line

Indices = NDArray[np.int64]

CALL_S = 1e-6
"""What an operation takes at least, where no measured one does nothing else."""


@dataclass(frozen=True, slots=True)
class Anchor:
    """A size at which a line was measured."""

    values: Values
    costs: RecordedCosts


@dataclass(frozen=True, slots=True)
class Rates:
    """What operations take for each of three things that they do.

    Attributes:
        call_s: for being called.
        byte_s: for each byte that is read or made.
        flop_s: for each multiply-add.
    """

    call_s: float
    byte_s: float
    flop_s: float

    def seconds(self, work: Work) -> Floats:
        """Of operations."""
        return self.call_s + self.byte_s * work.nbytes + self.flop_s * work.flops

    @staticmethod
    def fitted(nbytes: Floats, flops: Floats, seconds: Floats) -> Rates:
        """Those that fit measured operations best, relative to what each takes."""
        idle = seconds[(nbytes == 0) & (flops == 0)]
        call_s = float(np.median(idle)) if idle.size else CALL_S
        busy = (nbytes > 0) & (seconds > call_s)
        weight = 1 / np.maximum(seconds[busy], 1e-12)
        columns = np.stack([nbytes[busy], flops[busy]], axis=1) * weight[:, None]
        wanted = (seconds[busy] - call_s) * weight
        best = (np.inf, 1e-10, 0.0)
        for used in ((0, 1), (0,), (1,)):
            rates, *_ = np.linalg.lstsq(columns[:, used], wanted, rcond=None)
            found = np.zeros(2)
            found[list(used)] = rates
            error = float(np.sum((columns @ found - wanted) ** 2))
            if np.all(found >= 0) and error < best[0]:
                best = (error, float(found[0]), float(found[1]))
        return Rates(call_s, *best[1:])


@dataclass(frozen=True, slots=True, eq=False)
class _Groups:
    """Sets of nodes, to be summed over: rows of the set and of a node's index."""

    rows: Indices
    count: int

    @staticmethod
    def of(sets: Sequence[Iterable[int]]) -> _Groups:
        pairs = [(i, index) for i, own in enumerate(sets) for index in own]
        return _Groups(np.array(pairs, dtype=np.int64).reshape(-1, 2).T, len(sets))

    def sums(self, each: Floats) -> Floats:
        """Over each set."""
        groups, nodes = self.rows
        found: Floats = np.zeros(self.count)
        np.add.at(found, groups, each[nodes])
        return found


@dataclass(frozen=True, slots=True, eq=False)
class _Known:
    """What an anchor has measured, and the work that it was.

    Attributes:
        work: of its nodes.
        again_s: of operations that may run again.
        work_s: of each stage's forward, rebuild and backward: what their operations would take.
        stages_s: what these took.
        workspace_bytes: of operations as they run.
        larger_bytes: of storages that are larger than traced; 0 for others.
    """

    work: Work
    again_s: Floats
    work_s: Floats
    stages_s: Floats
    workspace_bytes: Floats
    larger_bytes: Floats


@dataclass(frozen=True, slots=True, eq=False)
class ScaledCosts:
    """Costs of a line at any size.

    Attributes:
        anchors: where it was measured, the size of the capture first.
        known: what was measured there.
        works: of its nodes.
        rates: of the device.
        storages: bytes of each storage, before the allocator rounds them.
        granules: what it rounds them up to.
        again: operations that may run again, by index.
        workspaces: operations of the anchors' workspaces, by index.
        makers: of each storage, what first holds it, by index.
        groups: operations of each stage's forward, rebuild and backward.
    """

    anchors: tuple[Anchor, ...]
    known: tuple[_Known, ...]
    works: Works
    rates: Rates
    storages: Formulas
    granules: Indices
    again: Indices
    workspaces: Indices
    makers: Indices
    groups: _Groups

    @staticmethod
    def of(line: Line, blocks: BlockCache, anchors: Sequence[Anchor]) -> ScaledCosts:
        """Those of a measured line.

        Args:
            line: at the size of the capture.
            blocks: of ``line``.
            anchors: where it was measured, that size first.

        Raises:
            CostError: an anchor is not of this line.
        """
        first = anchors[0].costs
        for anchor in anchors:
            if _outline(anchor.costs) != _outline(first):
                raise CostError(
                    f"the costs at {anchor.values} name other operations than those at "
                    f"{anchors[0].values}: they are of another graph, measure this one"
                )
        table = line.joint.storages
        works = Works.of(line.joint)
        again = np.array([i for i, _ in first.again_s], dtype=np.int64)
        done = [works.at(anchor.values) for anchor in anchors]
        rates = Rates.fitted(
            np.concatenate([work.nbytes[again] for work in done]),
            np.concatenate([work.flops[again] for work in done]),
            np.array([s for anchor in anchors for _, s in anchor.costs.again_s]),
        )
        bare = ScaledCosts(
            tuple(anchors),
            (),
            works,
            rates,
            line.joint.sizes.formulas(table.asked_bytes),
            np.array(table.granule_bytes, dtype=np.int64),
            again,
            np.array([i for i, _, _ in first.workspace_bytes], dtype=np.int64),
            _makers(line),
            _stage_groups(line, blocks),
        )
        known = tuple(bare._know(anchor) for anchor in anchors)
        return ScaledCosts(
            bare.anchors,
            known,
            works,
            rates,
            bare.storages,
            bare.granules,
            again,
            bare.workspaces,
            bare.makers,
            bare.groups,
        )

    def at(self, values: Values) -> RecordedCosts:
        """Costs where the symbols are ``values``: as measured at an anchor, scaled elsewhere."""
        for anchor in self.anchors:
            if anchor.values == values:
                return anchor.costs
        work = self.works.at(values)
        model_s = self.rates.seconds(work)
        again_s = _followed(
            model_s[self.again],
            np.stack([self.rates.seconds(k.work)[self.again] for k in self.known]),
            np.stack([k.again_s for k in self.known]),
        )
        stages_s = _followed(
            self._work_s(model_s, again_s),
            np.stack([k.work_s for k in self.known]),
            np.stack([k.stages_s for k in self.known]),
        )
        workspaces = self._workspaces(work)
        first = self.anchors[0].costs
        return RecordedCosts(
            stages=tuple(StageSeconds(*row) for row in stages_s.reshape(-1, 3).tolist()),
            again_s=tuple(zip(self.again.tolist(), again_s.tolist(), strict=True)),
            workspace_bytes=tuple(
                (index, mode, found)
                for (index, mode, _), found in zip(
                    first.workspace_bytes, workspaces.tolist(), strict=True
                )
            ),
            storage_bytes=tuple(self._storage_bytes(values, work).tolist()),
            displaced=tuple(sorted({s for a in self.anchors for s in a.costs.displaced})),
            link=first.link,
            messages_s=first.messages_s,
            asked=first.asked,
        )

    def _traced_bytes(self, values: Values) -> Indices:
        asked = self.storages(values)
        rounded: Indices = -(-asked // self.granules) * self.granules
        return rounded

    def _storage_bytes(self, values: Values, work: Work) -> Indices:
        """Of each storage; what is larger than traced at an anchor is larger here."""
        traced = self._traced_bytes(values)
        larger: Floats = np.max([self._larger_bytes(k, work) for k in self.known], axis=0)
        found: Indices = np.ceil(np.maximum(traced, larger)).astype(np.int64)
        return found

    def _larger_bytes(self, known: _Known, work: Work) -> Floats:
        """Of storages that were larger than traced at an anchor; 0 for others."""
        grown = self.works.growth(work, known.work)
        factor = np.where(grown > 1, grown, np.minimum(ratio(work.nbytes, known.work.nbytes), 1))
        found: Floats = known.larger_bytes * factor[self.makers]
        return found

    def _work_s(self, model_s: Floats, again_s: Floats) -> Floats:
        """What the operations of each stage's forward, rebuild and backward would take."""
        each = model_s.copy()
        each[self.again] = again_s
        return self.groups.sums(each)

    def _know(self, anchor: Anchor) -> _Known:
        costs = anchor.costs
        work = self.works.at(anchor.values)
        again_s = np.array([s for _, s in costs.again_s])
        traced = self._traced_bytes(anchor.values)
        return _Known(
            work,
            again_s,
            self._work_s(self.rates.seconds(work), again_s),
            np.array([(s.forward_s, s.rebuild_s, s.backward_s) for s in costs.stages]).ravel(),
            np.array([float(n) for _, _, n in costs.workspace_bytes]),
            np.where(np.array(costs.storage_bytes) > traced, costs.storage_bytes, 0).astype(float),
        )

    def _workspaces(self, work: Work) -> Indices:
        """The bound that this file's docstring tells of."""
        bounds = np.stack([self._bound(k, work) for k in self.known])
        holds = np.stack([k.workspace_bytes > 0 for k in self.known])
        for i, k in enumerate(self.known):
            for other in self.known:
                holds[i] &= self._bound(k, other.work) >= other.workspace_bytes
        least = np.min(np.where(holds, bounds, np.inf), axis=0)
        bound = np.where(np.isfinite(least), least, np.max(bounds, axis=0))
        found: Indices = np.ceil(bound).astype(np.int64)
        return found

    def _bound(self, known: _Known, work: Work) -> Floats:
        """Most that workspaces take with so much work, by what one anchor says."""
        return known.workspace_bytes * self.works.growth(work, known.work)[self.workspaces]


def _outline(costs: RecordedCosts) -> tuple[object, ...]:
    """What costs of one line have in common at all sizes."""
    return (
        len(costs.stages),
        len(costs.storage_bytes),
        [i for i, _ in costs.again_s],
        [(i, mode) for i, mode, _ in costs.workspace_bytes],
    )


def _makers(line: Line) -> Indices:
    """Of each storage the first node that holds it, by index."""
    table = line.joint.storages
    found = np.zeros(len(table.nbytes), dtype=np.int64)
    for index, node in reversed(list(enumerate(line.joint.module.graph.nodes))):
        for storage in table.of_node.get(node, ()):
            found[storage] = index
    return found


def _stage_groups(line: Line, blocks: BlockCache) -> _Groups:
    """Operations of each stage's forward, rebuild and backward, in this order."""
    sets = []
    for index in range(len(line.stages)):
        for block in stage_blocks(line, blocks, index):
            sets.append([line.order[n] for n in block.nodes if not is_getitem(n)])
    return _Groups.of(sets)


def _followed(work: Floats, works: Floats, seconds: Floats) -> Floats:
    """Seconds of so much work: linear between what was measured, in proportion beyond.

    Args:
        work: ``(n,)``.
        works, seconds: ``(anchors, n)``.
    """
    order = np.argsort(works, axis=0, kind="stable")
    works = np.take_along_axis(works, order, axis=0)
    seconds = np.maximum.accumulate(np.take_along_axis(seconds, order, axis=0), axis=0)
    found: Floats = seconds[0] * np.minimum(ratio(work, works[0]), 1.0)
    for i in range(1, len(works)):
        share = np.clip((work - works[i - 1]) / np.maximum(works[i] - works[i - 1], 1e-15), 0, 1)
        found += share * (seconds[i] - seconds[i - 1])
    found *= np.maximum(ratio(work, works[-1]), 1.0)
    return found
