"""Tensors as bits, and what a call of a block takes and gives."""

from __future__ import annotations

import pytest

from fxremat.passes.stages.block import Mode, candidates
from fxremat.passes.stages.blocks import NOTHING, BlockCache, TensorBits
from tests.harness import Captured, captured


@pytest.fixture(scope="module", params=["gpt", "buffers", "siamese"])
def step(request: pytest.FixtureRequest) -> Captured:
    return captured(request.param)


def test_bits_stand_for_tensors(step: Captured):
    bits = TensorBits(step.line)
    nodes = [n for stage in step.line.stages for n in stage.saved]
    assert set(bits.nodes(bits.of(nodes))) == set(nodes)
    assert bits.nodes(0) == ()
    one, other = bits.of(nodes[:5]), bits.of(nodes[5:])
    assert one & other == 0
    assert bits.nodes(one | other) == bits.nodes(bits.of(nodes))


def test_bits_are_ordered_by_stage_after_what_is_there_throughout(step: Captured):
    line = step.line
    bits = TensorBits(line)
    pinned = [n for n in line.pinned if n in line.stage_of]
    saved = [n for stage in line.stages for n in stage.saved]
    order = bits.nodes(bits.of((*saved, *pinned, *line.joint.primals)))
    assert set(order[-len(saved) :]) == set(saved)
    stages = [line.stage_of[n] for n in order[-len(saved) :]]
    assert stages == sorted(stages)


def test_storages_hold_views_too(step: Captured):
    table = step.joint.storages
    bits = TensorBits(step.line)
    for stage in step.line.stages:
        for node in stage.saved:
            own = bits.in_storages(table.of_node[node])
            assert own & bits.of([node])
            assert bits.storages(table.of_node[node], own) == frozenset(table.of_node[node])
            assert not bits.storages(table.of_node[node], 0)


def test_a_block_gives_what_it_can_of_what_is_needed(step: Captured):
    line, blocks = step.line, BlockCache(step.line)
    for index in range(len(line.stages)):
        able = candidates(line, index, Mode.AGAIN)
        wanted = blocks.bits.of((*able[::2], *line.joint.primals))
        taken = blocks.take(index, Mode.AGAIN, wanted, missing=NOTHING, held=NOTHING, sums=None)
        assert set(taken.block.outputs) == set(able[::2])
        assert set(blocks.bits.nodes(taken.inputs)) == set(taken.block.inputs)
        assert taken.block is blocks(index, Mode.AGAIN, frozenset(able[::2]))
        again = blocks.take(index, Mode.AGAIN, wanted, missing=NOTHING, held=NOTHING, sums=None)
        assert again is taken


def test_what_is_read_later_or_never_freed_is_kept(step: Captured):
    line, blocks = step.line, BlockCache(step.line)
    table = step.joint.storages
    given = table.of(step.joint.given)
    for index in range(1, len(line.stages)):
        wanted = blocks.bits.of(candidates(line, index, Mode.AGAIN))
        taken = blocks.take(index, Mode.AGAIN, wanted, missing=NOTHING, held=NOTHING, sums=None)
        assert blocks.kept(taken, 0) == taken.block.reads & given
        later = blocks.bits.of(taken.block.inputs[:1])
        expected = taken.block.reads & (given | table.of(taken.block.inputs[:1]))
        assert blocks.kept(taken, later) == expected
