"""One plan of a step that several captured graphs make."""

from __future__ import annotations

import functools
import gc
import itertools
import json
import linecache
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fxremat
from fxremat.errors import PlanError
from fxremat.report.summary import group_regions
from fxremat.report.view import view_of
from tests.regions.test_regions import (
    BREAKS,
    BROKEN,
    LAYERS,
    broken,
    gradients,
    looping_with_breaks,
    made,
    peak_of,
    taught,
)
from tests.report.test_page import data_in

REGIONS = [f"layers.{place}" for place in range(LAYERS)]

WAYS = (
    "regions",
    "breaks",
    *(pytest.param(way, marks=pytest.mark.slow) for way in ("loop", "host")),
)


@pytest.fixture(autouse=True, scope="module")
def _nothing_is_left() -> Iterator[None]:
    yield
    torch._dynamo.reset()
    linecache.cache.pop(BROKEN, None)
    gc.collect()


def compiled_as(way: str, budget: Any = 0.6) -> tuple[Any, fxremat.CompiledModule, torch.Tensor]:
    torch._dynamo.reset()
    gc.collect()  # what others have left is not to go while a step is watched
    model, x = made(broken(BREAKS[4]) if way in ("breaks", "host") else "")
    options: dict[str, Any] = {"regions": REGIONS} if way == "regions" else {}
    if way == "host":
        options["offload"] = "only"
        # What a link does is measured once, and takes memory: in no step that is watched.
        fxremat.plan(nn.Linear(8, 8), torch.randn(4, 8), 1.0, offload="only")
    if way == "loop":
        model.body = looping_with_breaks
    return model, fxremat.compile(model, x, budget, **options), x


@functools.cache
def planned_as(way: str) -> tuple[fxremat.StepPlan, int]:
    """The plan of a step, and the peak of one; made once a process."""
    model, call, x = compiled_as(way)
    taught(model, call, x)
    peak_bytes = peak_of(model, call, x)
    assert isinstance(call.plan, fxremat.StepPlan)
    return call.plan, peak_bytes


@pytest.mark.parametrize("way", WAYS)
def test_what_it_predicts_is_what_a_step_takes(way: str) -> None:
    plan, peak_bytes = planned_as(way)
    assert peak_bytes <= plan.predicted_peak_bytes <= plan.budget_bytes
    assert plan.predicted_peak_bytes < 1.01 * peak_bytes
    assert plan.measured_peak_bytes is not None
    assert plan.measured_peak_bytes <= plan.predicted_peak_bytes
    assert plan.least_budget_bytes < plan.budget_bytes < plan.baseline_peak_bytes
    assert plan.budget == 0.6
    assert abs(plan.budget_bytes / plan.baseline_peak_bytes - 0.6) < 0.01
    assert plan.counted_bytes == plan.predicted_peak_bytes


@pytest.mark.parametrize("way", WAYS)
def test_figures_of_regions_add_up(way: str) -> None:
    plan, _ = planned_as(way)
    assert len(plan.regions) == (6 if way in ("breaks", "host") else LAYERS + 1)
    assert plan.host_bytes == sum(row.plan.host_bytes for row in plan.regions)
    assert (plan.host_bytes > 0) == (way == "host")
    assert plan.between_s is not None and plan.between_s > 0
    seconds = sum(row.plan.predicted_s for row in plan.regions)
    assert plan.predicted_s == pytest.approx(seconds + plan.between_s)
    peaks = [(row.forward_peak_bytes, row.backward_peak_bytes) for row in plan.regions]
    assert max(map(max, peaks)) == plan.predicted_peak_bytes
    held_bytes = plan.resident_bytes
    for row in plan.regions:  # each runs beside all that was held before it
        assert held_bytes < row.forward_peak_bytes
        held_bytes += row.held_bytes
        assert held_bytes + row.between_bytes <= plan.predicted_peak_bytes
    assert plan.regions[-1].between_s is None
    assert plan.regions[-1].module == "head"
    assert plan.regions[0].module.startswith("layers.0")


@pytest.mark.parametrize("way", WAYS)
def test_the_step_on_one_axis_holds_what_each_plan_says(way: str) -> None:
    plan, _ = planned_as(way)
    view = view_of(plan)
    held, times_s = view.memory.held_bytes(), view.times_s
    assert len(held) == len(times_s) == view.memory.count
    assert all(a <= b for a, b in itertools.pairwise(times_s))
    assert max(held) == plan.predicted_peak_bytes
    spans = view.spans_s
    expected: list[int] = []
    waiting_bytes = plan.resident_bytes
    for row in plan.regions:
        expected += row.plan.memory.held_bytes()[: row.plan.memory.loss_point]
        waiting_bytes += row.held_bytes
        expected.append(waiting_bytes + row.between_bytes)
    assert view.memory.loss_point == len(expected) - 1
    for row in reversed(plan.regions):
        expected += row.plan.memory.held_bytes()[row.plan.memory.loss_point + 1 :]
        waiting_bytes -= row.held_bytes
        expected.append(waiting_bytes + row.between_back_bytes)
    assert list(held) == expected
    assert all(begin <= end <= back <= done for begin, end, back, done in spans)
    ends = [(a[1], b[0]) for a, b in itertools.pairwise(spans)]
    ends += [(b[3], a[2]) for a, b in itertools.pairwise(spans)]
    assert sum(b - a for a, b in ends) == pytest.approx(plan.between_s)
    assert view.timeline.makespan_s == pytest.approx(
        sum(row.plan.timeline.makespan_s for row in plan.regions) + (plan.between_s or 0.0), rel=0.1
    )


