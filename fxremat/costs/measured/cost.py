"""Costs of a line of stages, and the blocks of a stage that are measured."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, replace

from torch import fx

from fxremat.errors import FAULT, CostError
from fxremat.ir import RecordedCosts, Request, StageSeconds
from fxremat.passes.stages.block import Block, BlockCache, Mode
from fxremat.passes.stages.linearize import Line


@dataclass(frozen=True, eq=False)
class Measured:
    """A line of stages with its measured seconds and bytes, which are looked up by node.

    Attributes:
        line: the stages, with storages of their actual sizes.
        costs: costs of the line, by index.
        measuring_bytes: most bytes that measuring held at once, in addition to parameters and
            inputs of the step; 0 where nothing was run.
        too_large: names of the operations that do not fit in the device's free memory by
            themselves. In their costs, the workspace is all memory of the device.
    """

    line: Line
    costs: RecordedCosts
    measuring_bytes: int = 0
    too_large: tuple[str, ...] = ()

    @staticmethod
    def of(line: Line, costs: RecordedCosts) -> Measured:
        """Return ``line`` with its measured costs, which give its storages their actual sizes.

        Raises:
            CostError: ``costs`` belong to another graph.
        """
        _check(costs, line)
        return Measured._with_sizes_of(line, costs)

    def at(self, costs: RecordedCosts) -> Measured:
        """Return this line at another size.

        Args:
            costs: the costs of this line, scaled to that size.
        """
        return Measured._with_sizes_of(self.line, costs)

    @staticmethod
    def _with_sizes_of(line: Line, costs: RecordedCosts) -> Measured:
        sized = replace(line.joint.storages, nbytes=costs.storage_bytes)
        return Measured(replace(line, joint=replace(line.joint, storages=sized)), costs)

    @property
    def stages(self) -> tuple[StageSeconds, ...]:
        """Seconds of each stage's forward, rebuild and backward."""
        return self.costs.stages

    @property
    def kept_s(self) -> float:
        """Seconds of a step that keeps everything, so that no operation runs again."""
        return sum(stage.forward_s + stage.backward_s for stage in self.stages)

    @functools.cached_property
    def again_s(self) -> Mapping[fx.Node, float]:
        """Seconds of each operation that a recomputation may run, measured by itself."""
        return {self._nodes[i]: seconds for i, seconds in self.costs.again_s}

    @functools.cached_property
    def displaced(self) -> frozenset[int]:
        """Indices of the storages with tensors whose strides differ from the trace."""
        return frozenset(self.costs.displaced)

    def workspace_bytes(self, node: fx.Node, block: Block) -> int:
        """Return the peak bytes of ``node``, run by ``block``, besides arguments and results.

        Raises:
            CostError: the operation was never measured as ``block`` runs it.
        """
        nbytes = self._workspace_bytes.get((node, block.mode_of(node)))
        if nbytes is None:
            raise CostError(
                f"{node.name} ({node.target}) was never measured in {block.mode}; "
                "please report this model",
                code=FAULT,
            )
        return nbytes

    def most_workspace_bytes(self, nodes: Iterable[fx.Node]) -> int:
        """Return the largest workspace of any of ``nodes`` in bytes; 0 if there are none."""
        wanted = frozenset(nodes)
        every = self._workspace_bytes.items()
        return max((nbytes for (node, _), nbytes in every if node in wanted), default=0)

    def asked(self, node: fx.Node, block: Block) -> tuple[Request, ...]:
        """Return the allocator requests of ``node``, run by ``block``, in order.

        Their form is that of :func:`fxremat.costs.measured.execute.requests_from`. If empty, the
        operation requests its results in the order in which it returns them, then its workspace.
        """
        return self._asked.get((node, block.mode_of(node)), ())

    @functools.cached_property
    def _nodes(self) -> tuple[fx.Node, ...]:
        return tuple(self.line.joint.module.graph.nodes)

    @functools.cached_property
    def _workspace_bytes(self) -> Mapping[tuple[fx.Node, Mode], int]:
        return {(self._nodes[i], Mode(mode)): n for i, mode, n in self.costs.workspace_bytes}

    @functools.cached_property
    def _asked(self) -> Mapping[tuple[fx.Node, Mode], tuple[Request, ...]]:
        return {(self._nodes[i], Mode(mode)): requests for i, mode, requests in self.costs.asked}


