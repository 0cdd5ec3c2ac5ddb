"""From a measured line of stages to the numbers that solvers work on."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from torch import fx

from fxremat.costs.cost import Measured, boundary_after, stage_blocks
from fxremat.costs.options import Options
from fxremat.ir import Chain, Costs, SaveOption, Stage, StageCosts, Storage
from fxremat.passes.stages.block import Block, Mode, candidates
from fxremat.passes.stages.blocks import BlockCache
from fxremat.passes.stages.linearize import Line
from fxremat.passes.stages.signature import block_key
from fxremat.planner.footprint import Footprints
from fxremat.planner.surroundings import Surroundings


def build_chain(line: Line, blocks: BlockCache, options: Options | None = None) -> Chain:
    """The storages, boundaries and saved sets of ``line``, and what ``options`` keep."""
    table = line.joint.storages
    number = _numbering(line, options)

    def ids(nodes: Iterable[fx.Node]) -> tuple[int, ...]:
        return tuple(number[s] for s in sorted(table.of(nodes)) if s in number)

    kinds: dict[object, int] = {}
    stages = []
    for index, stage in enumerate(line.stages):
        key = tuple(block_key(b, table) for b in stage_blocks(line, blocks, index))
        kind = kinds.setdefault(key, len(kinds))
        stages.append(Stage(line.name_of(index), ids(stage.saved), kind))
    boundaries = [ids(stage.boundary) for stage in line.stages]
    storages = [Storage(table.nbytes[s], table.owner[s].name) for s in number]
    return Chain(tuple(storages), (*boundaries, ()), tuple(stages))


def _numbering(line: Line, options: Options | None) -> dict[int, int]:
    """The chain's number of each storage that a stage may keep or hand on."""
    table = line.joint.storages
    given = table.of((*line.joint.given, *line.pinned))
    found: dict[int, int] = {}
    for index, stage in enumerate(line.stages):
        held = table.of((*stage.boundary, *stage.saved))
        if options is not None:
            held |= frozenset(options.parts[index].storages)
        for storage in sorted(held - given):
            found.setdefault(storage, len(found))
    return found


def build_costs(
    measured: Measured,
    chain: Chain,
    blocks: BlockCache,
    footprints: Footprints,
    surroundings: Surroundings,
    options: Options | None = None,
) -> Costs:
    """Seconds and bytes of each stage, the bytes from its blocks alone.

    What AOTAutograd holds through the backward (tangents) or at the turn is charged to
    the last stage's backward, be it the turn itself, and to the gradients of the others.
    """
    line = measured.line
    gradients = _gradient_bytes(line)
    number = _numbering(line, options)
    stages = []
    for index in range(len(chain)):
        stage = _Stage(measured, chain, blocks, footprints, surroundings, index)
        found = []
        for parts, mask in options.of(index) if options else ():
            kept = tuple(number[s] for s in parts.kept_storages(mask))
            found.append(stage.option(kept, parts.missing(mask), parts.recompute_s(mask)))
        stages.append(stage.costs(gradients[index], tuple(found)))
    return Costs(tuple(stages), surroundings.given_bytes + _pinned_bytes(line))


