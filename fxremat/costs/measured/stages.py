"""Measure the stages of a line on the device that will run them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import fx

from fxremat.costs.measured.cache import CostCache
from fxremat.costs.measured.cost import (
    Measured,
    boundary_after,
    runs_of,
    stage_blocks,
    whole_block,
)
from fxremat.costs.measured.execute import (
    BLOCK_S,
    Operations,
    TooLargeError,
    compile_block,
    least_s,
    undisturbed,
)
from fxremat.costs.measured.measure import KernelClock
from fxremat.costs.measured.synthetic import Synthesizer
from fxremat.costs.measured.work import Works, rates_of
from fxremat.costs.measured.workspaces import library_workspaces
from fxremat.ir import RecordedCosts, Request, StageSeconds
from fxremat.passes.joint.graph import is_getitem, tensors_of
from fxremat.passes.stages.block import Block, BlockCache, Key
from fxremat.passes.stages.linearize import Line
from fxremat.progress import MEASURE, Progress


def measure_line(
    line: Line,
    blocks: BlockCache,
    *,
    real: Mapping[fx.Node, torch.Tensor],
    cache: CostCache,
    progress: Progress,
) -> Measured:
    """Run each distinct stage by itself, and return the line with its measured seconds and bytes.

    In addition to pinned values and those that cross the cuts, memory holds at most the values of
    one stage's forward or backward. Running ends once all further stages have been measured before.

    Where the values of a stage do not fit in a GPU's free memory, each of its operations runs by
    itself, and the seconds of the stage are the sum of theirs. An operation that does not fit by
    itself is not run: its seconds are estimated, and its workspace is taken to be all memory of the
    device, so that no plan within the device runs it whole.

    Args:
        line: the stages.
        blocks: blocks of ``line``.
        real: values of primals, where there are any. Others are made up, with the traced strides.
            Integers and masks have the values that the stages compute.
        cache: measurements. What it contains is not measured again, and new measurements are added.
        progress: called for each stage.

    Ensures:
        No tensor of ``real`` is written to, and the random generators are as before.

    Raises:
        CostError: an operation cannot be run.
    """
    library_workspaces(line.joint.device)  # else the first product would be charged for them
    operations = Operations(cache, device=line.joint.device, given=real.values())
    stages = [_Stage.of(line, blocks, index) for index in range(len(line.stages))]
    measurer = _Measurer(line, Synthesizer(line.joint, real), operations, cache)
    new = [index for index, stage in enumerate(stages) if not measurer.is_measured(stage)]
    with undisturbed(line.joint.device):
        for index, stage in enumerate(stages):
            progress(MEASURE, index, len(stages))
            if new and index <= new[-1]:
                measurer.measure(stage)
        progress(MEASURE, len(stages), len(stages))
        costs = _recorded(line, stages, operations, measurer.with_estimates())
        return replace(
            Measured.of(line, costs),
            measuring_bytes=operations.peak_bytes,
            too_large=measurer.too_large,
        )


@dataclass(frozen=True, slots=True)
class _Stage:
    """The blocks of a stage that are measured, and their keys.

    Attributes:
        first, again, backward: see :func:`stage_blocks`.
        whole: see :func:`whole_block`.
        entering: tensors of earlier stages that it may read: its boundary, and pinned ones.
        staying: tensors that later stages may read: those of the boundary after the stage, and
            pinned ones.
        timed: keys of ``first``, ``again`` and ``backward``; ``None`` for an empty block.
    """

    first: Block
    again: Block
    backward: Block
    whole: Block
    entering: frozenset[fx.Node]
    staying: frozenset[fx.Node]
    timed: tuple[Key | None, ...]

    @staticmethod
    def of(line: Line, blocks: BlockCache, index: int) -> _Stage:
        """Return stage ``index`` of ``line``, with the blocks to measure and their keys."""
        three = stage_blocks(line, blocks, index)
        whole = whole_block(line, blocks, index)
        entering = line.pinned.union(line.stages[index].boundary)
        staying = line.pinned.union(boundary_after(line, index))
        timed = tuple(blocks.key(b) if b.nodes else None for b in three)
        return _Stage(*three, whole, entering, staying, timed)


class _Measurer:
    """Runs stages one after the other, passing values on, and adds measurements to the cache."""

    def __init__(
        self, line: Line, values: Synthesizer, operations: Operations, cache: CostCache
    ) -> None:
        self._line = line
        self._values = values
        self._operations = operations
        self._cache = cache
        self._clock = KernelClock(line.joint.device)
        self._too_large: dict[Key, fx.Node] = {}
        self._single_keys: dict[Key, fx.Node] = {}
        self._sums: dict[Key, list[Key]] = {}

    @property
    def too_large(self) -> tuple[str, ...]:
        """Names of the operations that do not fit in memory by themselves."""
        return tuple(node.name for node in self._too_large.values())

    def is_measured(self, stage: _Stage) -> bool:
        """Return whether all bytes and seconds of ``stage`` are in the cache."""
        again = self._operations.keys(stage.whole).values()
        return (
            all(key is None or key in self._cache.seconds for key in stage.timed)
            and self._cache.operation_s.keys() >= set(again)
            and all(map(self._is_logged, (stage.first, stage.whole, stage.backward)))
        )

    def _is_logged(self, block: Block) -> bool:
        """Return whether the cache has the workspaces of all operations of ``block``."""
        return self._cache.workspace_bytes.keys() >= set(self._operations.keys(block).values())

    def measure(self, stage: _Stage) -> None:
        """Run the blocks of ``stage``, cache bytes and seconds, and hold what later stages read.

        If their values do not fit in memory, each operation runs by itself.
        """
        if not self._is_like_another(stage) and not self._fits(stage):
            self._values.keep_only(stage.entering)
            self._measure_each(stage)
        self._values.keep_only(stage.staying)

    def _is_like_another(self, stage: _Stage) -> bool:
        """Return whether all that a stage takes follows from one that did not fit."""
        blocks = (stage.first, stage.whole, stage.backward)
        ran = {key for block in blocks for key in self._operations.keys(block).values()}
        return (
            bool(self._sums)
            and ran <= self._single_keys.keys() | self._too_large.keys()
            and all(k is None or k in self._sums or k in self._cache.seconds for k in stage.timed)
        )

    def _fits(self, stage: _Stage) -> bool:
        """Measure ``stage``, and return whether memory sufficed."""
        try:
            self._measure_whole(stage)
        except (TooLargeError, torch.OutOfMemoryError):
            return False
        return True

    def with_estimates(self) -> CostCache:
        """Return the cache, with the costs of what could not be measured if there is any.

        Those depend on the memory that was free, so they are in a copy.
        """
        cache = self._cache
        if self._too_large:
            cache = cache.copied()
            nbytes = torch.cuda.get_device_properties(self._line.joint.device).total_memory
            for key in self._too_large:
                cache.workspace_bytes[key], cache.result_bytes[key] = nbytes, ()
                cache.as_traced[key], cache.asked[key] = True, ()
            cache.operation_s.update(self._estimated_s())
        for block, operations in self._sums.items():
            cache.seconds[block] = sum(cache.operation_s[key] for key in operations)
        return cache

    def _estimated_s(self) -> dict[Key, float]:
        """Return seconds of each operation that is too large, from the work of measured ones."""
        line = self._line
        work = Works(line.joint).at(line.joint.sizes.hints)
        order = [line.order[node] for node in self._single_keys.values()]
        seconds = np.array([self._cache.operation_s[key] for key in self._single_keys])
        call_s, byte_s, flop_s = rates_of(work.nbytes[order], work.flops[order], seconds)
        estimated_s = call_s + byte_s * work.nbytes + flop_s * work.flops
        return {key: float(estimated_s[line.order[n]]) for key, n in self._too_large.items()}

    def _measure_each(self, stage: _Stage) -> None:
        """Run each operation of ``stage`` by itself, and cache bytes and seconds."""
        for block in (stage.first, stage.whole, stage.backward):
            for node, key in self._operations.keys(block).items():
                if self._measured_single(node, block, key):
                    self._single_keys[key] = node
                else:
                    self._too_large[key] = node
        timed = (stage.first, stage.again, stage.backward)
        for block, block_key in zip(timed, stage.timed, strict=True):
            if block_key is not None and block_key not in self._cache.seconds:
                self._sums[block_key] = list(self._operations.keys(block).values())

    def _measured_single(self, node: fx.Node, block: Block, key: Key) -> bool:
        """Run ``node`` as ``block`` does, unless it is measured; return whether memory sufficed.

        Integers and masks that it computes are held: other operations depend on their values.
        """
        is_held = not all(t.is_floating_point() for t in tensors_of(node))
        if key in self._too_large:
            return False
        if key in self._cache.operation_s and key in self._cache.workspace_bytes and not is_held:
            return True
        inputs = block.sources(node)
        single = Block(block.stage, block.mode_of(node), (node,), inputs, (node,))
        try:
            value = self._operations.run_single(single, self._values.of(inputs))
        except (TooLargeError, torch.OutOfMemoryError):
            return False
        if is_held:
            parts = {user: value[user.args[1]] for user in node.users if is_getitem(user)}
            self._values.hold(parts or {node: value})
        return True

    def _measure_whole(self, stage: _Stage) -> None:
        """Run the blocks of ``stage`` in memory that holds all their values."""
        first_key, again_key, backward_key = stage.timed
        results = self._run_first(stage, first_key)
        table = self._line.joint.storages
        staying = table.of(stage.staying)
        stays = {n for n in results if not staying.isdisjoint(table.of_node[n])}
        self._values.hold({n: results.pop(n) for n in stays})
        # The other results are the saved set. It never exists twice: each run drops it first.
        inputs = self._values.of(stage.again.inputs)
        results = self._time(stage.again, again_key, inputs, results)
        del inputs
        self._values.hold({n: t for n, t in results.items() if n not in stays})
        results.clear()
        self._run_backward(stage.backward, backward_key)

    def _run_first(self, stage: _Stage, key: Key | None) -> dict[fx.Node, torch.Tensor]:
        """Run and measure the first forward of ``stage``, and return its results.

        ``key`` is that of its seconds in the cache; ``None`` if it has no operations.
        """
        first = stage.first
        # A recomputation also reads states of generators, which an earlier stage may compute.
        others = frozenset(stage.whole.inputs).difference(first.nodes, first.inputs)
        inputs = self._values.of((*first.inputs, *sorted(others, key=self._line.rank)))
        results = self._operations.run(
            first, inputs, keep=first.outputs, again=stage.whole, also_held=self._values.held()
        )
        return self._time(first, key, inputs, results)

    def _run_backward(self, backward: Block, key: Key | None) -> None:
        """Run a backward, and cache its bytes and seconds, unless they are in the cache.

        ``key`` is that of its seconds in the cache; ``None`` if it has no operations.
        """
        new = key is not None and key not in self._cache.seconds
        if new or not self._is_logged(backward):
            inputs = self._values.of(backward.inputs)
            self._operations.run(backward, inputs, also_held=self._values.held())
            self._time(backward, key, inputs, {})

    def _time(
        self,
        block: Block,
        key: Key | None,
        inputs: Mapping[fx.Node, torch.Tensor],
        results: dict[fx.Node, torch.Tensor],
    ) -> dict[fx.Node, torch.Tensor]:
        """Cache the seconds of ``block``, unless they are in the cache, and return its results.

        Args:
            block: the block, which has run before.
            key: key of its seconds in the cache; ``None`` if it has no operations.
            inputs: values of its inputs.
            results: results of the run before; timing empties them, so that they never exist twice.
        """
        if key is None or key in self._cache.seconds:
            return results
        run, arguments = compile_block(block), [inputs[n] for n in block.inputs]
        kept: list[Any] = [tuple(results.values())]
        results.clear()
        self._cache.seconds[key] = least_s(
            lambda: run(list(arguments)), kept, clock=self._clock, enough_s=BLOCK_S
        )
        return dict(zip(block.outputs, kept.pop(), strict=True))


def _recorded(
    line: Line, stages: Sequence[_Stage], operations: Operations, cache: CostCache
) -> RecordedCosts:
    """Return the costs of ``line``, read from ``cache``, which has all its operations."""
    order, table = line.order, line.joint.storages
    storage_bytes, displaced = list(table.nbytes), set[int]()
    again_s: dict[int, float] = {}
    workspaces: dict[tuple[int, str], int] = {}
    asked: dict[tuple[int, str], tuple[Request, ...]] = {}
    for stage in stages:
        for block in (stage.first, stage.whole, stage.backward):
            keys = operations.keys(block)
            for node, modes in runs_of(line, block):
                key, storages = keys[node], table.of_node[node]
                ran = [(order[node], mode.value) for mode in modes]
                workspaces.update(dict.fromkeys(ran, cache.workspace_bytes[key]))
                if cache.asked[key]:
                    asked.update(dict.fromkeys(ran, cache.asked[key]))
                if not cache.as_traced[key]:
                    displaced.update(storages)
                for storage, nbytes in zip(storages, cache.result_bytes[key], strict=False):
                    if not table.asked_bytes[storage]:
                        continue  # it is in host memory, and other views of its kind may not be
                    storage_bytes[storage] = max(storage_bytes[storage], nbytes)
                if block is stage.whole:
                    again_s[order[node]] = cache.operation_s[key]
    return RecordedCosts(
        tuple(
            StageSeconds(*(0.0 if key is None else cache.seconds[key] for key in timed))
            for timed in (stage.timed for stage in stages)
        ),
        tuple(sorted(again_s.items())),
        tuple((index, mode, nbytes) for (index, mode), nbytes in sorted(workspaces.items())),
        tuple(storage_bytes),
        tuple(sorted(displaced)),
        asked=tuple((index, mode, requests) for (index, mode), requests in sorted(asked.items())),
    )
