"""Masks that follow from positions: attention without them has the same bits."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, fx, nn

import fxremat
from fxremat.capture.sample import Sample
from fxremat.costs.measured import causal
from fxremat.costs.measured.cache import CostCache
from fxremat.costs.measured.causal import MaskBits
from fxremat.costs.measured.synthetic import made_up
from fxremat.passes.joint.build import build_joint_graph
from fxremat.passes.joint.fixed_sizes import fix_sizes
from fxremat.passes.joint.graph import JointGraph
from fxremat.passes.joint.masks.replace import KERNELS, CanReplace, always
from fxremat.passes.joint.masks.rules import arguments_of
from fxremat.sizing import fake
from fxremat.sizing.fake import FakeCopies
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


def step_of(model: nn.Module, *more: Tensor, dtype: torch.dtype = torch.float32) -> Captured:
    torch.manual_seed(SEED)
    return capture(model.train(), (torch.randn(3, TOKENS, WIDTH, dtype=dtype), *more))


def replaced(step: Captured, can_replace: CanReplace | None = None) -> JointGraph:
    module, sizes = fix_sizes(step.traced)
    return build_joint_graph(
        module,
        forward_output_count=step.output_count,
        mutated_primals=step.mutated,
        sizes=sizes,
        can_replace=can_replace or MaskBits(CostCache()).are_kept,
    )


@pytest.fixture
def same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the processor: kernels give the same bits."""
    monkeypatch.setattr(causal, "are_equal", lambda one, other: True)


def attention(joint: JointGraph) -> list[fx.Node]:
    return [n for n in joint.module.graph.nodes if n.target in KERNELS]


def skip_unless_bits_are_kept(step: Captured) -> None:
    if reads_masks(replaced(step)) != [False] * len(attention(step.joint)):
        pytest.skip("kernels of this processor do not keep bits without the mask")


def reads_masks(joint: JointGraph) -> list[bool]:
    each = ((arguments_of(n), KERNELS[n.target].mask) for n in attention(joint))
    return [given[mask] is not None for given, mask in each]


@pytest.mark.parametrize("mask", [lower, positions, added])
@pytest.mark.usefixtures("same_bits")
def test_no_operation_reads_or_computes_it(mask: Mask):
    step = step_of(Attention(mask))
    assert reads_masks(step.joint) == 4 * [True]
    joint = replaced(step)
    assert reads_masks(joint) == 4 * [False]
    square = [n for n in joint.forward if n.meta["val"] is not None and _is_square(n)]
    assert not square, "what computes the mask is gone"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("mask", [lower, positions, added])
def test_the_step_has_the_same_bits(mask: Mask, dtype: torch.dtype):
    step = step_of(Attention(mask).to(dtype), dtype=dtype)
    skip_unless_bits_are_kept(step)
    truth = run_traced(step)
    with torch.no_grad():
        results = fx.Interpreter(replaced(step).module).run(
            *step.primals, *step.tangents, enable_io_processing=False
        )
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


def allocated(x: Tensor) -> Tensor:
    """What lies in memory by chance may be a causal mask."""
    return torch.empty(TOKENS, TOKENS, dtype=torch.bool)


ran: list[int] = []


@torch.library.custom_op("test_causal::mask", mutates_args=())
def of_an_operation(tokens: int) -> Tensor:
    ran.append(tokens)
    return torch.ones(tokens, tokens, dtype=torch.bool).tril()


@of_an_operation.register_fake
def _(tokens: int) -> Tensor:
    return torch.empty(tokens, tokens, dtype=torch.bool)


def of_the_user(x: Tensor) -> Tensor:
    return of_an_operation(TOKENS)


@pytest.mark.parametrize(
    "mask",
    [
        *(sliding, strict_but_for_the_first, finite, one_item_sees_all, slopes, of_data, drawn),
        *(allocated, of_the_user),
    ],
)
@pytest.mark.usefixtures("same_bits")
def test_any_other_stays(mask: Mask):
    joint = replaced(step_of(Attention(mask)))
    assert reads_masks(joint) == 4 * [True]
    assert not ran, "operations of the user may do anything"


