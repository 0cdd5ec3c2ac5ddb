"""From a measured line of stages to the numbers that solvers work on."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import fx

from fxremat.ir import Chain, Costs, Stage, StageCosts, Storage
from fxremat.passes.block import Block
from fxremat.passes.cost import Measured, stage_blocks
from fxremat.passes.linearize import Line
from fxremat.passes.program import BlockCache
from fxremat.passes.signature import block_key
from fxremat.passes.sweep import Surroundings, Sweeper


def build_chain(line: Line, blocks: BlockCache) -> Chain:
    """The storages, boundaries and saved sets of ``line``."""
    table = line.joint.storages
    given = table.of((*line.joint.given, *line.pinned))
    used: dict[int, int] = {}

    def ids(nodes: Iterable[fx.Node]) -> tuple[int, ...]:
        found = sorted(table.of(nodes) - given)
        return tuple(used.setdefault(s, len(used)) for s in found)

    boundaries = [ids(stage.boundary) for stage in line.stages]
    saved = [ids(stage.saved) for stage in line.stages]
    kinds: dict[object, int] = {}
    stages = []
    for index in range(len(line.stages)):
        key = tuple(block_key(b, table) for b in stage_blocks(line, blocks, index))
        kind = kinds.setdefault(key, len(kinds))
        stages.append(Stage(f"stage{index}", saved[index], kind))
    storages = [Storage(table.nbytes[s], table.owner[s].name) for s in used]
    return Chain(tuple(storages), (*boundaries, ()), tuple(stages))


def build_costs(
    measured: Measured,
    chain: Chain,
    blocks: BlockCache,
    sweeper: Sweeper,
    surroundings: Surroundings,
) -> Costs:
    """Seconds and bytes of each stage, the bytes from the sweep of its blocks alone.

    What AOTAutograd holds through the backward (tangents) or at the turn is charged to
    the last stage's backward and to the gradients of the others.
    """
    line = measured.line
    table = line.joint.storages
    gradients = _gradient_bytes(line)
    last = len(chain) - 1
    stages = []
    for index, seconds in enumerate(measured.stages):
        first, again, backward = stage_blocks(line, blocks, index)
        boundary = frozenset(chain.boundaries[index])
        new_boundary = chain.nbytes(set(chain.boundaries[index + 1]) - boundary)
        saved = chain.nbytes(chain.saved_set(index))
        pinned = table.total(table.of(line.stages[index].pinned) - table.of(line.joint.given))
        keep_all = sweeper.footprint(first, kept=table.of(first.inputs))
        plain = sweeper.footprint(_without_saved(line, blocks, index), kept=table.of(first.inputs))
        alone = sweeper.footprint(backward, kept=frozenset())
        rebuild = sweeper.footprint(again, kept=table.of(again.inputs))
        backward_extra = alone.peak_bytes
        if index == last:
            backward_extra = max(
                backward_extra + surroundings.tangent_bytes, surroundings.turn_bytes
            )
        stages.append(
            StageCosts(
                forward_s=seconds.forward_s,
                backward_s=seconds.backward_s,
                rebuild_s=seconds.rebuild_s,
                gradient_bytes=0
                if index == last
                else gradients[index] + surroundings.tangent_bytes,
                forward_extra_bytes=max(plain.peak_bytes - new_boundary - pinned, 0),
                keep_extra_bytes=max(keep_all.peak_bytes - saved - pinned, 0),
                backward_extra_bytes=backward_extra,
                rebuild_bytes=max(rebuild.peak_bytes, rebuild.change_bytes + alone.peak_bytes),
            )
        )
    return Costs(tuple(stages), surroundings.given_bytes + _pinned_bytes(line))


def _without_saved(line: Line, blocks: BlockCache, index: int) -> Block:
    first, _, _ = stage_blocks(line, blocks, index)
    kept = frozenset(first.outputs) - frozenset(line.stages[index].saved)
    passed_on = frozenset(n for n in first.outputs if n in line.pinned)
    if index + 1 < len(line.stages):
        passed_on |= frozenset(first.outputs).intersection(line.stages[index + 1].boundary)
    return blocks(index, first.mode, kept | passed_on)


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
