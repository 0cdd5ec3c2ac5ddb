"""The joint graph: complete, functional, and the traced one's equal."""

from __future__ import annotations

import operator
from itertools import pairwise

import pytest
import torch
from torch import Tensor, fx, nn
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from fxremat import torch_compat
from fxremat.errors import CaptureError, GraphError
from fxremat.passes.joint import rng
from fxremat.passes.joint.build import build_joint_graph
from fxremat.passes.joint.fixed_sizes import fix_sizes
from fxremat.passes.joint.graph import JointGraph
from tests.harness import SEED, Captured, capture, captured, run_traced
from tests.models import ZOO
from tests.models.bits import assert_bitwise_equal

aten = torch.ops.aten
every_model = pytest.mark.parametrize("name", ZOO)


@every_model
def test_every_operation_is_forward_or_backward(name: str):
    joint = captured(name).joint
    operations = [n for n in joint.module.graph.nodes if n.op == "call_function"]
    assert set(joint.forward).isdisjoint(joint.backward)
    assert sorted([*joint.forward, *joint.backward]) == sorted(operations)
    assert {*joint.primals, *joint.tangents} == set(joint.module.graph.find_nodes(op="placeholder"))
    for part in (joint.forward, joint.backward):
        assert sorted(part) == list(part), "in graph order"


@every_model
def test_the_forward_stands_alone(name: str):
    joint = captured(name).joint
    allowed = {*joint.given, *joint.forward}
    for node in joint.forward:
        assert allowed.issuperset(node.all_input_nodes), node
    results = [n for n in joint.forward_outputs if isinstance(n, fx.Node)]
    assert allowed.issuperset(results)


@every_model
def test_results_of_an_operation_follow_it(name: str):
    nodes = list(captured(name).joint.module.graph.nodes)
    for before, node in pairwise(nodes):
        if node.target is operator.getitem:
            source = node.args[0]
            assert before is source or (
                before.target is operator.getitem and before.args[0] is source
            )


@every_model
def test_what_it_computes_is_what_was_traced(name: str):
    """With every pass of the joint graph, run as one graph."""
    step = captured(name)
    truth = run_traced(step)
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(SEED)
        results = fx.Interpreter(step.joint.module).run(
            *step.primals, *step.tangents, enable_io_processing=False
        )
        outputs, gradients = results[: step.output_count], results[step.output_count :]
        assert torch.equal(torch.get_rng_state(), truth.generator)
    assert_bitwise_equal(list(outputs), truth.outputs)
    assert_bitwise_equal(list(gradients), truth.gradients)


@every_model
def test_one_gradient_for_each_primal_that_asks(name: str):
    step = captured(name)
    joint = step.joint
    for primal, gradient, value in zip(
        joint.primals, joint.backward_outputs, step.primals, strict=True
    ):
        unused = name == "wavenet" and gradient is None
        assert isinstance(gradient, fx.Node) == value.requires_grad or unused, primal


def test_the_traced_graph_is_left_alone():
    step = captured("gpt")
    before = str(step.traced.graph)
    build_joint_graph(
        step.traced, forward_output_count=step.output_count, mutated_primals=step.mutated
    )
    assert str(step.traced.graph) == before
    assert step.joint.module.graph is not step.traced.graph


def test_detached_tensors_are_their_source():
    step = captured("outputs")
    assert list(step.traced.graph.find_nodes(op="call_function", target=aten.detach.default))
    assert not list(
        step.joint.module.graph.find_nodes(op="call_function", target=aten.detach.default)
    )


class Counter(nn.Module):
    """Reads a buffer and replaces it; a recomputation would read the old value again."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4))
        self.register_buffer("scale", torch.ones(4))
        self.register_buffer("steps", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        y = (x @ self.weight * (2 * self.scale)).tanh()
        self.scale.add_(1)
        self.steps += 1
        return y @ self.weight


def test_old_values_of_mutated_buffers_are_copied_if_they_are_read():
    model = Counter()
    step = capture(model, (torch.randn(4, 4),))
    joint = step.joint
    mutated = {id(step.primals[joint.primals.index(n)]) for n in joint.mutated}
    assert mutated == {id(model.scale), id(model.steps)}
    copies = [n for n in joint.forward if joint.is_old_value(n)]
    assert [id(step.primals[joint.primals.index(n.args[0])]) for n in copies] == [id(model.scale)]
    for primal in joint.mutated:
        readers = {*primal.users} - {*copies, joint.module.graph.output_node()}
        assert readers <= set(joint.forward_outputs), "what reads it otherwise is a new value"
        assert not readers.intersection(joint.backward)


class Long(nn.Module):
    """What reads a buffer first leads to all that follows, each by two ways."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        y = x - self.mean
        self.mean.add_(1)
        for _ in range(400):
            y = y + y.sin()
        return y


