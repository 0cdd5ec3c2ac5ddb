"""Random draws: repeated exactly, and the generator ends where it would have ended."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, fx, nn

from fxremat import torch_compat
from fxremat.errors import GraphError
from fxremat.passes.emit.program import keep_all
from fxremat.passes.joint import rng
from fxremat.runtime.rng import draw, record_state, redraw, restore_state, state_bytes
from tests.harness import capture, captured, periodic, run_emitted, run_traced
from tests.models.bits import assert_bitwise_equal, bitwise_equal


@pytest.fixture(autouse=True)
def _own_generator():
    with torch.random.fork_rng():
        torch.manual_seed(11)
        yield


def test_a_state_is_recorded_and_restored():
    state = record_state("cpu")
    assert state.dtype == torch.uint8
    first = torch.rand(3)
    restore_state("cpu", state)
    assert torch.equal(first, torch.rand(3))


def test_a_draw_is_the_plain_operation():
    state = record_state("cpu")
    first = draw(state, "cpu", torch.rand, 3)
    torch.manual_seed(11)
    assert torch.equal(first, torch.rand(3))


def test_a_redraw_repeats_and_leaves_no_trace():
    state = record_state("cpu")
    first = draw(state, "cpu", torch.rand, 3)
    torch.rand(5)
    before = torch.get_rng_state()
    assert torch.equal(redraw(state, "cpu", torch.rand, 3), first)
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(redraw(state, "cpu", torch.rand, 3), first), "any number of times"


def test_a_redraw_that_fails_leaves_no_trace():
    state = record_state("cpu")
    torch.rand(5)
    before = torch.get_rng_state()
    with pytest.raises(TypeError):
        redraw(state, "cpu", torch.rand, "three")
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize(
    "change",
    [
        lambda x: nn.functional.dropout(x, 0.5),
        lambda x: nn.functional.alpha_dropout(x, 0.5, training=True),
        lambda x: nn.functional.feature_alpha_dropout(x, 0.5, training=True),
        lambda x: x + torch.randn_like(x),
        lambda x: x * torch.rand(x.shape),
        lambda x: x + torch.randint(0, 5, x.shape),
        lambda x: x * torch.bernoulli(x.sigmoid().detach()),
        lambda x: x[torch.randperm(x.shape[0])],
        lambda x: nn.functional.rrelu(x, training=True),
        lambda x: nn.functional.gumbel_softmax(x, 0.7),
        lambda x: x + torch.empty_like(x).uniform_(),
        lambda x: x + torch.normal(x.detach(), 1.0),
        lambda x: x * torch.multinomial(x.softmax(1).detach(), 16, replacement=True),
        lambda x: nn.functional.scaled_dot_product_attention(
            *(y.view(4, 2, 16, 2) for y in x.view(64, 4).repeat(3, 1).chunk(3)), dropout_p=0.3
        ).reshape(16, 16),
    ],
)
def test_every_kind_of_draw_is_repeated(change):
    model = Blocks(change)
    step = capture(model, (torch.randn(16, 16),))
    if not any(rng.is_draw(n) for n in step.joint.forward):
        pytest.fail("nothing draws: the test is empty")
    truth = run_traced(step)
    assert not bitwise_equal(truth.outputs, run_traced(step, seed=5).outputs)
    count = len(step.line.stages)
    for schedule in (keep_all(count), periodic(count, 1), periodic(count, 3)):
        assert_bitwise_equal(run_emitted(step, step.program(schedule)), truth)


class Blocks(nn.Module):
    """Something random between layers."""

    def __init__(self, change):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(6))
        self.change = change

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = self.change(layer(x.tanh())).tanh()
        return x


class RoundedGradient(torch.autograd.Function):
    """The identity, whose backward adds noise."""

    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx, gradient: Tensor) -> Tensor:
        return gradient + torch.rand_like(gradient)


def test_draws_of_the_backward_come_in_their_order():
    step = capture(Blocks(lambda x: nn.functional.dropout(RoundedGradient.apply(x), 0.2)),
                   (torch.randn(16, 16),))  # fmt: skip
    draws = [n for n in step.joint.backward if torch_compat.draws_random_numbers(n)]
    assert len(draws) == 6
    truth = run_traced(step)
    count = len(step.line.stages)
    for schedule in (keep_all(count), periodic(count, 1), periodic(count, 3)):
        assert_bitwise_equal(run_emitted(step, step.program(schedule)), truth)


def test_no_state_is_recorded_where_nothing_is_drawn_again():
    step = captured("gpt")
    program = step.program(keep_all(len(step.line.stages)))
    assert not any(rng.is_state(n) for call in program.calls for n in call.block.nodes)
    again = step.program(periodic(len(step.line.stages), 2))
    assert any(rng.is_state(n) for call in again.calls for n in call.block.nodes)


@pytest.mark.parametrize(("p", "draws"), [(0.0, False), (0.1, True), (1.0, True)])
def test_attention_draws_if_it_drops(p: float, draws: bool):
    graph = fx.Graph()
    args = [graph.placeholder(n) for n in "qkv"]
    target = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
    node = graph.call_function(target, (*args, p))
    assert torch_compat.draws_random_numbers(node) == draws
    node = graph.call_function(target, tuple(args), {"dropout_p": p})
    assert torch_compat.draws_random_numbers(node) == draws
    node = graph.call_function(target, tuple(args))
    assert not torch_compat.draws_random_numbers(node), "the default is not to drop"


@pytest.mark.parametrize(("train", "draws"), [(True, True), (False, False)])
def test_dropout_draws_if_it_trains(train: bool, draws: bool):
    graph = fx.Graph()
    node = graph.call_function(
        torch.ops.aten.native_dropout.default, (graph.placeholder("x"), 0.1, train)
    )
    assert torch_compat.draws_random_numbers(node) == draws


def test_a_device_whose_generator_is_unknown_is_named():
    graph = fx.Graph()
    x = graph.placeholder("x")
    node = graph.call_function(torch.ops.aten.rand_like.default, (x,))
    node.meta["val"] = torch.zeros(3, device="meta")
    graph.output(node)
    with pytest.raises(GraphError, match=r"rand_like.*draws on meta.*use cpu or cuda"):
        rng.record_states(graph, [node])


def test_a_draw_without_a_tensor_is_named():
    graph = fx.Graph()
    node = graph.call_function(torch.ops.aten.rand.default, ([3],))
    node.meta["val"] = None
    graph.output(node)
    with pytest.raises(GraphError, match=r"rand.*returns no tensor"):
        rng.record_states(graph, [node])


def test_the_size_of_a_state_is_known() -> None:
    assert state_bytes("cpu") == record_state("cpu").numel()


@pytest.mark.cuda
def test_the_size_of_a_gpus_state_is_known() -> None:
    assert state_bytes("cuda") == record_state("cuda").numel()
