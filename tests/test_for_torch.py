"""What ``docs/for-torch.md`` tells: each wish of a thread as something that holds here."""

from __future__ import annotations

import itertools
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch._functorch import config

import fxremat
from benchmarks.for_torch import BACKEND, by_torch
from benchmarks.steps import make_step, planned, static_bytes
from tests.models.bits import assert_bitwise_equal
from tests.models.reference import reference_step, run_step
from tests.models.threads import TEXTS, summed_llama, text_and_caption

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "for-torch.md").read_text()
MIB = 2**20


def code_of(thread: str) -> str:
    """The Python of a thread's section."""
    (section,) = (text for text in re.split(r"^## ", PAGE, flags=re.M) if thread in text[:80])
    return "\n".join(re.findall(r"```python\n(.*?)```", section, flags=re.DOTALL))


def results(name: str) -> dict[str, Any]:
    file = ROOT / "benchmarks" / "results" / "for_torch" / f"{name}.json"
    return json.loads(file.read_text())["results"]


def mebibytes(nbytes: int) -> str:
    return f"{nbytes / MIB:.1f}"


def assert_on_page(*cells: str) -> None:
    assert f"| {' | '.join(cells)} |" in PAGE


# pytorch#194696: auto_checkpoint(model, memory_budget="8GB")


@pytest.mark.parametrize(
    ("written", "nbytes"),
    [pytest.param("8GB", 8 * 10**9, marks=pytest.mark.slow), ("16MB", 16 * 10**6)],
)
def test_a_budget_in_words_is_enough_and_holds(written: str, nbytes: int) -> None:
    """The model is no chain of layers, and its gradients are those of a step without a budget."""
    names: dict[str, Any] = {}
    exec(code_of("194696"), names)
    entry = text_and_caption(2)
    model = entry.build()
    planned_model = names["auto_checkpoint"](model, memory_budget=written)
    step = make_step(entry, planned_model, planned_model)
    step.run()
    assert planned_model.plan.budget_bytes == nbytes
    assert step.peak_bytes() <= nbytes
    recomputes = planned_model.plan.predicted_s > planned_model.plan.baseline_s
    assert recomputes == (written == "16MB")
    planned_model.zero_grad()
    found = run_step(entry, planned_model)
    assert_bitwise_equal(found.gradients, reference_step(entry).gradients)


@pytest.mark.slow
def test_where_no_checkpoints_are_enough_the_least_is_told() -> None:
    entry = text_and_caption(2, batch=2)
    sample = fxremat.Sample(*entry.sample(0))
    with pytest.raises(fxremat.BudgetError) as caught:
        fxremat.compile(entry.build(), sample, "4MB", loss="own")
    least_bytes = caught.value.least_budget_bytes
    assert least_bytes is not None
    model = fxremat.compile(entry.build(), sample, least_bytes, loss="own")
    assert make_step(entry, model, model).peak_bytes() <= least_bytes


# pytorch/rfcs#108: estimate_memory(model, sample, optimizer).fits()


def test_an_estimate_tells_whether_a_step_fits_and_what_it_is_made_of() -> None:
    names: dict[str, Any] = {"Net": lambda: nn.Sequential(*map(nn.Linear, [64] * 8, [64] * 8))}
    exec(code_of("rfcs#108"), names)
    found = names["found"]
    parts = {row.kind: row.nbytes for row in found.at_peak(found.kept)}
    parameter_bytes = 8 * (64 * 64 * 4 + 512)  # blocks of a GPU's allocator: no less than 512
    assert parts["parameters"] == parameter_bytes
    assert parts["optimizer state"] >= 2 * parameter_bytes
    assert sum(parts.values()) == found.peak_bytes
    assert found.fits


@pytest.mark.parametrize(("below", "fits"), [(0, True), (1, False)])
def test_it_fits_down_to_the_last_byte(below: int, fits: bool) -> None:
    def estimate(budget: Any) -> fxremat.Estimate:
        with torch.device("meta"):
            model = nn.Sequential(*(nn.Sequential(nn.Linear(32, 32), nn.GELU()) for _ in range(4)))
            x = torch.empty(256, 32)
        return fxremat.estimate(model, x, device="L4", budget=budget)

    least_bytes = estimate(None).least_budget_bytes
    assert estimate(least_bytes - below).fits is fits


