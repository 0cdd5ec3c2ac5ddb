"""What each stage costs, measured on the device that will run it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import fx

from fxremat import torch_compat
from fxremat.costs.cache import CostCache
from fxremat.costs.calls import call_s
from fxremat.costs.execute import compile_block, run_logged, time_operations
from fxremat.costs.measure import KernelClock
from fxremat.costs.synthetic import Synthesizer
from fxremat.costs.workspaces import library_workspaces
from fxremat.errors import CostError
from fxremat.passes.joint.storage import StorageTable
from fxremat.passes.stages.block import Block, Mode, is_getitem
from fxremat.passes.stages.blocks import BlockCache
from fxremat.passes.stages.linearize import Line
from fxremat.passes.stages.signature import block_key, node_key

LEAST_RUNS, MOST_RUNS, ENOUGH_S = 5, 20, 0.05
"""A block is timed until it ran this often, or this long in all. The fastest run counts: what
else the machine does can only make one slower."""

Progress = Callable[[str, int, int], None]
"""Called with what is done, how much of it, and of how much."""


@dataclass(frozen=True, slots=True)
class StageSeconds:
    """Measured seconds of one stage, with those of its call in emitted code."""

    forward_s: float
    rebuild_s: float
    backward_s: float


@dataclass(frozen=True, slots=True)
class Measured:
    """Measurements of a line.

    Attributes:
        line: the line, its storages as large as they really are.
        stages: seconds of each stage.
        again_s: seconds of each operation that a recomputation may run, alone.
        workspace_bytes: peak of an operation beyond its arguments and results.
        displaced: storages with tensors whose strides are not those of the trace.
    """

    line: Line
    stages: tuple[StageSeconds, ...]
    again_s: Mapping[fx.Node, float]
    workspace_bytes: Callable[[fx.Node, Block], int]
    displaced: frozenset[int]


def measure_line(
    line: Line,
    blocks: BlockCache,
    *,
    real: Mapping[fx.Node, torch.Tensor],
    cache: CostCache,
    progress: Progress,
) -> Measured:
    """Run each distinct stage alone and measure it.

    Args:
        line: the stages.
        blocks: blocks of ``line``.
        real: values of primals, where known; others are made up with the right
            strides. Integers and masks flow through the stages as they really would.
        cache: measurements that exist already; new ones are added.
        progress: told of each stage.

    Ensures: no tensor of ``real`` is written to; the random generators are as before.

    Raises:
        CostError: an operation cannot be run.
    """
    library_workspaces(line.joint.device)  # or the first product would be charged with them
    walk = _Walk(line, blocks, Synthesizer(line.joint, real), cache)
    stages = []
    devices = sorted({t.device.index or 0 for t in real.values() if t.device.type == "cuda"})
    with torch_compat.real_execution(), torch.no_grad(), torch.random.fork_rng(devices=devices):
        for index in range(len(line.stages)):
            progress("measuring", index, len(line.stages))
            stages.append(walk.stage(index))
        progress("measuring", len(line.stages), len(line.stages))
    sized = replace(line, joint=replace(line.joint, storages=walk.real_storages()))

    known: dict[tuple[fx.Node, Mode], int] = {}  # keys are dear: each is made once

    def workspace_bytes(node: fx.Node, block: Block) -> int:
        asked = node, block.mode_of(node)
        if asked not in known:
            key = node_key(node, block)
            if key not in cache.workspace_bytes:
                raise CostError(f"{node.name} ({node.target}) was never measured in {block.mode}")
            known[asked] = cache.workspace_bytes[key]
        return known[asked]

    displaced = frozenset(walk.displaced)
    return Measured(sized, tuple(stages), walk.again_s, workspace_bytes, displaced)


class _Walk:
    """Carries real values from stage to stage and measures on the way."""

    def __init__(
        self, line: Line, blocks: BlockCache, values: Synthesizer, cache: CostCache
    ) -> None:
        self._line = line
        self._blocks = blocks
        self._values = values
        self._cache = cache
        self._device = line.joint.device
        self._sizes: dict[int, int] = {}
        self.displaced: set[int] = set()
        self.again_s: dict[fx.Node, float] = {}

    def stage(self, index: int) -> StageSeconds:
        """Measure stage ``index`` and leave the boundary after it among the values."""
        first, again, backward = stage_blocks(self._line, self._blocks, index)
        self._values.hold(self._log(first))
        whole = self._again_whole(index)
        self._log(whole)
        self._log(backward)
        self._time_operations(whole)
        seconds = StageSeconds(self._time(first), self._time(again), self._time(backward))
        self._values.keep_only({*boundary_after(self._line, index), *self._line.pinned})
        return seconds

    def _again_whole(self, index: int) -> Block:
        """A recomputation of all that any schedule may ask of the stage again."""
        stage = self._line.stages[index]
        passed_on = frozenset(stage.forward).intersection(boundary_after(self._line, index))
        wanted = passed_on.union(stage.saved) - self._line.pinned
        return self._blocks(index, Mode.AGAIN, wanted)

    def _log(self, block: Block) -> dict[fx.Node, torch.Tensor]:
        """Run ``block`` once, operation by operation, noting workspaces and sizes."""
        known = all(
            node_key(n, block) in self._cache.workspace_bytes
            for n in block.nodes
            if not is_getitem(n)
        )
        if known and block.mode is not Mode.FIRST:
            self._note_sizes(block)
            return {}
        values = self._values.of(block.inputs)
        results = run_logged(block, values, self._cache, device=self._device)
        self._note_sizes(block)
        return results

    def _note_sizes(self, block: Block) -> None:
        for node in block.nodes:
            if is_getitem(node):
                continue
            key = node_key(node, block)
            sizes = self._cache.result_bytes.get(key, ())
            storages = self._line.joint.storages.of_node[node]
            if not self._cache.as_traced.get(key, True):
                self.displaced.update(storages)
            for storage, size in zip(storages, sizes, strict=False):
                self._sizes[storage] = max(self._sizes.get(storage, 0), size)

    def _time_operations(self, block: Block) -> None:
        """Seconds of each operation of a recomputation."""
        keys = {n: node_key(n, block) for n in block.nodes if not is_getitem(n)}
        cache = self._cache.operation_s
        if not cache.keys() >= set(keys.values()):
            time_operations(block, self._values.of(block.inputs), cache, device=self._device)
        self.again_s.update({node: cache[key] for node, key in keys.items()})

    def _time(self, block: Block) -> float:
        if not block.nodes:
            return 0.0
        key = block_key(block, self._line.joint.storages)
        if key not in self._cache.seconds:
            self._cache.seconds[key] = self._least_seconds(block)
        return self._cache.seconds[key] + call_s()

    def _least_seconds(self, block: Block) -> float:
        run = compile_block(block)
        values = self._values.of(block.inputs)
        inputs = [values[n] for n in block.inputs]
        run(list(inputs))  # warm: library handles, autotuning, page faults
        clock, seconds = KernelClock(self._device), list[float]()
        while len(seconds) < LEAST_RUNS or (sum(seconds) < ENOUGH_S and len(seconds) < MOST_RUNS):
            seconds.append(clock.seconds_of(lambda: run(list(inputs))))
        return min(seconds)

    def real_storages(self) -> StorageTable:
        """The storages with their measured sizes, where larger than traced."""
        table = self._line.joint.storages
        sizes = tuple(max(n, self._sizes.get(i, 0)) for i, n in enumerate(table.nbytes))
        return replace(table, nbytes=sizes)


def stage_blocks(line: Line, blocks: BlockCache, index: int) -> tuple[Block, Block, Block]:
    """First forward with everything kept, rebuild of the saved set, backward of a stage."""
    stage = line.stages[index]
    passed_on = frozenset(stage.forward).intersection(boundary_after(line, index))
    first = blocks(index, Mode.FIRST, passed_on.union(stage.saved, stage.pinned))
    again = blocks(index, Mode.AGAIN, frozenset(stage.saved))
    backward = blocks(index, Mode.BACKWARD, frozenset(backward_results(line, index)))
    return first, again, backward


def boundary_after(line: Line, index: int) -> Sequence[fx.Node]:
    """Tensors that cross the cut after stage ``index``."""
    return line.stages[index + 1].boundary if index + 1 < len(line.stages) else ()


def backward_results(line: Line, index: int) -> Sequence[fx.Node]:
    """Tensors of a stage's backward that other stages or the step's results read."""
    returned = {n for n in line.joint.backward_outputs if isinstance(n, fx.Node)}
    return [
        node
        for node in line.stages[index].backward
        if isinstance(node.meta.get("val"), torch.Tensor)
        and (node in returned or any(line.stage_of.get(u) != index for u in node.users))
    ]