@pytest.mark.parametrize("way", WAYS)
def test_the_table_has_each_region(way: str, capsys: pytest.CaptureFixture[str]) -> None:
    plan, _ = planned_as(way)
    text = plan.explain()
    printed = capsys.readouterr().out
    assert all(line in printed for line in text.splitlines())
    lines = group_regions(plan)
    assert [n for line in lines for n in range(line.first, line.last + 1)] == list(
        range(1, len(plan.regions) + 1)
    )
    rows = [line.split()[0] for line in text.splitlines() if line.strip()]
    assert all(line.label in rows for line in lines)
    assert all(f"({n} bytes)" in text for n in (plan.budget_bytes, plan.predicted_peak_bytes))
    assert max(map(len, text.splitlines())) <= 100
    if way == "breaks":
        assert text.count(f"{BROKEN}:") >= 4
    if way == "host":
        assert "host" in text
    if way == "regions":
        assert len(lines) < len(plan.regions)
    assert 1 < len(repr(plan).splitlines()) < 7
    assert f"({plan.budget_bytes} bytes)" in plan._repr_html_()


@pytest.mark.parametrize("way", ["breaks", pytest.param("host", marks=pytest.mark.slow)])
def test_a_page_and_a_trace_show_the_whole_step(way: str, tmp_path: Path) -> None:
    plan, _ = planned_as(way)
    plan.save_html(tmp_path / "step.html")
    plan.save_trace(tmp_path / "step.json")
    told: Any = data_in((tmp_path / "step.html").read_text())
    assert told["peak_bytes"] == plan.predicted_peak_bytes
    assert [row["region"] for row in told["regions"]] == [
        line.label for line in group_regions(plan)
    ]
    kept = told["kept"]
    assert max(kept["loss_point_bytes"], *kept["peaks_bytes"]) == plan.baseline_peak_bytes
    assert sum(kept["seconds"]) == pytest.approx(plan.baseline_s)
    assert len(kept["seconds"]) == len(kept["peaks_bytes"]) > kept["loss_point"]
    stages = {stage["module"].split(".")[1] for stage in told["stages"]}
    assert stages == {str(n + 1) for n in range(len(plan.regions))}
    events = json.loads((tmp_path / "step.json").read_text())["traceEvents"]
    names = {event["name"] for event in events if event["ph"] == "X"}
    for number in range(1, len(plan.regions) + 1):
        assert {f"region {number} forward", f"region {number} backward"} <= names
    calls = sum(len(row.plan.timeline.events) for row in plan.regions)
    assert sum(event["ph"] == "X" for event in events) == calls + 2 * len(plan.regions)
    shown = [sum(e["args"].values()) for e in events if e["name"] == "device memory"]
    assert max(shown) == plan.predicted_peak_bytes
    with pytest.raises(PlanError):
        plan.save_html(tmp_path / "nowhere" / "step.html")


def test_code_of_all_regions_alike_ones_once() -> None:
    model, call, x = compiled_as("regions")
    taught(model, call, x)
    plan = call.plan
    assert call.forward_code == plan.forward_code
    for code in (plan.forward_code, plan.backward_code):
        compile(code, "code", "exec")
        heads = [line for line in code.splitlines() if line.startswith("# region")]
        assert 1 < len(heads) < LAYERS
        assert code.count("def ") >= len(heads)
    assert plan.forward_code.index("# region") < plan.forward_code.index(f"# region {LAYERS + 1}")
    assert plan.backward_code.startswith(f"# region {LAYERS + 1}")


def test_before_a_step_is_planned_it_says_why_there_is_none() -> None:
    model, call, x = compiled_as("breaks")
    with pytest.raises(PlanError, match="several graphs") as none:
        _ = call.plan
    assert BROKEN in str(none.value)
    gradients(model, call, x)
    with pytest.raises(PlanError, match=f"{BROKEN}:4"):
        _ = call.plan
    assert call.plans
    taught(model, call, x)
    assert isinstance(call.plan, fxremat.StepPlan)
    with pytest.raises(PlanError, match="several"):
        call.trace_step(lambda: call(x).backward())


@pytest.mark.slow
def test_batches_of_other_sizes_have_plans_of_their_own() -> None:
    model, call, x = compiled_as("breaks", budget=8 << 20)
    for rows in (len(x), len(x) // 2) * 6:
        gradients(model, call, x[:rows])
    small = call.plan
    gradients(model, call, x)
    large = call.plan
    assert small.budget_bytes == large.budget_bytes == 8 << 20
    assert small.predicted_peak_bytes < large.predicted_peak_bytes <= 8 << 20
    assert peak_of(model, call, x) <= large.predicted_peak_bytes


@pytest.mark.usefixtures("fresh_dynamo")
def test_a_model_of_one_graph_has_a_plan_as_before() -> None:
    model, x = made()
    call = fxremat.compile(model, x, 1.0)
    assert isinstance(call.plan, fxremat.Plan)
    gradients(model, call, x)
    assert isinstance(call.plan, fxremat.Plan)


def test_what_was_not_measured_is_not_made_up() -> None:
    plan, _ = planned_as("breaks")
    rows = tuple(replace(row, between_s=None) for row in plan.regions)
    bare = replace(plan, regions=rows, measured_peak_bytes=None)
    assert bare.between_s is None
    assert bare.predicted_s == pytest.approx(plan.predicted_s - (plan.between_s or 0.0))
    assert bare.explain() != plan.explain()
    assert view_of(bare).memory.peak_bytes == plan.predicted_peak_bytes