@pytest.mark.usefixtures("same_bits")
def test_a_mask_that_is_given_stays():
    model = Attention(lambda mask: mask)
    joint = replaced(step_of(model, torch.ones(TOKENS, TOKENS, dtype=torch.bool).tril()))
    assert reads_masks(joint) == 4 * [True]


@pytest.mark.usefixtures("same_bits")
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


def test_only_nodes_that_may_be_replaced_are():
    step = step_of(Attention(lower))
    joint = replaced(step, lambda node, causal: causal and "backward" in str(node.target))
    assert reads_masks(joint) == [True, True, False, False]
    assert reads_masks(step.joint) == 4 * [True], "nobody compares"


def test_nothing_is_run_where_bits_may_differ(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(causal, "made_up", None)
    assert reads_masks(replaced(step_of(Attention(positions)), always)) == 4 * [False]


def with_symbols(mask: Mask, *dims: int, tokens: int = TOKENS) -> Captured:
    torch.manual_seed(SEED)
    x = torch.randn(3, tokens, WIDTH)
    for dim in dims:
        torch._dynamo.mark_dynamic(x, dim)
    return capture(Attention(mask).train(), (x,), dynamic=None)


def at_all_lengths(x: Tensor) -> Tensor:
    rows = torch.arange(x.shape[1])
    return rows[None, :] <= rows[:, None]


def in_a_window(x: Tensor) -> Tensor:
    rows = torch.arange(x.shape[1])
    return at_all_lengths(x) & (rows[None, :] > rows[:, None] - 2 * TOKENS)


def at_one_length(x: Tensor) -> Tensor:
    rows = torch.arange(x.shape[1])
    return rows[None, :] + x.shape[1] <= rows[:, None] + TOKENS


@pytest.mark.parametrize("dims", [(0,), (1,), (0, 1)])
@pytest.mark.usefixtures("same_bits")
def test_a_rule_holds_at_all_sizes(dims: tuple[int, ...]):
    joint = replaced(with_symbols(at_all_lengths, *dims))
    assert joint.sizes
    assert reads_masks(joint) == 4 * [False]


@pytest.mark.parametrize("mask", [in_a_window, at_one_length])
@pytest.mark.usefixtures("same_bits")
def test_a_mask_that_is_causal_at_one_length_only_stays(mask: Mask):
    torch._dynamo.reset()
    assert reads_masks(replaced(with_symbols(mask, 0))) == 4 * [False]
    assert reads_masks(replaced(with_symbols(mask, 1))) == 4 * [True]


def full(x: Tensor) -> Tensor:
    return torch.ones(x.shape[1], x.shape[1], dtype=torch.bool)


def zeros(x: Tensor) -> Tensor:
    return torch.zeros(x.shape[1], x.shape[1], dtype=x.dtype)


@pytest.mark.parametrize("mask", [full, zeros])
def test_a_mask_that_excludes_nothing_is_left_out(mask: Mask):
    step = step_of(Attention(mask))
    joint = replaced(step, always)
    assert reads_masks(joint) == 4 * [False]
    truth = run_traced(step)
    with torch.no_grad():
        results = fx.Interpreter(joint.module).run(
            *step.primals, *step.tangents, enable_io_processing=False
        )
    for result, expected in zip(results, [*truth.outputs, *truth.gradients], strict=True):
        torch.testing.assert_close(result, expected)


def test_kernels_are_run_once(monkeypatch: pytest.MonkeyPatch):
    bits, step = MaskBits(CostCache()), step_of(Attention(lower))
    first = reads_masks(replaced(step, bits.are_kept))
    monkeypatch.setattr(causal, "made_up", None)
    assert reads_masks(replaced(step, bits.are_kept)) == first


def test_kernels_are_compared_at_several_lengths_where_the_length_varies(
    monkeypatch: pytest.MonkeyPatch,
):
    lengths = set()

    def seen(traced: Tensor) -> Tensor:
        lengths.add(int(traced.shape[-2]))
        return made_up(traced)

    monkeypatch.setattr(causal, "made_up", seen)
    replaced(step_of(Attention(lower)))
    assert lengths == {TOKENS}
    replaced(with_symbols(at_all_lengths, 1))
    assert lengths == {TOKENS, *causal.LENGTHS}


@pytest.mark.parametrize("dynamic", [False, True])
def test_no_mask_of_a_long_sequence_is_made(dynamic: bool, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(causal, "LONGEST", 64)
    monkeypatch.setattr(causal, "LENGTHS", (33,))
    copies, model = FakeCopies(), Attention(at_all_lengths).train()
    sample = Sample((torch.empty(1, 60_000, WIDTH, device="meta"),)).map(copies.of)
    with copies.inside(model):
        step = fake.capture(model, sample, dynamic=dynamic)
    bits, (module, sizes) = MaskBits(CostCache()), fix_sizes(step.joint)
    joint = build_joint_graph(
        module,
        forward_output_count=step.output_count,
        mutated_primals=(),
        sizes=sizes,
        can_replace=bits.are_kept,
    )
    assert bool(joint.sizes) == dynamic
    assert len(attention(joint)) == 4
    assert 0 < bits.measuring_bytes < 1 << 20


def test_what_is_held_meanwhile_is_counted():
    bits = MaskBits(CostCache())
    replaced(step_of(Attention(positions)), bits.are_kept)
    mask_bytes = 3 * TOKENS * TOKENS * 4
    assert mask_bytes < bits.measuring_bytes < 10 * mask_bytes


def test_a_step_warns_of_what_masks_took_while_it_was_planned():
    tokens = 1024
    torch.manual_seed(SEED)
    model, x = Projected(tokens), torch.randn(2, tokens, WIDTH)
    skip_unless_bits_are_kept(capture(model, (x,)))
    compiled = fxremat.compile(model, budget=4 << 20)
    with pytest.warns(fxremat.BudgetWarning, match="measuring its operations took at least"):
        compiled(x).square().sum().backward()


@pytest.mark.usefixtures("same_bits")
def test_masks_stay_where_kernels_cannot_be_run(monkeypatch: pytest.MonkeyPatch):
    def refuse(*args: object, **_: object) -> Tensor:
        raise RuntimeError("you tried to allocate 1 byte")

    step, bits = step_of(Attention(lower)), MaskBits(CostCache())
    with monkeypatch.context() as patched:
        patched.setattr(causal, "made_up", refuse)
        assert reads_masks(replaced(step, bits.are_kept)) == 4 * [True]
    assert reads_masks(replaced(step, bits.are_kept)) == 4 * [False], "memory may suffice later"


def test_masks_stay_where_bits_differ(monkeypatch: pytest.MonkeyPatch):
    step = step_of(Attention(lower))
    monkeypatch.setattr(causal, "are_equal", lambda one, other: False)
    assert reads_masks(replaced(step)) == 4 * [True]


def test_generators_stay_where_they_were():
    step = step_of(Attention(lower))
    state = torch.get_rng_state()
    replaced(step)
    assert torch.equal(torch.get_rng_state(), state)


class Projected(nn.Module):
    """One layer of attention, with a mask of numbers of positions for each item."""

    def __init__(self, tokens: int):
        super().__init__()
        self.tokens, self.project = tokens, nn.Linear(WIDTH, 3 * WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.project(x).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4)
        rows = torch.arange(self.tokens)
        mask = (rows[None, :] <= rows[:, None]).expand(len(x), 1, -1, -1)
        return nn.functional.scaled_dot_product_attention(q, k, v, mask)


def test_a_step_holds_no_mask():
    tokens = 512
    torch.manual_seed(SEED)
    model, x = Projected(tokens), torch.randn(2, tokens, WIDTH)
    torch.compile(model, backend="aot_eager")(x).square().sum().backward()
    expected = {n: p.grad for n, p in model.named_parameters()}
    model.zero_grad()
    compiled = fxremat.compile(model, x, "100MiB")
    compiled(x).square().sum().backward()
    (plan,) = compiled.plans
    assert first_difference({n: p.grad for n, p in model.named_parameters()}, expected) is None
    skip_unless_bits_are_kept(capture(model, (x,)))
    assert plan.baseline_peak_bytes < 4 * tokens * tokens, "less than one mask of numbers"
