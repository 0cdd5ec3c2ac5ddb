"""Costs of a step at sizes at which it was not measured.

A step is measured at the size of its capture. Costs of the same line at another size follow from
these and from the work of its operations (``fxremat.costs.measured.work``).

**Seconds** are an estimate, and are only used to choose between plans. Those of an operation that
may run again are proportional to its work, those of a stage to the sum over its operations.

**Bytes of storages** are exact: expressions of the trace. A kernel that returns more than its trace
says is assumed to scale with the tensor that has grown most of those it reads and makes, or with
all of them together if none has grown: the number that ``mse_loss`` returns is in a storage of the
size of its input.

**Workspaces** are part of the peak. An operation without a workspace is assumed to have none at
other sizes. For others there is an upper bound, which holds where a workspace neither shrinks as
the operation's work grows nor grows faster than its work: for less work than measured, the measured
workspace; for more work, the measured workspace times the growth of the tensor that has grown most
of those that the operation reads and makes, or the growth of its products, if that is more. An
operation computed in parts has the workspace of one part, and the results that nothing reads; more
work is more parts. That holds where parts are alike at all sizes, and two of full size were
measured.

Convolutions, units and other parts do not follow that rule. A library chooses a convolution's
algorithm by its sizes, and one that needs no workspace for a batch of 8 may need one for 16 (as in
oneDNN and cuDNN). Kernels that a compiler generates for all sizes have other buffers than those
generated for one. :func:`with_workspaces` runs each distinct one of these by itself at the
requested size.
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

from fxremat.costs.measured.bits import other_bits
from fxremat.costs.measured.cache import CostCache
from fxremat.costs.measured.cost import stage_blocks
from fxremat.costs.measured.execute import Operations, undisturbed
from fxremat.costs.measured.synthetic import Synthesizer
from fxremat.costs.measured.tuning import tune_kernels
from fxremat.costs.measured.work import Floats, Work, Works, rates_of, ratio
from fxremat.ir import RecordedCosts, Request, StageSeconds
from fxremat.passes.fuse.unit import Unit, compile_units
from fxremat.passes.joint.graph import granule_of
from fxremat.passes.joint.sizes import Values, layouts_of
from fxremat.passes.joint.user_kernels import is_tuned
from fxremat.passes.parts.early_gradients import EarlyGradients, parts_of
from fxremat.passes.parts.rows import Rows
from fxremat.passes.stages.block import Block, BlockCache, Key, Mode
from fxremat.passes.stages.linearize import Line
from fxremat.passes.stages.resize import resize
from fxremat.progress import Note, unnoted

aten = torch.ops.aten

Indices = NDArray[np.int64]

_CONVOLUTIONS = (aten.convolution.default, aten.convolution_backward.default)


class ScaledCosts:
    """Costs of a line at any size, scaled from those that were measured at the size of the capture.

    Args:
        line: the stages at the size of the capture.
        blocks: blocks of ``line``.
        costs: costs that were measured at the size of the capture.
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
        """Return the costs at the sizes ``values``; at the sizes of the capture, those measured."""
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
        """Return the bytes of each storage, by index, at the sizes ``values``.

        A storage that was measured larger than its trace is larger at this size too.

        Args:
            work: the work of each node at these sizes.
            growth: by which factor each node's work has grown since the capture, at least 1.
        """
        shrunk = np.minimum(ratio(work.nbytes, self._work.nbytes), 1)
        factor = np.where(growth > 1, growth, shrunk)[self._makers]
        sizes = np.maximum(self._traced_bytes(values), self._larger_bytes * factor)
        return tuple(np.ceil(sizes).astype(np.int64).tolist())

    def _dropped_at(self, values: Values) -> Indices:
        """Return, for each node by index, the bytes of results that it computes again and drops.

        These are at the sizes ``values``. See :func:`_dropped_bytes`.
        """
        nbytes = self._dropped(values)
        dropped = np.zeros_like(self._steady, dtype=np.int64)
        np.add.at(dropped, self._droppers, -(-nbytes // self._granule) * self._granule)
        return dropped

    def _traced_bytes(self, values: Values) -> Indices:
        asked = self._storages(values)
        rounded: Indices = -(-asked // self._granules) * self._granules
        return rounded

    def _modelled_s(self, work: Work) -> Floats:
        """Return the seconds of each node, by index, according to the rates of :func:`rates_of`."""
        call_s, byte_s, flop_s = self._rates
        return call_s + byte_s * work.nbytes + flop_s * work.flops

    def _sums(self, model_s: Floats, again_s: Floats) -> Floats:
        """Return the seconds of each stage's forward, rebuild and backward, summed over operations.

        Args:
            model_s: seconds of each node according to the rates.
            again_s: seconds of the nodes that were measured by themselves, which replace these.
        """
        each = model_s.copy()
        each[self._again] = again_s
        sums: Floats = np.zeros_like(self._stages_s)
        np.add.at(sums, self._blocks, each[self._operations])
        return sums


def _operations(line: Line, blocks: BlockCache) -> tuple[Indices, Indices]:
    """Return an entry for each operation that a block runs: the indices of block and node.

    Blocks are numbered in order, three for each stage: forward, rebuild and backward.

    Returns:
        Indices of blocks, and indices of nodes, in two arrays of equal length.
    """
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
    """Measure the workspaces that cannot be scaled: of convolutions, units and some runs in parts.

    That takes as long as running each distinct operation, and generating the kernels of units at
    their first other size.

    Args:
        costs: costs scaled to ``values``.
        line: the stages at the size of the capture.
        values: values of the symbols.
        cache: measurements. New ones are added.
        note: called with the most bytes that measuring held at once.

    Returns:
        ``costs`` with these workspaces; unchanged if ``line`` has none of them.

    Ensures:
        The random generators are as before. Kernels of units are generated, and kernels of users
        tuned, even if their workspaces are in the cache.

    Raises:
        CostError: an operation cannot be run.
    """
    lawless = [_is_lawless(node) for node in line.joint.module.graph.nodes]
    if not any(lawless) and not any(map(_is_measured, line.joint.module.graph.nodes)):
        return costs
    line = resize(line, values)
    nodes, device = tuple(line.joint.module.graph.nodes), line.joint.device
    keys: dict[tuple[int, str], tuple[Block, Key]] = {}
    single = _SingleOperations(line, cache)
    for place, node in enumerate(nodes):
        if _is_measured(node):
            lawless[place] |= not _keeps_bits(node, cache, note)  # if not, it has a single part
    with undisturbed(device):
        for i, mode, _ in costs.workspace_bytes:
            if lawless[i]:
                keys[i, mode] = single.block(nodes[i], Mode(mode))
        units = (_unit_of(block) for block, _key in keys.values())
        compile_units([*dict.fromkeys(filter(None, units))], note=note)
        tune_kernels(line.joint, {}, note=note)
        workspaces = tuple(
            (i, mode, single.workspace_bytes(*keys[i, mode]) if lawless[i] else nbytes)
            for i, mode, nbytes in costs.workspace_bytes
        )
    asked = dict(
        zip(((i, mode) for i, mode, _ in costs.asked), _resized(costs, workspaces), strict=True)
    )
    for i, mode, _ in workspaces:
        _block, key = keys.get((i, mode), (None, None))
        if key is not None and cache.asked[key]:
            asked[i, mode] = i, mode, cache.asked[key]
    note(single.peak_bytes)
    return replace(costs, workspace_bytes=workspaces, asked=tuple(asked.values()))


class _SingleOperations:
    """Runs operations of a line by themselves, with made-up values, to measure their workspaces."""

    def __init__(self, line: Line, cache: CostCache) -> None:
        device = line.joint.device
        self._line, self._cache = line, cache
        self._values = Synthesizer(line.joint, {})
        self._operations = Operations(cache, device=device)
        self._first = Operations(CostCache(), device=device)  # runs that generate kernels

    @property
    def peak_bytes(self) -> int:
        """Most bytes that running operations has held at once."""
        return max(self._first.peak_bytes, self._operations.peak_bytes)

    def block(self, node: fx.Node, mode: Mode) -> tuple[Block, Key]:
        """Return a block that runs only ``node``, and the key of its measurements in the cache."""
        inputs = tuple(node.all_input_nodes)
        reads = self._line.joint.storages.of(inputs)
        block = Block(self._line.stage_of[node], mode, (node,), inputs, (), reads)
        (key,) = self._operations.keys(block).values()
        return block, key

    def workspace_bytes(self, block: Block, key: Key) -> int:
        """Return the bytes of an operation's workspace, running it if they are not in the cache.

        A unit runs twice: generating its kernels takes memory, but only at the first run.

        Args:
            block, key: as :meth:`block` returns them.
        """
        if key not in self._cache.workspace_bytes:
            values = self._values.of(block.inputs)
            if _unit_of(block):
                self._first.run(block, values)
            self._operations.run(block, values)
        return self._cache.workspace_bytes[key]


def _resized(
    costs: RecordedCosts, workspaces: Sequence[tuple[int, str, int]]
) -> tuple[tuple[int, str, tuple[Request, ...]], ...]:
    """Return the allocator requests of ``costs`` with their workspaces resized.

    Args:
        costs: costs with the requests and the workspaces to which these belong.
        workspaces: index of a node, mode and new bytes of its workspace. Requests for pieces of it
            change in proportion.
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
    """Return whether only a comparison can show that ``node``, a run in parts, keeps its bits."""
    parts = parts_of(node)
    return parts is not None and parts.exact and not parts.certain


def _keeps_bits(node: fx.Node, cache: CostCache, note: Note) -> bool:
    """Return whether a run gives the same bits in parts as at once; if not, it stays whole."""
    parts = parts_of(node)
    assert parts is not None
    count = len(parts.inputs)
    args: Any = node.args
    sizes = tuple(map(int, args[count : count + len(parts.hints)]))
    inputs = [n.meta["val"] for n in args[:count]]
    try:
        keeps_bits = not other_bits(parts, inputs, sizes, cache=cache, note=note)
    except torch.OutOfMemoryError:
        keeps_bits = False
    parts.confirm_bits(sizes, keeps_bits=keeps_bits)
    return keeps_bits


def _is_steady(node: fx.Node) -> bool:
    """Return whether ``node`` runs in parts that are alike at all sizes: its workspace scales.

    Two parts of full size must have been measured, since the first runs before the results are
    allocated.
    """
    parts = parts_of(node)
    if parts is None or int(parts.rows) < 2 * parts.part_rows:
        return False
    given: Any = node.args[: len(parts.inputs)]
    return parts.are_alike([layouts_of(n)[0].shape for n in given])


def _dropped_bytes(node: fx.Node) -> list[int]:
    """Return the bytes of each result that :class:`EarlyGradients` computes again and drops.

    Only results that have rows count. The bytes may be symbolic. Other nodes drop none.
    """
    if not isinstance(node.target, EarlyGradients):
        return []
    outputs = enumerate(node.target.parts.outputs)
    return [
        output.layout.storage_bytes
        for i, output in outputs
        if i not in node.target.results and isinstance(output.way, Rows)
    ]


def _unit_of(block: Block) -> tuple[Unit, tuple[int, ...]] | None:
    """Return the unit that ``block`` runs and the sizes that it is called with, if it runs one."""
    (node,) = block.nodes
    if not isinstance(node.target, Unit):
        return None
    sizes: Any = node.args[len(node.target.inputs) :]
    return node.target, tuple(map(int, sizes))


def _is_lawless(node: fx.Node) -> bool:
    """Return whether an operation's workspace at other sizes must be measured, not scaled."""
    if parts_of(node) is not None:
        return not _is_steady(node)
    return node.target in _CONVOLUTIONS or isinstance(node.target, Unit) or is_tuned(node)
