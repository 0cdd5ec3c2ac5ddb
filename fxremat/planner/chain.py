"""From a measured line of stages to the numbers that solvers work on."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from torch import fx

from fxremat.costs.cost import Measured, backward_results, boundary_after, stage_blocks
from fxremat.costs.options import Options
from fxremat.ir import Chain, Costs, SaveOption, Stage, StageCosts, Storage
from fxremat.passes.joint.graph import is_tensor
from fxremat.passes.stages.block import BlockCache, Mode
from fxremat.passes.stages.linearize import Line, StageNodes
from fxremat.planner.evaluator import Alone, Evaluator
from fxremat.planner.handed import staying


def build_chain(line: Line, blocks: BlockCache, options: Options | None = None) -> Chain:
    """The storages, boundaries and saved sets of ``line``, and what ``options`` keep."""
    table = line.joint.storages
    number = _numbering(line, options)

    def ids(nodes: Iterable[fx.Node]) -> tuple[int, ...]:
        return tuple(number[s] for s in sorted(table.of(nodes)) if s in number)

    kinds: dict[object, int] = {}
    stages = []
    for index, stage in enumerate(line.stages):
        key = tuple(map(blocks.key, stage_blocks(line, blocks, index)))
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
    measured: Measured, chain: Chain, evaluator: Evaluator, *, options: bool = True
) -> Costs:
    """Seconds and bytes of each stage, the bytes from its calls alone.

    What AOTAutograd holds through the backward (tangents) or at the turn is charged to
    the last stage's backward, be it the turn itself, and to the gradients of the others.

    Args:
        measured: the line.
        chain: its stages.
        evaluator: of the line.
        options: with the stages' save options.
    """
    line = measured.line
    gradients = _gradient_bytes(line, staying(line, evaluator.context_bytes))
    number = _numbering(line, evaluator.options if options else None)
    stages = []
    for index in range(len(chain)):
        stage = _Stage(measured, chain, evaluator, index)
        found: list[SaveOption] = []
        for parts, mask in evaluator.options.of(index) if options else ():
            kept = tuple(number[s] for s in parts.kept_storages(mask))
            found.append(stage.option(len(found) + 1, kept, parts.recompute_s(mask)))
        stages.append(stage.costs(gradients[index], tuple(found)))
    fixed_bytes = evaluator.context_bytes.given_bytes + _pinned_bytes(line)
    return Costs(tuple(stages), fixed_bytes)


@dataclass(frozen=True, slots=True)
class _Stage:
    """One stage of ``build_costs``."""

    measured: Measured
    chain: Chain
    evaluator: Evaluator
    index: int

    def costs(self, gradient_bytes: int, options: tuple[SaveOption, ...]) -> StageCosts:
        """Of the stage, the gradients in memory after it being ``gradient_bytes``."""
        chain, index = self.chain, self.index
        seconds, saved = self.measured.stages[index], self._own.saved
        new_boundary = chain.nbytes({*chain.boundaries[index + 1]} - {*chain.boundaries[index]})
        passed_on = self._passed_on
        rebuild = self.evaluator.alone(index, Mode.AGAIN, saved, kept=True)
        alone_bytes = self._backward_extra(0)
        last = index == len(chain) - 1
        tangent_bytes = self.evaluator.context_bytes.tangent_bytes
        return StageCosts(
            forward_s=seconds.forward_s,
            backward_s=seconds.backward_s,
            rebuild_s=seconds.rebuild_s,
            gradient_bytes=0 if last else max(0, gradient_bytes + tangent_bytes),
            forward_extra_bytes=self._forward_extra(passed_on, new_boundary),
            keep_extra_bytes=self._forward_extra(
                passed_on.union(saved), chain.nbytes(chain.saved_set(index))
            ),
            backward_extra_bytes=alone_bytes,
            rebuild_bytes=max(rebuild.peak_bytes, rebuild.change_bytes + alone_bytes),
            options=options,
        )

    def option(self, option: int, kept: tuple[int, ...], recompute_s: float) -> SaveOption:
        """What keeping the storages ``kept`` takes."""
        # What of its own the backward then reads is what the first forward keeps.
        inputs = self._backward(option).inputs
        own = frozenset(inputs).intersection(n for n in self._own.forward if is_tensor(n))
        held_bytes = self.chain.nbytes(self.chain.added(self.index, kept))
        return SaveOption(
            kept,
            recompute_s,
            self._forward_extra(own | self._passed_on, held_bytes),
            self._backward_extra(option),
        )

    @property
    def _own(self) -> StageNodes:
        return self.measured.line.stages[self.index]

    @property
    def _passed_on(self) -> frozenset[fx.Node]:
        """What a first forward gives whatever is kept: its boundary and pinned tensors."""
        line, own = self.measured.line, self._own
        boundary = frozenset(own.forward).intersection(boundary_after(line, self.index))
        return boundary.union(own.pinned, (n for n in own.saved if n in line.pinned))

    def _forward_extra(self, asked: Iterable[fx.Node], held_bytes: int) -> int:
        """Peak of a first forward beyond its input, pinned tensors and ``held_bytes``."""
        line = self.measured.line
        table = line.joint.storages
        pinned = table.total(table.of(self._own.pinned) - table.of(line.joint.given))
        found = self.evaluator.alone(self.index, Mode.FIRST, asked, kept=True)
        return max(found.peak_bytes - held_bytes - pinned, 0)

    def _backward(self, option: int) -> Alone:
        asked = backward_results(self.measured.line, self.index)
        return self.evaluator.alone(self.index, Mode.BACKWARD, asked, option=option, kept=False)

    def _backward_extra(self, option: int) -> int:
        extra = self._backward(option).peak_bytes
        if self.index == len(self.chain) - 1:
            around = self.evaluator.context_bytes
            extra = max(extra + around.tangent_bytes, around.turn_bytes)
        return extra


def _pinned_bytes(line: Line) -> int:
    table = line.joint.storages
    return table.total(table.of(line.pinned) - table.of(line.joint.given))


def _gradient_bytes(line: Line, stays: frozenset[fx.Node]) -> Sequence[int]:
    """For each stage: what its backward and the lower ones find computed already.

    Args:
        line: the stages.
        stays: gradients that are there to the end.
    """
    table = line.joint.storages
    held = table.of((*line.joint.given, *line.joint.tangents, *line.joint.forward))
    returned = table.of(stays)
    change = [0] * (len(line.stages) + 1)
    for storage in table.of(line.joint.backward) - held:
        born = line.stage_of[table.owner[storage]]
        readers = (line.stage_of[u] for u in table.readers[storage] if u in line.stage_of)
        end = 0 if storage in returned else min(readers, default=born)
        for index in range(end, born):  # alive when the backwards of these stages begin
            change[index] += table.nbytes[storage]
    return change