def _check(costs: RecordedCosts, line: Line) -> None:
    """Raise ``CostError`` unless ``costs`` belong to ``line``: its peak would be wrong."""
    least_bytes = line.joint.storages.nbytes
    counts = len(costs.stages), len(costs.storage_bytes)
    wanted = len(line.stages), len(least_bytes)
    if counts != wanted:
        raise CostError(
            f"these costs are for {counts[0]} stages and {counts[1]} storages, but the graph has "
            f"{wanted[0]} and {wanted[1]}: use costs of the same model and options",
            code="FXR613",
        )
    node_count = len(line.joint.module.graph.nodes)
    ran = (*costs.workspace_bytes, *costs.asked)
    indices = (*(i for i, _ in costs.again_s), *(i for i, _, _ in ran))
    modes = {mode.value for mode in Mode}
    seconds = [s for stage in costs.stages for s in astuple(stage)]
    valid = (
        all(0 <= i < node_count for i in indices)
        and all(mode in modes for _, mode, _ in ran)
        and all(nbytes >= 0 for _, _, nbytes in costs.workspace_bytes)
        and {(i, mode) for i, mode, _ in costs.asked} <= {ran[:2] for ran in costs.workspace_bytes}
        and all(_is_balanced(asked) for _, _, asked in costs.asked)
        and all(0 <= s < math.inf for s in (*seconds, *(s for _, s in costs.again_s)))
        and all(0 <= s < len(least_bytes) for s in costs.displaced)
        and all(n >= least for n, least in zip(costs.storage_bytes, least_bytes, strict=True))
    )
    if not valid:
        raise CostError(
            "these costs name operations or storages that the graph does not have, or sizes below "
            "those of its trace. They are damaged or for another graph: use costs of the same "
            "model and options",
            code="FXR613",
        )


def _is_balanced(asked: Sequence[Request]) -> bool:
    """Return whether requests name each result once, and free each piece of workspace."""
    places = sorted(key for key, _ in asked if key >= 0)
    held: dict[int, int] = {}
    for key, nbytes in asked:
        held[key] = held.get(key, 0) + nbytes
        if held[key] < 0:
            return False
    return places == [*range(len(places))] and not any(held.values())


def stage_blocks(line: Line, blocks: BlockCache, index: int) -> tuple[Block, Block, Block]:
    """Return the blocks of a stage's first forward, its rebuild, and its backward.

    The first forward keeps everything. The rebuild computes the stage's whole saved set again.
    """
    stage = line.stages[index]
    passed_on = frozenset(stage.forward).intersection(boundary_after(line, index))
    first = blocks(index, Mode.FIRST, passed_on.union(stage.saved, stage.pinned))
    again = blocks(index, Mode.AGAIN, frozenset(stage.saved))
    backward = blocks(index, Mode.BACKWARD, frozenset(stage.results))
    return first, again, backward


def runs_of(line: Line, block: Block) -> Iterator[tuple[fx.Node, Iterable[Mode]]]:
    """Yield each operation of a block, with the modes in which it may run."""
    for node in block.operations:
        # Any block may contain views of given tensors.
        yield node, Mode if node in line.views else (block.mode_of(node),)


def whole_block(line: Line, blocks: BlockCache, index: int) -> Block:
    """Return the block that recomputes all that a schedule may recompute of stage ``index``."""
    stage = line.stages[index]
    passed_on = frozenset(stage.forward).intersection(boundary_after(line, index))
    return blocks(index, Mode.AGAIN, passed_on.union(stage.saved) - line.pinned)


def boundary_after(line: Line, index: int) -> Sequence[fx.Node]:
    """Return the tensors that cross the cut after stage ``index``; none after the last stage."""
    return line.stages[index + 1].boundary if index + 1 < len(line.stages) else ()
