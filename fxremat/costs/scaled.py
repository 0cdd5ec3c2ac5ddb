"""Costs of a step at sizes at which it was not measured.

A step is measured at the size of its capture. What the same line costs at another size follows
from that and from the work of its operations (``costs.work``).

**Seconds** are a guess, and only ever choose between plans. Those of an operation that may be run
again are in proportion to its work, those of a stage to the sum over its operations.

**Bytes of storages** are exact: expressions of the trace. A kernel that returns more than its
trace says is taken to go by what it reads and makes, of which that counts which has grown most,
or all together where none has grown: the number that ``mse_loss`` returns lies in a storage as
large as what it was computed from.

**Workspaces** are part of the peak. An operation that took none is taken to take none. For others
a bound is used that is never too small where a workspace neither shrinks as the operation's work
grows nor grows faster than it: less work than was measured takes at most what it took there, more
work at most as many times more as the tensor that has grown most of those it reads and makes, or
what it multiplies, if that has grown more. What is computed in parts takes what one of them takes,
and the results that nobody asked for: more work is more parts. That holds where parts are alike at
all sizes, and two of full size were measured.

Convolutions, units and other parts do not keep to that. A library chooses a convolution's algorithm
by its sizes, and one that takes no workspace for a batch of 8 may take one for 16 (oneDNN does,
cuDNN does). Kernels that a compiler makes for all sizes hold other buffers than those that it made
for one. :func:`with_workspaces` runs each distinct one of these at the size itself, alone.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import fx

from fxremat.costs.bits import other_bits
from fxremat.costs.cache import CostCache
from fxremat.costs.cost import stage_blocks
from fxremat.costs.execute import Note, Operations, undisturbed, unnoted
from fxremat.costs.synthetic import Synthesizer
from fxremat.costs.tuning import tune_kernels
from fxremat.costs.work import Floats, Work, Works, ratio
from fxremat.ir import RecordedCosts, Request, StageSeconds
from fxremat.passes.fuse.unit import Unit, compile_units
from fxremat.passes.joint.graph import granule_of
from fxremat.passes.joint.sizes import Values, layouts_of
from fxremat.passes.joint.user_kernels import is_tuned
from fxremat.passes.split.beside import Beside, parts_of
from fxremat.passes.split.ways import Rows
from fxremat.passes.stages.block import Block, BlockCache, Key, Mode
from fxremat.passes.stages.linearize import Line
from fxremat.passes.stages.resize import resize

aten = torch.ops.aten

Indices = NDArray[np.int64]

_CONVOLUTIONS = (aten.convolution.default, aten.convolution_backward.default)

CALL_S = 1e-6
"""What an operation takes at least, where no measured one does nothing else."""


class ScaledCosts:
    """Costs of a line at any size.

    Args:
        line: at the size of the capture.
        blocks: of ``line``.
        costs: as they were measured there.
    """

    def __init__(self, line: Line, blocks: BlockCache, costs: RecordedCosts) -> None:
        table, sizes = line.joint.storages, line.joint.sizes
        self._costs = costs
        self._hints = sizes.hints
        self._works = Works(line.joint)
        nodes = line.joint.module.graph.nodes
        self._steady = np.array([_is_steady(node) for node in nodes])
        dropped = [(i, n) for i, node in enumerate(nodes) for n in _dropped_bytes(node)]
        self._droppers = np.array([i for i, _ in dropped], dtype=np.int64)
        self._dropped = sizes.formulas(n for _, n in dropped)
        self._granule = granule_of(line.joint.device)
        self._work = self._works.at(sizes.hints)
        self._again = np.array([i for i, _ in costs.again_s], dtype=np.int64)
        self._again_s = np.array([seconds for _, seconds in costs.again_s])
        nbytes, flops = self._work.nbytes[self._again], self._work.flops[self._again]
        self._rates = rates_of(nbytes, flops, self._again_s)
        self._blocks, self._operations = _operations(line, blocks)
        self._stages_s = np.array(
            [(s.forward_s, s.rebuild_s, s.backward_s) for s in costs.stages]
        ).ravel()
        self._model_s = self._modelled_s(self._work)
        self._sums_s = self._sums(self._model_s, self._again_s)
        self._storages = sizes.formulas(table.asked_bytes)
        self._granules = np.array(table.granule_bytes, dtype=np.int64)
        self._makers = [line.order[maker] for maker in table.owner]
        measured, traced = np.array(costs.storage_bytes), self._traced_bytes(sizes.hints)
        self._larger_bytes = np.where(measured > traced, measured, 0).astype(float)

    def at(self, values: Values) -> RecordedCosts:
        """Costs where the symbols are ``values``; as measured at the size of the capture."""
        costs = self._costs
        if values == self._hints:
            return costs
        work = self._works.at(values)
        model_s = self._modelled_s(work)
        again_s = self._again_s * ratio(model_s[self._again], self._model_s[self._again])
        stages_s = self._stages_s * ratio(self._sums(model_s, again_s), self._sums_s)
        growth = self._works.growth(work, self._work)
        factor = np.where(self._steady, 1.0, growth).tolist()
        more = np.where(
            self._steady, self._dropped_at(values) - self._dropped_at(self._hints), 0
        ).tolist()
        workspaces = tuple(
            (index, mode, max(0, math.ceil(nbytes * factor[index]) + more[index]))
            for index, mode, nbytes in costs.workspace_bytes
        )
        return replace(
            costs,
            stages=tuple(StageSeconds(*row) for row in stages_s.reshape(-1, 3).tolist()),
            again_s=tuple(zip(self._again.tolist(), again_s.tolist(), strict=True)),
            workspace_bytes=workspaces,
            asked=_resized(costs, workspaces),
            storage_bytes=self._storage_bytes(values, work, growth),
        )

    def _storage_bytes(self, values: Values, work: Work, growth: Floats) -> tuple[int, ...]:
        """Bytes of each storage; one that was measured larger than traced is larger here, too."""
        shrunk = np.minimum(ratio(work.nbytes, self._work.nbytes), 1)
        factor = np.where(growth > 1, growth, shrunk)[self._makers]
        found = np.maximum(self._traced_bytes(values), self._larger_bytes * factor)
        return tuple(np.ceil(found).astype(np.int64).tolist())

    def _dropped_at(self, values: Values) -> Indices:
        """Bytes that each node computes beside its results, and a part of it does not."""
        nbytes = self._dropped(values)
        found = np.zeros_like(self._steady, dtype=np.int64)
        np.add.at(found, self._droppers, -(-nbytes // self._granule) * self._granule)
        return found

    def _traced_bytes(self, values: Values) -> Indices:
        asked = self._storages(values)
        rounded: Indices = -(-asked // self._granules) * self._granules
        return rounded

    def _modelled_s(self, work: Work) -> Floats:
        """Seconds of each node by the rates alone."""
        call_s, byte_s, flop_s = self._rates
        return call_s + byte_s * work.nbytes + flop_s * work.flops

    def _sums(self, model_s: Floats, again_s: Floats) -> Floats:
        """Seconds of the operations of each stage's forward, rebuild and backward."""
        each = model_s.copy()
        each[self._again] = again_s
        found: Floats = np.zeros_like(self._stages_s)
        np.add.at(found, self._blocks, each[self._operations])
        return found


