"""Inductor's Triton kernels within a budget, over the stand-in: bytes, cold caches, other callers.

The kernels compute nothing here; tests/on_cuda/test_cuda_promise.py compares their bits, by
Triton's interpreter.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import fxremat
from fxremat.passes.fuse.unit import Unit, compile_units
from tests.cuda import CUDA, forget
from tests.efforts import QUICK, ROUNDED_PARTS
from tests.on_cuda.stood_in import needs_stand_in
from tests.passes.test_unit import aten, unit_of

pytest.importorskip("triton")

pytestmark = needs_stand_in

Executor = str | None
FUSED: dict[str, Any] = {"executor": "inductor", "loss": torch.sum}
ROWS, WIDTH = 256, 128


class Block(nn.Module):
    """A norm, an MLP, and a dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = self.down(functional.gelu(self.up(self.norm(x))))
        return x + functional.dropout(y, 0.1)


class Broken(nn.Module):
    """Captured as two graphs."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = blocks(2), blocks(2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        torch._dynamo.graph_break()
        return self.second(x)


class Amp(nn.Module):
    """Blocks under autocast."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = blocks(3)

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cuda", torch.bfloat16):
            return self.blocks(x)


def blocks(count: int) -> nn.Module:
    return nn.Sequential(*(Block() for _ in range(count)))


def rows(count: int = ROWS) -> Tensor:
    return torch.randn(count, WIDTH, device=CUDA)


@pytest.fixture(autouse=True)
def nothing_else_is_there() -> Iterator[None]:
    forget(CUDA)
    yield
    forget(CUDA)


def peak_of(model: nn.Module, call: Callable[..., Any], x: Tensor) -> int:
    """Of a step, gradients cleared."""
    model.zero_grad()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    call(x).sum().backward()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated()


def check(model: nn.Module, call: Callable[..., Any], sizes: tuple[int, ...], steps: int) -> None:
    """The last of some steps of each size keeps to the budget, without a warning.

    But a step may warn that it measures, where its size is new or several graphs are planned as
    they come.
    """
    for count in sizes:
        x = rows(count)
        for number in range(steps):
            with warnings.catch_warnings():
                if isinstance(model, Broken) or (number == 0 and count != sizes[0]):
                    warnings.filterwarnings("ignore", "(?s).*was planned as it began")
                peak = peak_of(model, call, x)
        plan = fxremat.plan_of(call)
        assert peak <= plan.budget_bytes, f"{count} rows: {peak - plan.budget_bytes} over"
        del x


@pytest.mark.parametrize(
    ("build", "sizes", "steps", "options"),
    [
        pytest.param(lambda: blocks(4), (ROWS,), 3, {}, id="one graph"),
        pytest.param(lambda: blocks(4), (ROWS,), 3, {"offload": "auto"}, id="offload"),
        pytest.param(lambda: blocks(3), (ROWS, 96, 300), 3, {"dynamic": True}, id="other sizes"),
        pytest.param(Broken, (ROWS,), 6, {}, id="two graphs"),
        pytest.param(Broken, (ROWS,), 6, {"executor": "eager"}, id="two graphs, eager"),
        pytest.param(Amp, (ROWS,), 3, {}, id="autocast"),
        pytest.param(lambda: blocks(4), (ROWS,), 3, ROUNDED_PARTS, id="in parts"),
    ],
)
def test_steps_at_the_least_budget_keep_to_it(
    build: Callable[[], nn.Module], sizes: tuple[int, ...], steps: int, options: dict[str, Any]
):
    model = build().to(CUDA)
    call = fxremat.compile(model, rows(), "min", **{**FUSED, **options})
    with warnings.catch_warnings():
        warnings.simplefilter("error", fxremat.BudgetWarning)
        check(model, call, sizes, steps)


@pytest.mark.parametrize(
    ("executor", "fuses"), [(None, True), ("inductor", True), ("eager", False)]
)
def test_the_backend_uses_inductors_kernels_unless_it_is_asked_not_to(
    executor: Executor, fuses: bool
):
    model = blocks(3).to(CUDA)
    options: dict[str, Any] = {"budget": "min", "loss": torch.sum}
    if executor is not None:
        options["executor"] = executor
    call = torch.compile(model, backend="fxremat", options=options)
    check(model, call, (ROWS,), 3)
    plan = fxremat.plan_of(call)
    assert any(fused.parts == 1 for fused in plan.fused) == fuses