def test_shapes_that_depend_on_data_inside_the_graph_are_estimated() -> None:
    class Picks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layer(x)[x > 0].sum()

    with torch.device("meta"):
        model, x = Picks(), torch.empty(4, 8)
    estimate = fxremat.estimate(model, x, device="A100")
    assert estimate.least_budget_bytes <= estimate.peak_bytes


# pytorch#197838: budgets that are monotone in the real peak


def test_more_budget_is_never_less_peak_and_no_peak_is_above_its_budget() -> None:
    entry = summed_llama(1)
    kept, model = planned(entry, 1.0)
    least_bytes, most_bytes = model.plan.least_budget_bytes, model.plan.baseline_peak_bytes
    steps = {most_bytes: kept}
    for i in range(3):
        budget = least_bytes + (most_bytes - least_bytes) * i // 3
        steps[budget], _ = planned(entry, budget)
    peaks = []
    for budget, step in sorted(steps.items()):
        step.run()
        peaks.append(step.peak_bytes())
        assert peaks[-1] <= budget
    assert all(less < more for less, more in itertools.pairwise(peaks))


@pytest.mark.slow
def test_shares_of_saved_bytes_are_not_monotone_in_the_peak() -> None:
    """Of torch: where this fails, the page is to be written anew."""
    entry, peaks = summed_llama(1), []
    for share in (0.0, 0.15, 0.2):
        step = by_torch(entry, BACKEND, config.patch(activation_memory_budget=share))
        peaks.append(step.peak_bytes())
    assert peaks[0] > peaks[1] < peaks[2]


# pytorch#193193: shared blocks that take one block's working set


def test_blocks_that_run_twice_take_no_more_than_with_checkpoints_in_eager() -> None:
    entry = text_and_caption(2, batch=2)
    theirs = by_torch(entry, "eager", wrap=True).peak_bytes()
    step, _ = planned(entry, theirs)
    step.run()
    assert step.peak_bytes() <= theirs


def test_more_blocks_add_what_goes_in_and_out_of_them_alone() -> None:
    """Beside parameters and gradients, a block more costs its inputs in both traversals."""
    batch = 2
    boundary_bytes = batch * TEXTS.context * TEXTS.width * 4
    beside = {}
    for blocks in (2, 4):
        step, model = planned(text_and_caption(blocks, batch=batch), 1.0)
        beside[blocks] = model.plan.least_budget_bytes - static_bytes(step.model)
    assert beside[4] - beside[2] <= 2 * 2 * boundary_bytes


@pytest.mark.slow
def test_checkpoints_around_shared_blocks_take_several_working_sets_in_inductor() -> None:
    """Of torch: where this fails, the page is to be written anew."""
    entry = text_and_caption(2)
    eager, inductor = (by_torch(entry, name, wrap=True) for name in ("eager", "inductor"))
    assert inductor.peak_bytes() > 1.5 * eager.peak_bytes()


# The page's figures are those that the script wrote.


def test_the_sweep_is_on_the_page() -> None:
    found = results("sweep")
    for row in found["rows"]:
        cells = (mebibytes(row[who]) for who in ("torch", "inductor", "fxremat"))
        hook = mebibytes(row["hook"]) if "hook" in row else ""
        torchs, inductor, ours = cells
        assert_on_page(f"{row['share']:.2f}", torchs, inductor, hook, ours)
        assert row["fxremat"] <= row["budget"]


def test_seconds_are_on_the_page() -> None:
    seconds = results("times")["seconds"]
    shares = dict.fromkeys(name.split()[1] for name in seconds)
    for share in shares:
        medians = (sorted(seconds[f"{who} {share}"]) for who in ("torch", "hook", "fxremat"))
        assert_on_page(f"{float(share):.2f}", *(f"{v[len(v) // 2]:.2f} s" for v in medians))


def test_peaks_of_shared_blocks_are_on_the_page() -> None:
    for row in results("shared")["rows"]:
        names = ("static", "eager", "inductor", "fxremat", "least")
        assert_on_page(str(row["blocks"]), *(mebibytes(row[name]) for name in names))
        assert row["fxremat"] <= row["eager"]


def test_draws_are_as_the_page_tells() -> None:
    rows = results("draws")["rows"]
    assert all(row["hook"] and not row["torch"] for row in rows)
