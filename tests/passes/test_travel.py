"""Storages that travel in a step whose sizes are symbols: one code, other slots at each size."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from fxremat.effort import USUAL
from fxremat.ir import Move
from fxremat.ir.schedule import coded
from fxremat.passes.emit.program import Program, keep_all
from fxremat.passes.emit.rewrite import BlockModules, Travel, rewrite
from fxremat.planner.decision.moves import Movable
from fxremat.runtime.arena import Arena
from fxremat.runtime.slots import assign_slots
from tests.harness import Made, bare, run_traced
from tests.models.bits import assert_bitwise_equal
from tests.sized import AtSize, at_size

HINTS = (3, 24)
SIZES = [(5, 17), (2, 64), (6, 33)]


def moved(at: AtSize) -> tuple[Program, tuple[Move, ...]]:
    """Everything kept, and as much of it away as can be, at that size."""
    step = at.step
    evaluator = step.evaluator().at(step.measured.at(at.costs), bare(at.line.joint))
    candidate = evaluator.candidate(coded(keep_all(len(step.line.stages))))
    evaluation = evaluator.evaluation(candidate)
    fixed = step.line.joint.storages.of((*step.joint.given, *step.line.pinned))
    movable = Movable.of(evaluation, fixed, USUAL.small_share)
    moves = movable.moves(movable.least_bytes)
    assert moves
    return evaluator.program(candidate), moves


def travel_of(moves: Sequence[Move]) -> tuple[Travel, Arena]:
    slots, total_bytes = assign_slots([m.nbytes for m in moves])
    arena = Arena(total_bytes, device=torch.device("cpu"))
    offsets = dict(zip((m.storage for m in moves), slots, strict=True))
    return Travel(tuple(moves), offsets, total_bytes, arena.id), arena


def check(at: AtSize, graphs, travel: Travel) -> None:
    """The graphs of a step compute at that size what the step of that size does."""
    forward, backward = (g.at({**at.names, **travel.names()}) for g in graphs)
    count = at.step.output_count
    truth = run_traced(at.static)
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(7)
        saved = list(forward([*at.primals]))
        outputs, saved = saved[:count], saved[count:]
        made = Made([None] * len(at.primals))
        backward([*saved, *(t.clone() for t in at.static.tangents), made])
        assert torch.equal(torch.get_rng_state(), truth.generator)
    assert_bitwise_equal(outputs, truth.outputs)
    kept = [g for g in made.gradients if g is not None]
    assert_bitwise_equal(kept, [g for g in truth.gradients if g is not None])


@pytest.mark.parametrize("sizes", SIZES)
def test_what_travels_at_a_size_comes_back(sizes: tuple[int, int]):
    at = at_size("gpt", HINTS, sizes)
    program, moves = moved(at)
    travel, arena = travel_of(moves)
    check(at, rewrite(program, [0] * len(program.calls), BlockModules(), travel), travel)
    arena.close()


def test_the_same_code_sends_what_each_size_needs():
    program, moves = moved(at_size("gpt", HINTS, SIZES[0]))
    most, arena = travel_of([replace(m, nbytes=8 * m.nbytes) for m in moves])
    graphs = rewrite(program, [0] * len(program.calls), BlockModules(), most)
    for sizes in SIZES:
        at = at_size("gpt", HINTS, sizes)
        nbytes = at.line.joint.storages.nbytes
        own = [replace(m, nbytes=nbytes[m.storage]) for m in moves]
        slots, total_bytes = assign_slots([m.nbytes for m in own])
        offsets = dict(zip((m.storage for m in own), slots, strict=True))
        check(at, graphs, Travel(tuple(own), offsets, total_bytes, most.arena))
    arena.close()
