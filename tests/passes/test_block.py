"""Blocks: the least operations that give what is asked for, as their mode runs them."""

from __future__ import annotations

import pytest
import torch
from torch import fx

from fxremat.costs.measured.cost import stage_blocks
from fxremat.costs.measured.execute import compile_block
from fxremat.errors import GraphError
from fxremat.passes.joint import batchnorm, rng
from fxremat.passes.joint.graph import is_getitem
from fxremat.passes.stages.block import (
    Block,
    Mode,
    build_graph,
    call_of,
    dependencies,
    extract,
)
from fxremat.runtime import rng as runtime_rng
from tests.harness import Captured, captured
from tests.models.bits import assert_bitwise_equal
from tests.reference.program import candidates

models = pytest.mark.parametrize("name", ["gpt", "resnet50", "outputs", "gru", "siamese"])
aten = torch.ops.aten


def blocks_of(step: Captured) -> list[Block]:
    count = len(step.line.stages)
    return [b for i in range(count) for b in stage_blocks(step.line, step.blocks, i)]


@models
def test_a_block_is_closed(name: str):
    step = captured(name)
    for block in blocks_of(step):
        known = set(block.inputs)
        for node in block.nodes:
            assert known.issuperset(dependencies(node, block.mode)), node
            known.add(node)
        assert set(block.nodes).issuperset(block.outputs)
        assert set(block.inputs).isdisjoint(block.nodes)
        assert block.reads == step.joint.storages.of(block.inputs)


@models
def test_a_block_has_nothing_that_is_not_asked_for(name: str):
    step = captured(name)
    for block in blocks_of(step):
        needed = set(block.outputs)
        for node in reversed(block.nodes):
            draws = block.mode is not Mode.AGAIN and rng.is_draw(node)
            assert node in needed or draws, f"{node} of stage {block.stage}, {block.mode}"
            needed.update(dependencies(node, block.mode))
        assert needed.issuperset(block.inputs)


@models
def test_inputs_and_outputs_are_in_order(name: str):
    step = captured(name)
    for block in blocks_of(step):
        assert list(block.inputs) == sorted(block.inputs, key=step.line.rank)
        assert list(block.outputs) == sorted(block.outputs, key=step.line.rank)


def test_asking_for_less_runs_less():
    step = captured("gpt")
    line = step.line
    stage = next(i for i, s in enumerate(line.stages) if len(s.saved) > 3)
    everything = candidates(line, stage, Mode.FIRST)
    whole = extract(line, stage, Mode.AGAIN, line.stages[stage].saved)
    part = extract(line, stage, Mode.AGAIN, line.stages[stage].saved[:1])
    none = extract(line, stage, Mode.AGAIN, ())
    assert none.nodes == none.inputs == none.outputs == ()
    assert 0 < len(part.nodes) < len(whole.nodes) <= len(everything) + len(whole.inputs)
    assert part.outputs == line.stages[stage].saved[:1]


def test_the_first_run_draws_even_what_nobody_asked_for():
    step = captured("gpt")
    line = step.line
    stage = next(i for i, s in enumerate(line.stages) if any(rng.is_draw(n) for n in s.forward))
    block = extract(line, stage, Mode.FIRST, ())
    draws = [n for n in line.stages[stage].forward if rng.is_draw(n)]
    assert [n for n in block.nodes if rng.is_draw(n)] == draws
    assert block.outputs == ()


def test_a_recomputation_reads_pinned_tensors():
    step = captured("gpt")
    line = step.line
    pinning = [i for i, s in enumerate(line.stages) if s.pinned and s.saved]
    assert pinning
    for stage in pinning:
        block = extract(line, stage, Mode.AGAIN, line.stages[stage].saved)
        assert line.pinned.isdisjoint(block.nodes)
        assert line.pinned.isdisjoint(candidates(line, stage, Mode.AGAIN))
        first = extract(line, stage, Mode.FIRST, line.stages[stage].pinned)
        assert set(first.outputs) == set(line.stages[stage].pinned)


