"""What torch offers beside plain layers: same bits, and within the budget."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

import fxremat
from tests.models.corners import Applied
from tests.models.zoo import seeded
from tests.works_with.training import Subject, by_torch, check, reference, train, within

pytestmark = pytest.mark.usefixtures("fresh_dynamo", "quick_search")

WIDTH, ROWS = 64, 256


def rows(number: int) -> tuple[Tensor]:
    with seeded(number):
        return (torch.randn(ROWS, WIDTH),)


def applied(function: Callable[..., Any], layers: int = 4) -> nn.Module:
    with seeded(0):
        return Applied(function, *(nn.Linear(WIDTH, WIDTH) for _ in range(layers)))


@torch.library.custom_op("with_torch::swish", mutates_args=())
def swish(x: Tensor) -> Tensor:
    return x * x.sigmoid()


@torch.library.custom_op("with_torch::swish_backward", mutates_args=())
def swish_backward(gradient: Tensor, x: Tensor) -> Tensor:
    share = x.sigmoid()
    return gradient * share * (1 + x * (1 - share))


swish.register_fake(torch.empty_like)
swish_backward.register_fake(lambda gradient, x: torch.empty_like(x))
swish.register_autograd(
    lambda ctx, gradient: swish_backward(gradient, *ctx.saved_tensors),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
)


def custom(layers: nn.ModuleList, x: Tensor) -> Tensor:
    for layer in layers:
        x = swish(layer(x))
    return x


def mapped(layers: nn.ModuleList, x: Tensor) -> Tensor:
    for layer in layers:
        x = torch.vmap(lambda row, layer=layer: layer(row).tanh())(x)
    return x


def attending(layers: nn.ModuleList, x: Tensor) -> Tensor:
    for layer in layers:
        heads = layer(x).view(4, ROWS // 4, 4, WIDTH // 4).transpose(1, 2)
        seen = nn.functional.scaled_dot_product_attention(heads, heads, heads, is_causal=True)
        x = x + seen.transpose(1, 2).reshape(ROWS, WIDTH)
    return x


class Complex(nn.Module):
    """Parameters, and the output, are complex."""

    def __init__(self) -> None:
        super().__init__()
        with seeded(0):
            each = [torch.randn(WIDTH, WIDTH, dtype=torch.complex64) / 8 for _ in range(4)]
        self.weights = nn.ParameterList(map(nn.Parameter, each))

    def forward(self, x: Tensor) -> Tensor:
        x = x + 0j
        for weight in self.weights:
            x = x @ weight
            x = x * x.abs().sigmoid()
        return x


def compiled_inside() -> nn.Module:
    def part() -> nn.Module:
        inner = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))
        return torch.compile(inner, backend="aot_eager")

    with seeded(0):
        return nn.Sequential(*(part() for _ in range(3)))


def copies() -> Any:
    return torch.autograd.graph.saved_tensors_hooks(torch.clone, lambda saved: saved)


SUBJECTS: dict[str, Callable[[], Subject]] = {
    "custom operators": lambda: Subject(lambda: applied(custom), rows),
    "vmap inside": lambda: Subject(lambda: applied(mapped), rows),
    "attention": lambda: Subject(lambda: applied(attending), rows),
    "complex": lambda: Subject(Complex, rows, loss=lambda output: output.abs().square().mean()),
    "compile inside": lambda: Subject(compiled_inside, rows),
    "save_on_cpu": lambda: Subject(
        lambda: applied(custom), rows, context=torch.autograd.graph.save_on_cpu
    ),
}


@pytest.mark.parametrize("name", SUBJECTS)
def test_same_bits_within_the_least_budget(name: str):
    check(SUBJECTS[name], "min")


@pytest.mark.slow
@pytest.mark.parametrize("name", SUBJECTS)
def test_same_bits_within_the_whole_budget(name: str):
    check(SUBJECTS[name], 1.0)


def test_ambient_hooks_are_called_for_what_a_step_saves():
    """Not for what stays inside a graph, which autograd does not save."""
    found = check(lambda: Subject(lambda: applied(custom), rows, context=copies), "min")
    assert found.peak_bytes < reference(SUBJECTS["custom operators"]).peak_bytes


def sparse(layers: nn.ModuleList, x: Tensor) -> Tensor:
    for layer in layers:
        x = layer(x).relu()
    return x.to_sparse()


@pytest.mark.parametrize("budget", [1.0, "min"])
def test_a_sparse_output_is_held_and_counted(budget: Any):
    subject = Subject(lambda: applied(sparse), rows, loss=lambda out: torch.sparse.sum(2 * out))
    expected, found = train(subject, by_torch), train(subject, within(budget))
    assert found.bits == expected.bits
    if found.planned:
        assert found.peak_bytes <= found.budget_bytes
    else:  # Dynamo may capture nothing of code that makes a sparse tensor
        assert any("nothing is planned" in warning for warning in found.learned)


def embedded() -> nn.Module:
    with seeded(0):
        return nn.Sequential(nn.Embedding(200, WIDTH, sparse=True), nn.Linear(WIDTH, WIDTH))


def words(number: int) -> tuple[Tensor]:
    with seeded(number):
        return (torch.randint(0, 200, (ROWS,)),)


def test_sparse_gradients_are_planned():
    make_sgd = functools.partial(torch.optim.SGD, lr=0.1)
    subject = Subject(embedded, words, optimizer=make_sgd)
    expected, found = train(subject, by_torch), train(subject, within(1.0))
    assert found.bits == expected.bits
    assert found.planned and not found.warned
    assert found.peak_bytes <= (found.budget_bytes or 0)


class Logged(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


@pytest.mark.filterwarnings("ignore::fxremat.BudgetWarning")
def test_modes_around_a_step_see_the_operators_that_run():
    (x,) = rows(0)
    model = applied(attending)
    flops_of_each, names_of_each = [], []
    for call in (model, fxremat.compile(model, x, "min")):
        model.zero_grad()
        flops, log = FlopCounterMode(display=False), Logged()
        with flops, log:
            call(x).square().sum().backward()
        flops_of_each.append(flops.get_flop_counts()["Global"])
        names_of_each.append(Counter(log.names))
    assert flops_of_each[0] == flops_of_each[1] and flops_of_each[0]
    assert not names_of_each[0] - names_of_each[1]


def test_a_mode_around_a_backward_sees_recomputations():
    (x,) = rows(0)
    call = fxremat.compile(applied(custom), x, "min")
    loss = call(x).square().sum()
    with Logged() as log:
        loss.backward()
    assert log.names.count("with_torch.swish_backward.default") == 4
    assert log.names.count("aten.mm.default") >= 2 * 4 - 1  # no gradient of the input
    assert "with_torch.swish.default" in log.names


@pytest.mark.parametrize("transform", [torch.func.grad, torch.func.jacrev])
def test_transforms_around_the_model_run_it_as_it_is_with_a_warning(transform: Any):
    (x,) = rows(0)
    model = applied(attending, layers=1)
    call = fxremat.compile(model, x, "min")

    def derivatives(module: nn.Module) -> Any:
        def summed(parameters: dict[str, Tensor]) -> Tensor:
            return torch.func.functional_call(module, parameters, (x,)).square().sum()

        return transform(summed)(dict(model.named_parameters()))

    with pytest.warns(fxremat.BudgetWarning, match="transform of torch.func"):
        found = derivatives(call)
    expected = derivatives(model)
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_vmap_around_the_model_runs_it_as_it_is_with_a_warning():
    (x,) = rows(0)
    model = applied(lambda layers, row: layers[1](layers[0](row).relu()))
    call = fxremat.compile(model, x, "min")
    with pytest.warns(fxremat.BudgetWarning, match="transform of torch.func"):
        found = torch.vmap(call)(x.view(4, -1, WIDTH))
    assert torch.equal(found, torch.vmap(model)(x.view(4, -1, WIDTH)))
