"""Inductor's kernels, end to end: the promise is the same, held against everything kept."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import fxremat
from tests.efforts import WHOLE
from tests.models import ZOO
from tests.models.bits import assert_bitwise_equal
from tests.models.reference import StepResult, run_step
from tests.trials import Tried, attempt, compiled

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

QUICK = ("inplace",)
"""Models with few units: compiling takes seconds."""

FUSED: dict[str, Any] = {"executor": "inductor"}


def everything_kept(name: str) -> StepResult:
    """One step with Inductor's kernels that recomputes nothing."""
    entry = ZOO[name]
    model, call = compiled(entry, 1.0, input_gradients=True, **FUSED)
    result = run_step(entry, model, call, input_gradients=True)
    torch._dynamo.reset()
    return result


def attempt_all(name: str) -> list[Tried]:
    """At the least budget, in between, and with everything kept."""
    expected = everything_kept(name)
    least = attempt(ZOO[name], "min", expected, **FUSED)
    way = least.full_bytes - least.budget_bytes
    budgets = [least.budget_bytes + int(share * way) for share in (0.4, 1.0)]
    return [least, *(attempt(ZOO[name], budget, expected, **FUSED) for budget in budgets)]


@pytest.mark.parametrize("name", QUICK)
def test_same_bits_as_everything_kept_within_the_budget(name: str):
    tried = attempt_all(name)
    assert tried[0].predicted_bytes < tried[-1].predicted_bytes == tried[-1].full_bytes


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in ZOO if name not in QUICK])
def test_same_bits_as_everything_kept_of_every_model(name: str):
    tried = attempt_all(name)
    assert tried[0].predicted_bytes <= tried[-1].predicted_bytes == tried[-1].full_bytes


class Blocks(nn.Module):
    """Blocks with dropout and a norm, and a loss."""

    def __init__(self, *, blocks: int = 3, width: int = 32, dropout: float = 0.1) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.LayerNorm(width),
                nn.Linear(width, 4 * width),
                nn.GELU(),
                nn.Dropout(dropout),
                nn.Linear(4 * width, width),
            )
            for _ in range(blocks)
        )

    def forward(self, x: Tensor) -> Tensor:
        """Shape ``(rows, width)``; a scalar."""
        for block in self.blocks:
            x = x + block(x)
        return x.square().mean()


def model_and_call(*, seed: int = 0, rows: int = 64, **options: Any) -> tuple[Blocks, Tensor]:
    """A model drawn from ``seed``, and a batch."""
    torch.manual_seed(seed)
    return Blocks(**options), torch.randn(rows, 32)


def gradients_of(model: nn.Module, call: Any, x: Tensor, *, seed: int = 1) -> list[Tensor]:
    """Of one step whose draws begin with ``seed``."""
    model.zero_grad()
    torch.manual_seed(seed)
    call(x).backward()
    return [p.grad for p in model.parameters() if p.grad is not None]


def test_dropout_draws_what_eager_draws():
    model, x = model_and_call(dropout=0.5)
    call = fxremat.compile(model, x, "min", executor="inductor")
    ours = [g.clone() for g in gradients_of(model, call, x, seed=3)]
    for a, b in zip(ours, gradients_of(model, model, x, seed=3), strict=True):
        torch.testing.assert_close(a, b)  # another mask would be far off