def test_compile_keeps_eagers_bits_unless_it_is_asked_not_to():
    call = fxremat.compile(blocks(2).to(CUDA), rows(), 1.0, loss=torch.sum)
    assert not call.plan.fused


class Pooled(nn.Module):
    """A step of which the inputs are most bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(functional.layer_norm(x, (WIDTH,)) * self.scale))


def reported_bytes(warned: list[warnings.WarningMessage]) -> list[int]:
    """What warnings say that measuring took."""
    reported = (re.search(r"took at least (\d+) bytes", str(own.message)) for own in warned)
    return [int(own[1]) for own in reported if own]


@pytest.mark.parametrize("executor", ["eager", "inductor"])
def test_a_warning_reports_what_measuring_takes_to_the_byte(executor: Executor):
    """At the backend's first call, and at the first of another size."""
    model = Pooled().to(CUDA)
    options = {"budget": "min", "loss": torch.sum, "executor": executor}
    call = torch.compile(model, backend="fxremat", options=options, dynamic=True)
    for count in (4096, 6144):
        x = rows(count)
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always", fxremat.BudgetWarning)
            peak = peak_of(model, call, x)
        budget_bytes = fxremat.plan_of(call).budget_bytes
        reported = reported_bytes(warned)
        assert reported == [peak] if peak > budget_bytes else not reported
        assert reported or count == 4096
        with warnings.catch_warnings():
            warnings.simplefilter("error", fxremat.BudgetWarning)
            assert peak_of(model, call, x) <= budget_bytes
        del x


@pytest.mark.parametrize("with_gradient", [False, True])
@pytest.mark.parametrize("executor", ["eager", "inductor"])
def test_a_buffer_of_which_an_input_is_a_part_is_counted_at_any_size(
    executor: Executor, with_gradient: bool
):
    def frames(count: int) -> Tensor:
        buffer = torch.randn(count, 65, WIDTH, device=CUDA)
        return buffer[:, :-1].requires_grad_(with_gradient)

    model = Pooled().to(CUDA)
    x = frames(64)
    call = fxremat.compile(model, x, "min", executor=executor, loss=torch.sum, dynamic=True)
    for count in (64, 96):
        x = frames(count)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "(?s).*was planned as it began")
            peak_of(model, call, x)
        x.grad = None
        assert peak_of(model, call, x) <= call.plan.budget_bytes, count


def test_a_step_that_keeps_to_what_it_was_corrected_to_warns_no_more():
    """Inductor copies an input that lies at no multiple of 16 bytes."""
    buffer = torch.randn(4096 * WIDTH + 4, device=CUDA)
    aligned, shifted = (buffer[i : i + 4096 * WIDTH].view(4096, WIDTH) for i in (0, 1))
    model = Pooled().to(CUDA)
    call = fxremat.compile(model, aligned, "min", **FUSED)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always", fxremat.BudgetWarning)
        for _ in range(3):
            peak_of(model, call, shifted)
    assert 1 <= len(warned) <= 2
    with warnings.catch_warnings():
        warnings.simplefilter("error", fxremat.BudgetWarning)
        for _ in range(4):
            assert peak_of(model, call, shifted) <= call.plan.budget_bytes


def seen_in_a_process(kernels: Path, costs: Path | None = None) -> list[dict[str, Any]]:
    """What a process sees of steps of two sizes.

    Args:
        kernels: the folder of Inductor's cache.
        costs: the folder of measured costs and plans, if any.
    """
    caches = {"TORCHINDUCTOR_CACHE_DIR": str(kernels), "FXREMAT_CACHE": str(costs or 0)}
    made = subprocess.run(
        [sys.executable, "-m", "tests.on_cuda.test_cuda_fused"],
        env={**os.environ, **caches},
        capture_output=True,
        text=True,
        check=True,
    )
    return json.loads(made.stdout.splitlines()[-1])


