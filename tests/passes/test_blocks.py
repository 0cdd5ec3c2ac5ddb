"""Each block of a line is extracted once, and told by what it computes."""

from __future__ import annotations

import pytest

from fxremat.costs.cost import stage_blocks
from fxremat.passes.stages.block import BlockCache, Mode, candidates
from fxremat.passes.stages.order import home_sums
from tests.harness import Captured, captured


@pytest.fixture(scope="module", params=["gpt", "buffers", "siamese"])
def step(request: pytest.FixtureRequest) -> Captured:
    return captured(request.param)


def test_a_block_is_extracted_once(step: Captured):
    line, blocks = step.line, BlockCache(step.line)
    for index in range(len(line.stages)):
        able = candidates(line, index, Mode.AGAIN)
        asked = frozenset(able[::2])
        block = blocks(index, Mode.AGAIN, asked)
        assert set(block.outputs) == asked
        assert blocks(index, Mode.AGAIN, frozenset(able[::2])) is block


def test_what_is_held_matters_where_something_runs_again(step: Captured):
    line, blocks = step.line, BlockCache(step.line)
    for index, stage in enumerate(line.stages):
        able = frozenset(candidates(line, index, Mode.FIRST))
        held = frozenset(stage.saved[:1])
        assert blocks(index, Mode.FIRST, able, held=held) is blocks(index, Mode.FIRST, able)
        again = blocks(index, Mode.AGAIN, frozenset(stage.saved) - held - line.pinned, held=held)
        assert held.isdisjoint(again.nodes)


def test_usual_sums_make_no_block_of_their_own():
    step = captured("siamese")
    line, blocks = step.line, BlockCache(step.line)
    assert line.sums
    for index in range(len(line.stages)):
        able = frozenset(candidates(line, index, Mode.BACKWARD))
        usual = blocks(index, Mode.BACKWARD, able, sums=home_sums(line, index))
        assert usual is blocks(index, Mode.BACKWARD, able)


def test_blocks_of_equal_layers_have_equal_keys():
    step = captured("gpt")
    blocks = BlockCache(step.line)
    keys = [
        tuple(map(blocks.key, stage_blocks(step.line, blocks, index)))
        for index in range(len(step.line.stages))
    ]
    assert len(set(keys)) < len(keys)
    assert keys[0] != keys[-1]