def rates_of(nbytes: Floats, flops: Floats, seconds: Floats) -> tuple[float, float, float]:
    """Seconds of a call, a byte and a multiply-add that fit measured operations best.

    The error is relative to what each operation takes.
    """
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
    return call_s, *best[1:]


def _operations(line: Line, blocks: BlockCache) -> tuple[Indices, Indices]:
    """Operations of each stage's forward, rebuild and backward: the block's number, the node's."""
    three = (b for index in range(len(line.stages)) for b in stage_blocks(line, blocks, index))
    pairs = [(i, line.order[n]) for i, b in enumerate(three) for n in b.operations]
    block, node = np.array(pairs, dtype=np.int64).reshape(-1, 2).T
    return block, node


def with_workspaces(
    costs: RecordedCosts,
    line: Line,
    values: Values,
    cache: CostCache,
    *,
    note: Note = unnoted,
) -> RecordedCosts:
    """``costs`` at sizes ``values``, with the workspaces that convolutions and units take there,
    and runs whose parts are not those of the capture. ``note`` gets the bytes that this held.

    That takes about as long as all that are distinct together, and as making kernels for units at
    their first other size; where ``line``, at the size of its capture, has none, it is ``costs``.

    Ensures: the random generators are as before. Kernels of units are made, and kernels of users
        tuned, whether or not what they take is in the cache.

    Raises:
        CostError: one of them cannot be run.
    """
    lawless = [_is_lawless(node) for node in line.joint.module.graph.nodes]
    if not any(lawless) and not any(map(_is_measured, line.joint.module.graph.nodes)):
        return costs
    line = resize(line, values)
    nodes, device = tuple(line.joint.module.graph.nodes), line.joint.device
    keys: dict[tuple[int, str], tuple[Block, Key]] = {}
    made_up, operations = Synthesizer(line.joint, {}), Operations(cache, device=device)
    first = Operations(CostCache(), device=device)  # where kernels are made, that takes memory once

    def alone(node: fx.Node, mode: Mode) -> tuple[Block, Key]:
        """An operation as a block of its own, and its key."""
        inputs = tuple(node.all_input_nodes)
        reads = line.joint.storages.of(inputs)
        block = Block(line.stage_of[node], mode, (node,), inputs, (), reads)
        (key,) = operations.keys(block).values()
        return block, key

    def workspace_bytes(block: Block, key: Key) -> int:
        if key not in cache.workspace_bytes:
            real = made_up.of(block.inputs)
            if _unit_of(block):
                first.run(block, real)
            operations.run(block, real)
        return cache.workspace_bytes[key]

    for place, node in enumerate(nodes):
        parts = parts_of(node)
        if parts is not None and _is_measured(node):
            count = len(parts.inputs)
            args: Any = node.args
            given = [n.meta["val"] for n in args[:count]]
            own = tuple(map(int, args[count : count + len(parts.hints)]))
            kept = not other_bits(parts, given, own, cache=cache, note=note)
            parts.settle(own, keeps_bits=kept)
            lawless[place] |= not kept  # it is one part then
    with undisturbed(device):
        for i, mode, _ in costs.workspace_bytes:
            if lawless[i]:
                keys[i, mode] = alone(nodes[i], Mode(mode))
        units = (_unit_of(block) for block, _key in keys.values())
        compile_units([*dict.fromkeys(filter(None, units))], note=note)
        tune_kernels(line.joint, {}, note=note)
        found = tuple(
            (i, mode, workspace_bytes(*keys[i, mode]) if lawless[i] else nbytes)
            for i, mode, nbytes in costs.workspace_bytes
        )
    asked = dict(
        zip(((i, mode) for i, mode, _ in costs.asked), _resized(costs, found), strict=True)
    )
    for i, mode, _ in found:
        _block, key = keys.get((i, mode), (None, None))
        if key is not None and cache.asked[key]:
            asked[i, mode] = i, mode, cache.asked[key]
    note(max(first.peak_bytes, operations.peak_bytes))
    return replace(costs, workspace_bytes=found, asked=tuple(asked.values()))