def test_no_cache_changes_what_a_step_takes(tmp_path: Path):
    """Neither Inductor's kernels nor measured costs, whichever of them an earlier process left.

    The first step of another size measures, with a buffer by which kernels are compared: a warning
    counts it. Later ones do not.
    """
    caches = {
        "neither": (tmp_path / "a", tmp_path / "costs"),
        "kernels": (tmp_path / "a", None),
        "costs": (tmp_path / "b", tmp_path / "costs"),
    }
    seen = {name: seen_in_a_process(*own) for name, own in caches.items()}
    usual = [[size["usual"] for size in sizes] for sizes in seen.values()]
    assert all(own == usual[0] for own in usual)
    for sizes in seen.values():
        for size in sizes:
            budget_bytes = size["usual"]["budget_bytes"]
            assert size["usual"]["peak_bytes"] <= budget_bytes
            assert size["first_bytes"] <= max(budget_bytes, 1.2 * size["reported_bytes"])
    measures = [[bool(size["reported_bytes"]) for size in sizes] for sizes in seen.values()]
    assert measures == [[False, True], [False, False], [False, True]]


def normalized(sizes: tuple[int, ...]) -> Unit:
    """A unit with a reduction, whose inputs may lie otherwise than traced."""
    x = torch.zeros(*sizes)
    unit = unit_of(
        {"x": x},
        {
            "e": (aten.exp.default, ("x",)),
            "s": (aten.sum.dim_IntList, ("e", [1], True)),
            "y": (aten.div.Tensor, ("e", "s")),
        },
        ["y"],
        sure=False,
    )
    return Unit(f"{unit}_on_cuda", unit.graph, [False], {}, CUDA)


@pytest.mark.parametrize("transposed", [False, True])
def test_a_unit_that_runs_allocates_its_results_alone(transposed: bool):
    unit = normalized((256, 256))
    compile_units([(unit, ())])
    x = rows(256).new_zeros(256, 256)
    x = x.t() if transposed else x
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    y = unit(x)
    more = torch.cuda.max_memory_allocated() - before
    # Where it lies otherwise, what the kernel returns may be copied to lie as traced.
    assert more <= (2 if transposed else 1) * y.untyped_storage().nbytes() + 1024


@pytest.mark.slow
def test_a_trainer_keeps_to_the_budget(tmp_path: Path):
    transformers = pytest.importorskip("transformers")
    from fxremat.integrations.transformers import FxrematCallback

    config = transformers.GPT2Config(
        vocab_size=64, n_positions=32, n_embd=64, n_layer=3, n_head=2, use_cache=False
    )
    model = transformers.GPT2LMHeadModel(config)
    data = [{"input_ids": [i % 64] * 32, "labels": [i % 64] * 32} for i in range(32)]
    arguments = transformers.TrainingArguments(
        output_dir=str(tmp_path), per_device_train_batch_size=4, max_steps=6, report_to=[],
        disable_tqdm=True, logging_steps=1, save_strategy="no",
    )  # fmt: skip
    callback = FxrematCallback("min", executor="inductor")
    trainer = transformers.Trainer(
        model=model, args=arguments, train_dataset=data, callbacks=[callback]
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error", fxremat.BudgetWarning)
        # The callback has no sample: kernels are made and compared inside the first training call.
        warnings.filterwarnings("ignore", "(?s).*was planned as it began")
        trainer.train()
    assert callback.model is not None and callback.model.plan.fused
    logged = [row for row in trainer.state.log_history if "measured_peak_bytes" in row]
    assert logged
    for row in logged[2:]:  # the first ones observe the loop
        assert row["measured_peak_bytes"] <= row["budget_bytes"]


def main() -> None:
    torch.manual_seed(0)
    model = blocks(2).to(CUDA)
    effort = fxremat.Effort(**QUICK)
    call = fxremat.compile(model, rows(), "min", dynamic=True, effort=effort, **FUSED)
    seen = []
    for count in (ROWS, 96):
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always", fxremat.BudgetWarning)
            first, *later = (peak_of(model, call, rows(count)) for _ in range(3))
        plan = call.plan
        usual = {
            "budget_bytes": plan.budget_bytes,
            "least_bytes": plan.least_budget_bytes,
            "full_bytes": plan.baseline_peak_bytes,
            "peak_bytes": max(later),
        }
        reported = sum(reported_bytes(warned))
        seen.append({"usual": usual, "first_bytes": first, "reported_bytes": reported})
    print(json.dumps(seen))


if __name__ == "__main__":
    main()
