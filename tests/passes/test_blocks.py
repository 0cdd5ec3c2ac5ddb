"""Each block of a line is extracted once, and told by what it computes."""

from __future__ import annotations

import pytest

from fxremat.costs.measured.cost import stage_blocks
from fxremat.passes.joint.graph import is_tensor
from fxremat.passes.stages.block import BlockCache, Mode
from tests.harness import Captured, captured


@pytest.fixture(scope="module", params=["gpt", "buffers", "siamese"])
def step(request: pytest.FixtureRequest) -> Captured:
    return captured(request.param)


def test_a_block_is_extracted_once(step: Captured):
    line, blocks = step.line, BlockCache(step.line)
    for index in range(len(line.stages)):
        able = [n for n in line.stages[index].forward if is_tensor(n) and n not in line.pinned]
        asked = frozenset(able[::2])
        block = blocks(index, Mode.AGAIN, asked)
        assert set(block.outputs) == asked
        assert blocks(index, Mode.AGAIN, frozenset(able[::2])) is block


def test_blocks_of_equal_layers_have_equal_keys():
    step = captured("gpt")
    blocks = BlockCache(step.line)
    keys = [
        tuple(map(blocks.key, stage_blocks(step.line, blocks, index)))
        for index in range(len(step.line.stages))
    ]
    assert len(set(keys)) < len(keys)
    assert keys[0] != keys[-1]
