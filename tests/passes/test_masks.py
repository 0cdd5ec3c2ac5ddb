"""Causal masks that depend on no input: attention is causal without them, to the last bit."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, fx, nn

import fxremat
from fxremat.costs.bits import same_bits_without_mask
from fxremat.costs.cache import CostCache
from fxremat.passes.joint.build import build_joint_graph
from fxremat.passes.joint.graph import JointGraph
from fxremat.passes.joint.masks import BACKWARD, FORWARD
from fxremat.passes.joint.settle import settle
from tests.harness import SEED, Captured, capture, run_traced
from tests.models.bits import assert_bitwise_equal, first_difference

TOKENS, WIDTH = 40, 16

Mask = Callable[[Tensor], Tensor]


def lower(x: Tensor) -> Tensor:
    return torch.ones(TOKENS, TOKENS, dtype=torch.bool).tril()


def positions(x: Tensor) -> Tensor:
    """As transformers computes it."""
    rows = torch.arange(TOKENS)
    batch = torch.arange(len(x))[:, None, None, None]
    return (rows[None, None, None, :] <= rows[None, None, :, None]) & (batch >= 0)


def added(x: Tensor) -> Tensor:
    return torch.full((TOKENS, TOKENS), -torch.inf, dtype=x.dtype).triu(1)


class Attention(nn.Module):
    """Two layers of attention, each with a mask that is computed in the call."""

    def __init__(self, mask: Mask, *, dropout: float = 0.0):
        super().__init__()
        self.mask, self.dropout = mask, dropout
        self.layers = nn.ModuleList(nn.Linear(WIDTH, 3 * WIDTH) for _ in range(2))

    def forward(self, x: Tensor, weights: Tensor | None = None) -> Tensor:
        for layer in self.layers:
            q, k, v = layer(x).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4)
            mask = self.mask(x if weights is None else weights)
            y = nn.functional.scaled_dot_product_attention(q, k, v, mask, self.dropout)
            x = x + y.transpose(1, 2).flatten(2)
        return x


def step_of(model: nn.Module, *more: Tensor) -> Captured:
    torch.manual_seed(SEED)
    return capture(model.train(), (torch.randn(3, TOKENS, WIDTH), *more))


def agree(node: fx.Node) -> bool:
    return True


def replaced(step: Captured, same_bits: Callable[[fx.Node], bool] = agree) -> JointGraph:
    module, sizes = settle(step.traced)
    return build_joint_graph(
        module,
        forward_output_count=step.output_count,
        mutated_primals=step.mutated,
        sizes=sizes,
        same_bits=same_bits,
    )


def attention(joint: JointGraph) -> list[fx.Node]:
    return [n for n in joint.module.graph.nodes if n.target in (FORWARD, BACKWARD)]


def skip_unless_bits_are_kept(step: Captured) -> None:
    nodes = attention(step.joint)
    assert nodes
    if not all(same_bits_without_mask(node, cache=CostCache()) for node in nodes):
        pytest.skip("kernels of this processor keep no bits without the mask")


def reads_masks(joint: JointGraph) -> list[bool]:
    return ["attn_mask" in node.kwargs for node in attention(joint)]


@pytest.mark.parametrize("mask", [lower, positions, added])
def test_no_operation_reads_or_computes_it(mask: Mask):
    step = step_of(Attention(mask))
    assert reads_masks(step.joint) == 4 * [True]
    joint = replaced(step)
    assert reads_masks(joint) == 4 * [False]
    square = [n for n in joint.forward if n.meta["val"] is not None and _is_square(n)]
    assert not square, "what computes the mask is gone"
    truth = run_traced(step)
    with torch.no_grad():
        results = fx.Interpreter(joint.module).run(
            *step.primals, *step.tangents, enable_io_processing=False
        )
    skip_unless_bits_are_kept(step)
    assert_bitwise_equal(list(results), [*truth.outputs, *truth.gradients])


def _is_square(node: fx.Node) -> bool:
    value = node.meta["val"]
    return isinstance(value, Tensor) and value.shape[-2:] == (TOKENS, TOKENS)


def sliding(x: Tensor) -> Tensor:
    return lower(x) & torch.ones(TOKENS, TOKENS, dtype=torch.bool).triu(-TOKENS // 2)


def strict_but_for_the_first(x: Tensor) -> Tensor:
    mask = torch.ones(TOKENS, TOKENS, dtype=torch.bool).tril(-1)
    return mask | (torch.arange(TOKENS) == 0)


def finite(x: Tensor) -> Tensor:
    return torch.full((TOKENS, TOKENS), -1e4).triu(1)


def one_item_sees_all(x: Tensor) -> Tensor:
    return positions(x) | (torch.arange(len(x)) == 1)[:, None, None, None]


def slopes(x: Tensor) -> Tensor:
    """As ALiBi adds them."""
    rows = torch.arange(TOKENS)
    return added(x) + (rows[None, :] - rows[:, None]).to(x.dtype)


def of_data(x: Tensor) -> Tensor:
    return lower(x) & (x > -100).all()


def drawn(x: Tensor) -> Tensor:
    return lower(x) & (torch.rand(TOKENS, TOKENS) >= 0)


@pytest.mark.parametrize(
    "mask",
    [sliding, strict_but_for_the_first, finite, one_item_sees_all, slopes, of_data, drawn],
)
def test_any_other_stays(mask: Mask):
    joint = replaced(step_of(Attention(mask)))
    assert reads_masks(joint) == 4 * [True]


def test_a_mask_that_is_given_stays():
    model = Attention(lambda mask: mask)
    joint = replaced(step_of(model, torch.ones(TOKENS, TOKENS, dtype=torch.bool).tril()))
    assert reads_masks(joint) == 4 * [True]


def test_a_constant_of_the_graph_stays():
    mask = torch.ones(TOKENS, TOKENS, dtype=torch.bool).tril()
    step = step_of(Attention(lower))
    step.traced.register_buffer("constant", mask)
    graph = step.traced.graph
    for node in graph.find_nodes(op="call_function", target=torch.ops.aten.tril.default):
        with graph.inserting_before(node):
            constant = graph.get_attr("constant")
        constant.meta = dict(node.meta)
        node.replace_all_uses_with(constant)
        graph.erase_node(node)
    assert reads_masks(replaced(step)) == 4 * [True]


def test_masks_stay_where_bits_would_change_or_nobody_compares():
    step = step_of(Attention(lower))
    assert reads_masks(replaced(step, lambda node: node.target is BACKWARD)) == [
        *(2 * [True]),
        *(2 * [False]),
    ]
    assert reads_masks(step.joint) == 4 * [True]


def test_masks_stay_where_sizes_may_change():
    x = torch.randn(3, TOKENS, WIDTH)
    torch._dynamo.mark_dynamic(x, 0)
    step = capture(Attention(positions).train(), (x,), dynamic=None)
    joint = replaced(step)
    assert joint.sizes
    assert reads_masks(joint) == 4 * [True]


def test_masks_that_are_computed_alike_are_computed_once():
    calls = 0

    def tril(*args):
        nonlocal calls
        calls += 1
        return torch.ops.aten.tril.default(*args)

    step = step_of(Attention(lower))
    nodes = step.traced.graph.find_nodes(op="call_function", target=torch.ops.aten.tril.default)
    for node in nodes:
        node.target = tril
    assert reads_masks(replaced(step)) == 4 * [False]
    assert (len(nodes), calls) == (2, 1)


def test_a_step_holds_no_mask():
    tokens = 512

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.project = nn.Linear(WIDTH, 3 * WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            q, k, v = self.project(x).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4)
            rows = torch.arange(tokens)
            mask = (rows[None, :] <= rows[:, None]).expand(len(x), 1, -1, -1)
            return nn.functional.scaled_dot_product_attention(q, k, v, mask)

    torch.manual_seed(SEED)
    model, x = Net(), torch.randn(2, tokens, WIDTH)
    torch.compile(model, backend="aot_eager")(x).square().sum().backward()
    expected = {n: p.grad for n, p in model.named_parameters()}
    model.zero_grad()
    compiled = fxremat.compile(model, x, "100MiB")
    compiled(x).square().sum().backward()
    (plan,) = compiled.plans
    assert first_difference({n: p.grad for n, p in model.named_parameters()}, expected) is None
    skip_unless_bits_are_kept(capture(model, (x,)))
    assert plan.baseline_peak_bytes < 4 * tokens * tokens, "less than one mask of numbers"
