"""Names of modules: common to several, of a block, of a run."""

from __future__ import annotations

import pytest

from fxremat.report.modules import block_of, blocks_of, common_module, named, pattern_of, span


@pytest.mark.parametrize(
    ("modules", "common"),
    [
        ([], ""),
        (["", ""], ""),
        (["h.3.attn", "", "h.3.attn"], "h.3.attn"),
        (["h.3.attn.qkv", "h.3.attn"], "h.3.attn"),
        (["h.3.attn", "h.3.mlp.up"], "h.3"),
        (["h.3.mlp", "h.3.norm", "h.4.norm"], "h.3.mlp … h.4.norm"),
        (["tokens", "positions"], "tokens … positions"),
        (["h.10", "h.1"], "h.10 … h.1"),
    ],
)
def test_what_several_have_in_common(modules: list[str], common: str):
    assert common_module(modules) == common


@pytest.mark.parametrize(
    ("module", "block"),
    [
        ("model.layers.3.mlp.0", "model.layers.3"),
        ("7.2", "7"),
        ("lm_head", "lm_head"),
        ("encoder.norm", "encoder"),
        ("layer1.0.conv1", "layer1.0"),
        ("h.3.mlp … h.4.norm", "h.3"),
        ("", ""),
    ],
)
def test_the_block_of_a_module(module: str, block: str):
    assert block_of(module) == block


def test_a_stage_without_a_module_is_in_the_block_before():
    assert blocks_of(["", "h.0.a", "", "h.1"]) == ["", "h.0", "h.0", "h.1"]


def test_repeated_blocks_have_one_pattern():
    assert pattern_of("h.3.mlp.0") == pattern_of("h.12.mlp.0") == "h.*.mlp.*"
    assert pattern_of("conv1") == "conv1"


@pytest.mark.parametrize(
    ("modules", "name"),
    [
        ([""], ""),
        (["h.3"], "h.3"),
        (["h.3.mlp", "h.4.mlp", "h.14.mlp"], "h.3–14.mlp"),
        (["h.3.mlp.0", "h.4.mlp.1"], "h.3.mlp.0 … h.4.mlp.1"),
        (["a", "b"], "a … b"),
        (["a … b", "c … d"], "a … d"),
    ],
)
def test_modules_that_follow_each_other(modules: list[str], name: str):
    assert named(modules) == name


def test_numbers_that_follow_each_other():
    assert (span(3, 3), span(3, 14)) == ("3", "3–14")