@dataclass(frozen=True, slots=True)
class _Stage:
    """One stage of ``build_costs``."""

    measured: Measured
    chain: Chain
    blocks: BlockCache
    footprints: Footprints
    surroundings: Surroundings
    index: int

    def costs(self, gradient_bytes: int, options: tuple[SaveOption, ...]) -> StageCosts:
        """Of the stage, the gradients in memory after it being ``gradient_bytes``."""
        line, chain, index = self.measured.line, self.chain, self.index
        table = line.joint.storages
        seconds = self.measured.stages[index]
        first, again, backward = stage_blocks(line, self.blocks, index)
        new_boundary = chain.nbytes({*chain.boundaries[index + 1]} - {*chain.boundaries[index]})
        plain = _without_saved(line, self.blocks, index)
        rebuild = self.footprints.of(again, kept=table.of(again.inputs))
        alone_bytes = self._backward_extra(backward)
        last = index == len(chain) - 1
        return StageCosts(
            forward_s=seconds.forward_s,
            backward_s=seconds.backward_s,
            rebuild_s=seconds.rebuild_s,
            gradient_bytes=0 if last else gradient_bytes + self.surroundings.tangent_bytes,
            forward_extra_bytes=self._forward_extra(plain, new_boundary),
            keep_extra_bytes=self._forward_extra(first, chain.nbytes(chain.saved_set(index))),
            backward_extra_bytes=alone_bytes,
            rebuild_bytes=max(rebuild.peak_bytes, rebuild.change_bytes + alone_bytes),
            options=options,
        )

    def _forward_extra(self, block: Block, held_bytes: int) -> int:
        """Peak of a first forward beyond its input, pinned tensors and ``held_bytes``."""
        line = self.measured.line
        table = line.joint.storages
        pinned = table.total(table.of(line.stages[self.index].pinned) - table.of(line.joint.given))
        footprint = self.footprints.of(block, kept=table.of(block.inputs))
        return max(footprint.peak_bytes - held_bytes - pinned, 0)

    def _backward_extra(self, block: Block) -> int:
        extra = self.footprints.of(block, kept=frozenset()).peak_bytes
        if self.index == len(self.chain) - 1:
            around = self.surroundings
            extra = max(extra + around.tangent_bytes, around.turn_bytes)
        return extra

    def option(
        self, kept: tuple[int, ...], missing: frozenset[fx.Node], recompute_s: float
    ) -> SaveOption:
        """What keeping ``kept`` takes, so that the backward rebuilds the tensors ``missing``."""
        _, _, backward = stage_blocks(self.measured.line, self.blocks, self.index)
        rebuilding = self.blocks(self.index, Mode.BACKWARD, frozenset(backward.outputs), missing)
        line, index = self.measured.line, self.index
        own = frozenset(rebuilding.inputs).intersection(candidates(line, index, Mode.FIRST))
        keeping = self.blocks(index, Mode.FIRST, own | _passed_on(line, self.blocks, index))
        held_bytes = self.chain.nbytes(self.chain.added(self.index, kept))
        return SaveOption(
            kept,
            recompute_s,
            self._forward_extra(keeping, held_bytes),
            self._backward_extra(rebuilding),
        )


def _without_saved(line: Line, blocks: BlockCache, index: int) -> Block:
    first, _, _ = stage_blocks(line, blocks, index)
    kept = frozenset(first.outputs) - frozenset(line.stages[index].saved)
    return blocks(index, first.mode, kept | _passed_on(line, blocks, index))


def _passed_on(line: Line, blocks: BlockCache, index: int) -> frozenset[fx.Node]:
    """What a first forward gives whatever is kept: its boundary and pinned tensors."""
    first, _, _ = stage_blocks(line, blocks, index)
    passed_on = frozenset(n for n in first.outputs if n in line.pinned)
    return passed_on | frozenset(first.outputs).intersection(boundary_after(line, index))


def _pinned_bytes(line: Line) -> int:
    table = line.joint.storages
    return table.total(table.of(line.pinned) - table.of(line.joint.given))


def _gradient_bytes(line: Line) -> Sequence[int]:
    """For each stage: what its backward and the lower ones find computed already."""
    table = line.joint.storages
    held = table.of((*line.joint.given, *line.joint.tangents, *line.joint.forward))
    returned = table.of(n for n in line.joint.backward_outputs if isinstance(n, fx.Node))
    count = len(line.stages)
    change = [0] * (count + 1)
    born: dict[int, int] = {}
    ends: dict[int, int] = {}
    for node in line.joint.backward:
        stage = line.stage_of[node]
        for storage in table.of_node[node]:
            if storage in held:
                continue
            born.setdefault(storage, stage)
            readers = [line.stage_of[u] for u in node.users if u in line.stage_of]
            end = 0 if storage in returned else min(readers, default=stage)
            ends[storage] = min(ends.get(storage, count), end)
    for storage, stage in born.items():
        # Alive when the backward of stages ends … stage-1 begins.
        for index in range(max(ends[storage], 0), stage):
            change[index] += table.nbytes[storage]
    return change