class Spotted(nn.Module):
    """Masks of images, which convolutions have with channels last."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution, self.norm = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)

    def forward(self, x: Tensor) -> Tensor:
        return functional.dropout(self.norm(self.convolution(x)), 0.5).square().mean()


@pytest.mark.slow
def test_masks_and_statistics_of_images_of_any_batch_are_those_of_eager():
    model, x = Spotted(), torch.randn(8, 3, 16, 16)
    truth = copy.deepcopy(model)
    call = fxremat.compile(model, x, "min", executor="inductor")
    for batch in (8, 6, 3, 5):
        ours = [g.clone() for g in gradients_of(model, call, x[:batch])]
        for a, b in zip(ours, gradients_of(truth, truth, x[:batch]), strict=True):
            torch.testing.assert_close(a, b)
        for a, b in zip(model.buffers(), truth.buffers(), strict=True):
            torch.testing.assert_close(a, b)


@pytest.mark.slow
def test_no_further_from_eager_in_float64_than_inductor():
    model, x = model_and_call(dropout=0.0)
    exact = gradients_of(model.double(), model, x.double())
    exact = [g.clone() for g in exact]
    model.float()

    def off(call: Any) -> float:
        found = gradients_of(model, call, x)
        return max(float((a - b).abs().max()) for a, b in zip(found, exact, strict=True))

    theirs = off(torch.compile(model, fullgraph=True))
    ours = off(fxremat.compile(model, x, "min", executor="inductor"))
    assert ours <= 2 * theirs + 1e-9


def test_units_are_as_many_for_any_number_of_layers():
    def units(blocks: int) -> int:
        model, x = model_and_call(blocks=blocks, dropout=0.0)
        return len(fxremat.plan(model, x, 1.0, executor="inductor").fused)

    assert units(6) == units(4)


def test_a_plan_tells_what_was_fused(capsys: pytest.CaptureFixture[str]):
    model, x = model_and_call()
    plan = fxremat.plan(model, x, "min", executor="inductor")
    assert all(len(unit.operations) > 1 and unit.calls for unit in plan.fused)
    plan.explain()
    printed = capsys.readouterr().out
    assert all(unit.name in printed for unit in plan.fused)
    assert fxremat.plan(model, x, "min", effort=WHOLE).fused == ()


def test_a_kept_plan_is_followed_with_the_same_kernels(tmp_path: Any):
    model, x = model_and_call()
    call = fxremat.compile(model, x, "min", executor="inductor")
    call.plan.save(tmp_path / "plan.json")
    expected = [g.clone() for g in gradients_of(model, call, x)]
    model.zero_grad()
    torch._dynamo.reset()
    kept = fxremat.compile(model, x, plan=tmp_path / "plan.json", executor="inductor")
    assert_bitwise_equal(gradients_of(model, kept, x), expected)
    model.zero_grad()
    torch._dynamo.reset()
    with pytest.raises(fxremat.PlanError, match="executor"):
        fxremat.compile(model, x, plan=tmp_path / "plan.json")


def test_other_sizes_keep_the_promise():
    model, x = model_and_call(blocks=2)
    kept = fxremat.compile(model, x, 1.0, executor="inductor")
    expected = {}
    for rows in (64, 48):
        found = gradients_of(model, kept, x[:rows])
        expected[rows] = [g.clone() for g in found]
    torch._dynamo.reset()
    least = fxremat.compile(model, x, "min", executor="inductor")
    for rows, gradients in expected.items():
        assert_bitwise_equal(gradients_of(model, least, x[:rows]), gradients)

        def step(batch: Tensor = x[:rows]) -> None:
            model.zero_grad()
            least(batch).backward()

        model.zero_grad()
        taken = fxremat.measure_step(model, step).peak_bytes
        assert taken <= least.plan.budget_bytes


def test_through_the_backend():
    model, x = model_and_call()
    expected = [
        g.clone()
        for g in gradients_of(model, fxremat.compile(model, x, 1.0, executor="inductor"), x)
    ]
    torch._dynamo.reset()
    options = {"budget": "min", "executor": "inductor"}
    call = torch.compile(model, backend="fxremat", fullgraph=True, options=options)
    assert_bitwise_equal(gradients_of(model, call, x), expected)


def test_no_compiler_is_an_error_that_says_so():
    from torch._inductor import config, cpp_builder

    model, x = model_and_call()
    cpp_builder.cpp_compiler_search.cache_clear()
    with config.patch({"cpp.cxx": ("/no/compiler",)}), pytest.raises(fxremat.ArgumentError) as e:
        fxremat.compile(model, x, 1.0, executor="inductor")
    cpp_builder.cpp_compiler_search.cache_clear()
    assert e.value.argument == "executor"


@pytest.mark.parametrize("executor", ["triton", None, True])
def test_other_executors_are_refused(executor: object):
    model, x = model_and_call()
    with pytest.raises(fxremat.ArgumentError) as raised:
        fxremat.compile(model, x, 1.0, executor=executor)  # type: ignore[arg-type]
    assert raised.value.argument == "executor"


def test_what_cannot_be_compiled_runs_as_it_is(monkeypatch: pytest.MonkeyPatch):
    model, x = model_and_call(dropout=0.0)

    def fails(*_args: object, **_kwargs: object) -> None:
        raise RuntimeError("this machine makes no kernels")

    monkeypatch.setattr("torch._inductor.compile_fx.compile_fx_inner", fails)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        call = fxremat.compile(model, x, "min", executor="inductor")
    said = [str(w.message) for w in told if "could not be compiled" in str(w.message)]
    assert len(said) == len(set(said)) == len(call.plan.fused)
    ours = gradients_of(model, call, x)
    for a, b in zip(ours, [g.clone() for g in gradients_of(model, model, x)], strict=True):
        torch.testing.assert_close(a, b)
