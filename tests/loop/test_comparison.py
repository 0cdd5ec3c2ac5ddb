"""Runs in parts are compared with their operations at once while a model trains."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

import fxremat
from fxremat.loop.comparison import MOST_MEASURED, Comparison

ROWS, WIDTH = 64, 32

MEASURED = 5
"""First steps, of which some are measured: these are not compared."""


class Model(nn.Module):
    """What is large is computed from one row of what is small."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 40 * WIDTH), nn.Linear(40 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.tanh(self.up(x)).neg()).sum()


class Kernel:
    """The kernel of ``neg``, which gives other bits of few rows once it is ``broken``."""

    broken = False

    def __call__(self, x: Tensor) -> Tensor:
        return x * (-1.0001 if self.broken and len(x) < ROWS else -1.0)

    def out(self, x: Tensor, *, out: Tensor) -> Tensor:
        return out.copy_(self(x))


@pytest.fixture
def kernel() -> Iterator[Kernel]:
    made = Kernel()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that there is another one
        library = torch.library.Library("aten", "IMPL")
        library.impl("neg", made, "CPU")
        library.impl("neg.out", made.out, "CPU")
    yield made
    library._destroy()


def trained(
    kernel: Kernel, *, verify_bits: int, breaks: bool
) -> tuple[fxremat.CompiledModule, list[str], list[bool]]:
    """The model after some steps whose budget has room for the forward's run at once, what it has
    warned of, and which steps had eager's bits.
    """
    torch._dynamo.reset()
    torch.manual_seed(0)
    model, x = Model(), torch.randn(ROWS, WIDTH)
    called = fxremat.compile(
        model, x, 1_484_000, loss="own", bits=fxremat.Bits(verify_every=verify_bits)
    )
    same = []
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for number in range(MEASURED + 3):
            model.zero_grad()
            kernel.broken = breaks and number >= MEASURED
            loss = called(x)
            kernel.broken = False
            loss.backward()
            found = [p.grad.clone() for p in model.parameters() if p.grad is not None]
            model.zero_grad()
            expected = model(x)
            expected.backward()
            pairs = zip(
                [loss, *found], [expected, *(p.grad for p in model.parameters())], strict=True
            )
            same.append(all(torch.equal(one, other) for one, other in pairs))
    of_bits = [str(w.message) for w in said if "other bits" in str(w.message)]
    return called, of_bits, same


@pytest.mark.parametrize("stored", [False, True])
def test_a_run_that_changes_bits_is_not_in_parts_any_more(
    kernel: Kernel, stored: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FXREMAT_CACHE", str(tmp_path) if stored else "0")
    before, said, same = trained(kernel, verify_bits=0, breaks=True)
    names = {run.name for run in before.plan.fused}
    assert same == [True] * MEASURED + [False] * 3 and not said
    called, (warning,), same = trained(kernel, verify_bits=1, breaks=True)
    assert "[FXR114: " in warning
    assert all(same[: MEASURED + 1])  # steps of the next plan are measured first
    (name,) = (name for name in names if name in warning)
    assert name not in {run.name for run in called.plan.fused}


def test_runs_that_keep_their_bits_stay(kernel: Kernel) -> None:
    called, said, same = trained(kernel, verify_bits=2, breaks=False)
    assert called.plan.fused and all(same) and not said


def test_steps_that_are_compared_keep_to_the_budget_and_to_their_plan() -> None:
    torch._dynamo.reset()
    model, x = Model(), torch.randn(ROWS, WIDTH)
    called = fxremat.compile(
        model, x, 1_484_000, loss="own", bits=fxremat.Bits(verify_every=1), strict=True
    )
    plan = called.plan

    def step() -> None:
        model.zero_grad()
        called(x).backward()

    taken = [fxremat.measure_step(model, step).peak_bytes for _ in range(5)]
    model.zero_grad()
    assert plan.counted_bytes < max(taken) <= plan.budget_bytes  # something was compared
    assert called.plan.counted_bytes == plan.counted_bytes


def test_steps_that_are_always_measured_are_warned_of_once() -> None:
    comparison = Comparison(2)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        due = [comparison.is_due(number, measured=True) for number in range(3 * MOST_MEASURED)]
    assert not any(due)
    (warning,) = said
    assert "verify_every=2 has compared nothing in 32 steps" in str(warning.message)
    assert [comparison.is_due(number, measured=False) for number in (1, 2)] == [False, True]


class Run:
    """A run in parts that notes what it is asked for."""

    report: object = None

    def compare_next(self, report: object) -> None:
        self.report = report


def test_a_step_that_ends_before_its_comparison_leaves_it_to_no_later_one() -> None:
    comparison, run = Comparison(1), Run()
    comparison.begin(cast(Any, [run]), 1, 0, takes_bytes=lambda _: 0, refuse=lambda _: None)
    assert run.report is not None
    comparison.cancel()
    assert run.report is None


def test_a_budget_without_room_for_a_comparison_is_warned_of_once() -> None:
    torch._dynamo.reset()
    model, x = Model(), torch.randn(ROWS, WIDTH)
    called = fxremat.compile(model, x, "min", loss="own", bits=fxremat.Bits(verify_every=1))
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for _ in range(3):
            called(x).backward()
            model.zero_grad()
    assert sum("verify_every=1" in str(w.message) for w in said) == 1


@pytest.mark.parametrize("value", [-1, True, 0.5, "1"])
def test_what_is_no_number_of_steps_is_refused(value: object) -> None:
    with pytest.raises(fxremat.ArgumentError, match="verify_every"):
        fxremat.compile(
            Model(), torch.randn(ROWS, WIDTH), "min", bits=fxremat.Bits(verify_every=value)
        )
