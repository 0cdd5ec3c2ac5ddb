"""The backend of torch.compile: its options, its errors, and the plan of what it compiled."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import fxremat

X = torch.randn(8, 32)

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


def layers(width: int = 32) -> nn.Sequential:
    torch.manual_seed(0)
    parts = []
    for _ in range(3):
        parts += [nn.Linear(width, width), nn.BatchNorm1d(width), nn.GELU(), nn.Dropout(0.1)]
    return nn.Sequential(*parts)


def test_through_torch_compile():
    model, reference = layers(), layers()
    compiled = torch.compile(model, backend="fxremat", options={"budget": "1 GiB"})
    plain = torch.compile(reference, backend="aot_eager")
    for each in (compiled, plain):
        torch.manual_seed(1)
        each(X).square().sum().backward()
    pairs = zip(model.parameters(), reference.parameters(), strict=True)
    assert all(torch.equal(a.grad, b.grad) for a, b in pairs)


@pytest.mark.parametrize(
    ("options", "error", "word"),
    [
        ({"budget": 10}, fxremat.BudgetError, "least feasible"),
        (None, fxremat.BudgetError, "no budget"),
        ({"budget": 1.0, "x": 1}, fxremat.ArgumentError, "unknown"),
        ({"budget": 1.0, "optimizer": torch.optim.Adam}, fxremat.ArgumentError, "class"),
        ({"budget": 1.0, "loss": lambda out: out.loss}, fxremat.ArgumentError, r"\(8, 32\)"),
        ({"budget": 1.0, "loss": lambda out: out}, fxremat.ArgumentError, "scalar"),
    ],
)
def test_wrong_options_are_errors_of_the_package(
    options: Any, error: type[Exception], word: str
) -> None:
    with pytest.raises(error, match=word) as caught:
        torch.compile(layers(), backend="fxremat", options=options)(X)
    assert type(caught.value).__name__ == error.__name__


def test_an_optimizer_and_a_loss_are_counted() -> None:
    model = layers()
    optimizer = torch.optim.Adam(model.parameters())

    def costly(outputs: Tensor) -> Tensor:
        return (outputs.unsqueeze(0) * torch.ones(500, 1, 1)).square().sum()

    options = {"budget": 1.0, "optimizer": optimizer, "loss": costly}
    compiled = torch.compile(model, backend="fxremat", options=options)
    costly(compiled(X)).backward()
    other = layers()
    optimizer = torch.optim.Adam(other.parameters())
    alike = fxremat.compile(other, X, 1.0, optimizer=optimizer, loss=costly)
    assert fxremat.plan_of(compiled).predicted_peak_bytes == alike.plan.predicted_peak_bytes


class Method(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = layers()

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)


def by_function(options: Any) -> Callable[..., Any]:
    model = layers()

    def call(x: Tensor) -> Tensor:
        return 2 * model(x)

    return torch.compile(call, backend="fxremat", options=options)


def by_method(options: Any) -> nn.Module:
    model = Method()
    model.compile(backend="fxremat", options=options)
    return model


def by_module(options: Any) -> Callable[..., Any]:
    return torch.compile(layers(), backend="fxremat", options=options)


@pytest.mark.parametrize("compiled_by", [by_module, by_function, by_method])
def test_the_plan_of_what_was_compiled(compiled_by: Callable[[Any], Callable[..., Any]]) -> None:
    compiled = compiled_by({"budget": "1 GiB"})
    with pytest.raises(fxremat.PlanError):
        fxremat.plan_of(compiled)
    compiled(X).sum().backward()
    assert fxremat.plan_of(compiled).budget_bytes == 1 << 30


def test_the_plan_of_a_compiled_module_is_its_own() -> None:
    compiled = fxremat.compile(layers(), X, 1.0)
    assert fxremat.plan_of(compiled) is compiled.plan


@pytest.mark.parametrize("other", [layers(), torch.compile(layers()), torch.compile(len), 3])
def test_what_was_compiled_otherwise_has_no_plan(other: object) -> None:
    with pytest.raises(fxremat.ArgumentError, match="was not compiled"):
        fxremat.plan_of(other)


class Logged(TorchDispatchMode):
    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("at", [0, 1])
@pytest.mark.parametrize("compiled_by", [by_module, by_function, by_method])
def test_steps_after_one_under_a_mode_are_planned(
    compiled_by: Callable[[Any], Callable[..., Any]], at: int
) -> None:
    """Torch by itself would never compile that code again, nor say so."""
    options = {"budget": "1 GiB"}
    compiled = compiled_by(options)
    for i in range(at):
        compiled(X[: 4 + i]).sum().backward()
    with pytest.warns(fxremat.BudgetWarning, match="no plan"), Logged():
        compiled(X)
    compiled(X).sum().backward()
    assert fxremat.plan_of(compiled).budget_bytes == 1 << 30


def test_what_torch_compile_may_not_capture_again_is_refused():
    """Torch would run it without a plan, and tell its log alone."""
    model = layers()
    rows = [torch.randn(n, 32) for n in range(2, 7)]
    with torch._dynamo.config.patch(recompile_limit=2):
        compiled = torch.compile(
            model, backend="fxremat", options={"budget": "1 GiB"}, dynamic=False
        )
        for x in rows[:2]:
            compiled(x).sum().backward()
        for x in rows[2:]:
            with pytest.raises(fxremat.CaptureError, match=r"recompile_limit is 2"):
                compiled(x)
        compiled(rows[0]).sum().backward()


def test_other_sizes_through_torch_compile_are_one_more_capture():
    """Also the smaller batch at the end of an epoch."""
    model, reference = layers(), layers()
    compiled = torch.compile(model, backend="fxremat", fullgraph=True, options={"budget": "1 GiB"})
    plain = torch.compile(reference, backend="aot_eager")
    with torch._dynamo.config.patch(recompile_limit=4):  # two for each: they share code
        for rows in (8, 8, 5, 3, 8, 6):
            x = torch.randn(rows, 32)
            for each in (compiled, plain):
                torch.manual_seed(1)
                each(x).square().sum().backward()
    pairs = zip(model.parameters(), reference.parameters(), strict=True)
    assert all(torch.equal(a.grad, b.grad) for a, b in pairs)