def draw_and_norm() -> tuple[fx.Node, fx.Node]:
    draw = next(n for n in captured("gpt").joint.forward if rng.is_draw(n))
    norm = next(n for n in captured("resnet50").joint.forward if batchnorm.updates_statistics(n))
    return draw, norm


def test_the_first_draw_is_the_plain_operation():
    draw, _ = draw_and_norm()
    target, args, kwargs = call_of(draw, Mode.FIRST)
    assert target is aten.native_dropout.default
    assert args == tuple(draw.args[3:])
    assert kwargs == draw.kwargs
    assert not any(rng.is_state(n) for n in dependencies(draw, Mode.FIRST))


def test_a_repeated_draw_reads_the_recorded_state():
    draw, _ = draw_and_norm()
    target, args, _ = call_of(draw, Mode.AGAIN)
    assert target is runtime_rng.redraw
    assert rng.is_state(args[0])
    assert args[0] in dependencies(draw, Mode.AGAIN)


def test_a_repeated_norm_has_no_statistics():
    _, norm = draw_and_norm()
    target, args, _ = call_of(norm, Mode.AGAIN)
    x, weight, bias, mean, variance, *rest = norm.args
    assert target is aten._native_batch_norm_legit.no_stats
    assert args == (x, weight, bias, *rest)
    assert {mean, variance}.isdisjoint(dependencies(norm, Mode.AGAIN))
    assert {mean, variance} <= set(dependencies(norm, Mode.FIRST))
    assert call_of(norm, Mode.FIRST)[0] is norm.target


def test_other_operations_are_as_they_are():
    for node in captured("gpt").joint.backward[:20]:
        assert call_of(node, Mode.BACKWARD) == (node.target, node.args, dict(node.kwargs))


@models
def test_its_code_computes_what_the_joint_graph_does(name: str):
    """The first blocks in a row are the forward."""
    step = captured(name)
    values = dict(zip(step.joint.primals, step.primals, strict=True))
    interpreter = Keeping(step.joint.module)
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(3)
        interpreter.run(*step.primals, *step.tangents, enable_io_processing=False)
        torch.manual_seed(3)
        for index in range(len(step.line.stages)):
            block = stage_blocks(step.line, step.blocks, index)[0]
            inputs = [values.get(n, interpreter.seen[n]) for n in block.inputs]
            outputs = compile_block(block)(list(inputs))
            values.update(zip(block.outputs, outputs, strict=True))
    for node, value in values.items():
        assert_bitwise_equal(value, interpreter.seen[node])


class Keeping(fx.Interpreter):
    """Remembers the value of every node."""

    def __init__(self, module: fx.GraphModule):
        super().__init__(module, garbage_collect_values=False)
        self.seen: dict[fx.Node, object] = {}

    def run_node(self, n: fx.Node) -> object:
        self.seen[n] = super().run_node(n)
        return self.seen[n]


def test_its_graph_carries_shapes():
    step = captured("gpt")
    block = stage_blocks(step.line, step.blocks, 2)[2]
    graph = build_graph(block)
    graph.lint()
    assert [n.meta["val"].shape for n in graph.find_nodes(op="placeholder")] == [
        n.meta["val"].shape for n in block.inputs
    ]
    assert len(graph.output_node().meta["val"]) == len(block.outputs)


def test_an_input_that_is_no_tensor_is_named():
    step = captured("gpt")
    split = next(n for n in step.joint.forward if isinstance(n.meta["val"], (tuple, list)))
    pick = next(n for n in split.users if is_getitem(n))
    block = Block(0, Mode.FIRST, (pick,), (split,), (pick,), frozenset())
    with pytest.raises(
        GraphError, match=rf"{split.name} \(.*\) crosses a stage boundary but is no tensor"
    ):
        build_graph(block)