def test_old_values_are_copied_however_much_is_computed_of_them():
    joint = capture(Long(), (torch.randn(4, 4, requires_grad=True),)).joint
    assert sum(joint.is_old_value(n) for n in joint.forward) == 1


def test_new_values_come_before_the_models_outputs():
    step = capture(Counter(), (torch.randn(4, 4),))
    assert_bitwise_equal(run_traced(step).outputs[:2], [torch.full((4,), 2.0), torch.ones(())])


def broken(change) -> tuple[Captured, fx.GraphModule]:
    """A traced step, and a copy of its graph with something wrong in it."""
    step = captured("lora")
    graph = fx.Graph()
    graph.output(graph.graph_copy(step.traced.graph, copied := {}))
    graph.output_node().meta.update(step.traced.graph.output_node().meta)
    for old, new in copied.items():
        new.meta = dict(old.meta)
    change(graph)
    return step, fx.GraphModule(step.traced, graph)


def rebuild(step: Captured, module: fx.GraphModule) -> JointGraph:
    return build_joint_graph(module, forward_output_count=step.output_count, mutated_primals=())


def first(graph: fx.Graph, name: str) -> fx.Node:
    return next(n for n in graph.nodes if str(n.target) == name)


def test_the_broken_copies_are_only_broken_where_said():
    step, module = broken(lambda graph: None)
    assert len(rebuild(step, module).forward) == len(step.joint.forward)


def test_dead_code_goes_but_not_a_draw():
    def add_dead_code(graph: fx.Graph) -> None:
        node = first(graph, "aten.add.Tensor")
        with graph.inserting_after(node):
            for dead in (aten.sin.default, aten.rand_like.default):
                graph.call_function(dead, (node,)).meta.update(node.meta)

    joint = rebuild(*broken(add_dead_code))
    assert "aten.sin.default" not in {str(n.target) for n in joint.forward}
    (draw,) = [n for n in joint.forward if rng.is_draw(n)]
    assert draw.args[2] is aten.rand_like.default


def test_an_operation_that_writes_is_named():
    def write(graph: fx.Graph) -> None:
        first(graph, "aten.add.Tensor").target = aten.add_.Tensor

    with pytest.raises(GraphError, match=r"node add.* \(aten.add_.Tensor\) writes into its arg"):
        rebuild(*broken(write))


def test_an_operation_without_a_value_is_named():
    def forget(graph: fx.Graph) -> None:
        del first(graph, "aten.add.Tensor").meta["val"]

    with pytest.raises(GraphError, match="carries no traced value"):
        rebuild(*broken(forget))


def test_a_size_that_depends_on_data_is_named_with_its_line():
    def size(graph: fx.Graph) -> None:
        node = first(graph, "aten.add.Tensor")
        node.meta["val"] = ShapeEnv().create_unbacked_symint()
        node.meta["stack_trace"] = 'File "model.py", line 17, in forward'

    _, module = broken(size)
    with pytest.raises(CaptureError, match=r"(?s)u0 .*aten.add.Tensor.*model.py.*line 17"):
        fix_sizes(module)


def test_a_missing_gradient_is_noticed():
    step, module = broken(lambda graph: None)
    with pytest.raises(GraphError, match=r"gradients for .* primals"):
        build_joint_graph(
            module, forward_output_count=step.output_count + 1, mutated_primals=step.mutated
        )


def test_random_draws_read_a_recorded_state():
    joint = captured("gpt").joint
    draws = [n for n in joint.forward if torch_compat.draws_random_numbers(n)]
    assert not draws, "each was rewritten"
    rewritten = [n for n in joint.forward if rng.is_draw(n)]
    assert rewritten
    assert all(rng.is_state(n.args[0]) for n in rewritten)
