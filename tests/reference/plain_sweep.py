"""The memory and the time of a program, block after block: what evaluations are held against.

It reads the very blocks that are emitted, and shares no code with ``planner.replay`` and
``planner.memory``.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from fxremat.costs.measured.cost import Measured
from fxremat.ir import Request
from fxremat.passes.emit.program import Call, Program
from fxremat.passes.joint.batchnorm import is_inverse
from fxremat.passes.stages.block import Mode
from fxremat.planner.allocator.footprints import Footprints
from fxremat.planner.context.context_bytes import ContextBytes
from fxremat.planner.decision.save_options import Options


@dataclass(frozen=True)
class Sweep:
    """Most memory during each call, memory after it, at the loss point and at the end."""

    peaks_bytes: tuple[int, ...]
    held_bytes: tuple[int, ...]
    loss_point_bytes: int
    end_bytes: int

    @property
    def peak_bytes(self) -> int:
        return max((self.loss_point_bytes, self.end_bytes, *self.peaks_bytes))


@dataclass(frozen=True)
class Footprint:
    """What running a block does to memory: most bytes meanwhile, and bytes after it, less those
    before it."""

    peak_bytes: int
    change_bytes: int


def run(requests: Iterable[Request]) -> Footprint:
    """What ``requests`` come to, one after the other."""
    now = peak = 0
    for _, nbytes in requests:
        now += nbytes
        peak = max(peak, now)
    return Footprint(peak, now)


def sweep(program: Program, footprints: Footprints, context_bytes: ContextBytes) -> Sweep:
    """Replay ``program``."""
    now = loss_point = context_bytes.given_bytes
    nbytes = program.line.joint.storages.nbytes
    peaks: list[int] = []
    held: list[int] = []
    for index, call in enumerate(program.calls):
        if index == program.loss_point:
            loss_point = now + context_bytes.loss_point_more_bytes
            now += context_bytes.backward_bytes
        footprint = run(footprints.requests(call.block, kept=call.kept))
        peaks.append(now + footprint.peak_bytes)
        now += footprint.change_bytes - sum(nbytes[i] for i in call.handed)
        held.append(now)
    return Sweep(tuple(peaks), tuple(held), loss_point, now + context_bytes.end_bytes)


def seconds(program: Program, measured: Measured, options: Options) -> list[float]:
    """What each call takes."""
    return [_seconds_of(call, measured, options) for call in program.calls]


def _seconds_of(call: Call, measured: Measured, options: Options) -> float:
    index, block = call.op.stage, call.block
    whole, charges = measured.stages[index], options.parts[index].charges
    if block.mode is Mode.FIRST:
        # Measured with all that a backward may read; a norm's input is rebuilt later.
        inverses = filter(is_inverse, measured.line.stages[index].forward)
        left_out = [n for n in inverses if n not in block.nodes]
        return whole.forward_s - sum(charges.once_s(n, rebuilds=False) for n in left_out)
    if block.mode is Mode.AGAIN:
        return sum(charges.once_s(n, rebuilds=call.rebuilds) for n in block.nodes)
    return whole.backward_s + sum(charges.once_s(n, rebuilds=True) for n in block.again)
