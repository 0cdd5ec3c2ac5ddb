"""The exact peak of a program: every allocation and release of every operation."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from fxremat.passes.emit.program import Program
from fxremat.passes.stages.block import Block
from fxremat.passes.stages.linearize import Line
from fxremat.planner.footprint import (
    Footprint,
    Request,
    Step,
    WorkspaceBytes,
    requests_of,
    run,
    steps_of,
)


@dataclass(frozen=True, slots=True)
class Surroundings:
    """Memory of a step that no block allocates.

    Attributes:
        given_bytes: held throughout: parameters, buffers, inputs, constants, gradients
            that are accumulated into, and what the caller reserves.
        turn_bytes: needed at the turn, by a loss outside the model.
        tangent_bytes: gradients of the outputs, held through the backward.
        end_bytes: needed once the backward has returned, beside all gradients.
        device: of the step.
        given_each_bytes: of ``given_bytes``, what is known one by one: each was asked of the
            device's allocator by itself.
        tangent_each_bytes: the same of ``tangent_bytes``.
    """

    given_bytes: int
    turn_bytes: int
    tangent_bytes: int
    end_bytes: int = 0
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    given_each_bytes: tuple[int, ...] = ()
    tangent_each_bytes: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Sweep:
    """Memory of a program over its calls.

    Attributes:
        peaks_bytes: most memory held during each call.
        held_bytes: memory held after each call.
        turn_bytes: most memory held at the turn.
        end_bytes: most memory held after the last call.
    """

    peaks_bytes: tuple[int, ...]
    held_bytes: tuple[int, ...]
    turn_bytes: int
    end_bytes: int

    @property
    def peak_bytes(self) -> int:
        """Most memory held at any instant of the step."""
        return max((self.turn_bytes, self.end_bytes, *self.peaks_bytes))


class Sweeper:
    """Sweeps programs of one line; remembers what each block does to memory."""

    def __init__(self, line: Line, workspace_bytes: WorkspaceBytes) -> None:
        self._storages = line.joint.storages
        self._workspace_bytes = workspace_bytes
        self._steps: dict[int, tuple[Block, tuple[Step, ...]]] = {}
        self._footprints: dict[tuple[int, frozenset[int]], Footprint] = {}

    def footprint(self, block: Block, *, kept: frozenset[int]) -> Footprint:
        """What ``block`` does to memory while others hold the storages ``kept``."""
        key = (id(block), kept & block.reads)
        footprint = self._footprints.get(key)
        if footprint is None:
            footprint = self._footprints[key] = run(self.requests(block, kept=kept))
        return footprint

    def requests(self, block: Block, *, kept: frozenset[int]) -> tuple[Request, ...]:
        """What ``block`` asks of the allocator while others hold the storages ``kept``."""
        if id(block) not in self._steps:  # the entry keeps the block, so its id, alive
            steps = steps_of(block, self._storages, self._workspace_bytes)
            self._steps[id(block)] = (block, steps)
        return requests_of(self._steps[id(block)][1], self._storages, kept=kept & block.reads)

    def sweep(self, program: Program, surroundings: Surroundings) -> Sweep:
        """Replay ``program``.

        Ensures: the peak is what the device allocator would report, provided that
            blocks release what they read last, as emitted code does.
        """
        now = turn = surroundings.given_bytes
        peaks: list[int] = []
        held: list[int] = []
        for index, call in enumerate(program.calls):
            if index == program.turn:
                turn = now + surroundings.turn_bytes
                now += surroundings.tangent_bytes
            key = (id(call.block), call.kept)
            footprint = self._footprints.get(key) or self.footprint(call.block, kept=call.kept)
            peaks.append(now + footprint.peak_bytes)
            now += footprint.change_bytes
            held.append(now)
        return Sweep(tuple(peaks), tuple(held), turn, now + surroundings.end_bytes)