def _resized(
    costs: RecordedCosts, workspaces: Sequence[tuple[int, str, int]]
) -> tuple[tuple[int, str, tuple[Request, ...]], ...]:
    """What operations ask for, where all of their workspaces are as large as ``workspaces`` says:
    each piece in proportion.
    """
    before = {(i, mode): nbytes for i, mode, nbytes in costs.workspace_bytes}
    now = {(i, mode): nbytes for i, mode, nbytes in workspaces}

    def resized(of: tuple[int, str], nbytes: int) -> int:
        size = 0 if not before[of] else -(-abs(nbytes) * now[of] // before[of])
        return size if nbytes > 0 else -size

    return tuple(
        (i, mode, tuple((key, resized((i, mode), nbytes)) for key, nbytes in asked))
        for i, mode, asked in costs.asked
    )


def _is_measured(node: fx.Node) -> bool:
    """Whether only a comparison can show that an operation in parts keeps its bits."""
    parts = parts_of(node)
    return parts is not None and parts.exact and not parts.certain


def _is_steady(node: fx.Node) -> bool:
    """Whether its parts are alike at all sizes, and two of full size were measured: the first one
    runs before there is memory for the results.
    """
    parts = parts_of(node)
    if parts is None or int(parts.rows) < 2 * parts.part_rows:
        return False
    given: Any = node.args[: len(parts.inputs)]
    return parts.are_alike([layouts_of(n)[0].shape for n in given])


def _dropped_bytes(node: fx.Node) -> list[int]:
    """Bytes of each result with rows that a run gives and ``node``, which computes it anew, drops;
    they may follow the sizes.
    """
    if not isinstance(node.target, Beside):
        return []
    outputs = enumerate(node.target.parts.outputs)
    return [
        own.layout.storage_bytes
        for i, own in outputs
        if i not in node.target.results and isinstance(own.way, Rows)
    ]


def _unit_of(block: Block) -> tuple[Unit, tuple[int, ...]] | None:
    """The unit that ``block`` runs, with the sizes that it is called with, if it runs one."""
    (node,) = block.nodes
    if not isinstance(node.target, Unit):
        return None
    sizes: Any = node.args[len(node.target.inputs) :]
    return node.target, tuple(map(int, sizes))


def _is_lawless(node: fx.Node) -> bool:
    """Whether nothing tells what workspace an operation takes at other sizes."""
    if parts_of(node) is not None:
        return not _is_steady(node)
    return node.target in _CONVOLUTIONS or isinstance(node.target, Unit) or is_tuned(node)
