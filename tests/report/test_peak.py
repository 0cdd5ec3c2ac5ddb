"""What is held at the peak, the line that made it, and what freeing it costs."""

from __future__ import annotations

import functools
import inspect
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import fxremat
from fxremat.errors import PlanError
from fxremat.report.memory import Kind
from fxremat.report.modules import joined, repeated
from fxremat.report.peak import PeakHolder
from fxremat.report.plan import Plan, StepPlan
from tests.efforts import WHOLE
from tests.plans import everything_kept, plan_of

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

LAYERS = 4


class Block(nn.Module):
    """A residual MLP, with one operation in each line."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 8 * width), nn.Linear(8 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.up(x)
        hidden = functional.gelu(hidden)
        return x + self.down(hidden)


class Net(nn.Module):
    """Repeated blocks, between which the graph may break."""

    def __init__(self, width: int = 32, *, breaks: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block(width) for _ in range(LAYERS))
        self.head = nn.Linear(width, width)
        self.breaks = breaks

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
            if self.breaks:
                torch._dynamo.graph_break()
        return self.head(x).square().mean()


def number_of(code: str) -> int:
    """The number of the line in this file that has ``code``."""
    lines = inspect.getsource(inspect.getmodule(Block)).splitlines()  # type: ignore[arg-type]
    return next(i for i, line in enumerate(lines, start=1) if line.strip() == code)


def net() -> tuple[Net, Tensor]:
    torch.manual_seed(0)
    return Net(), torch.randn(512, 32)


@functools.cache
def kept() -> Plan:
    """The plan that keeps everything."""
    model, x = net()
    return fxremat.plan(model, x, 1.0, loss="own", effort=WHOLE)


@functools.cache
def least() -> Plan:
    """The plan of least memory."""
    model, x = net()
    return fxremat.plan(model, x, "min", loss="own", optimizer="AdamW", effort=WHOLE)


def row_of(rows: Sequence[PeakHolder], what: str, state: str = "") -> PeakHolder:
    return next(row for row in rows if row.what == what and state in row.how_to_free)


@pytest.mark.parametrize("plan", [kept, least])
def test_the_bytes_are_those_of_the_predicted_peak(plan: Any) -> None:
    rows = plan().at_peak()
    assert sum(row.nbytes for row in rows) == plan().predicted_peak_bytes
    assert [row.nbytes for row in rows] == sorted((row.nbytes for row in rows), reverse=True)
    assert sum(row.share for row in rows) == pytest.approx(1)
    assert {row.kind for row in rows} <= {kind.value for kind in Kind}


def test_what_the_allocator_rounds_has_rows_of_its_own() -> None:
    plan = replace(
        kept(),
        predicted_peak_bytes=kept().predicted_held_bytes + 512,
        predicted_reserved_bytes=kept().predicted_held_bytes + 2048,
        budget_on="reserved",
    )
    rows = plan.at_peak()
    assert sum(row.nbytes for row in rows) == plan.counted_bytes == plan.predicted_reserved_bytes
    found = {row.kind: row.nbytes for row in rows}
    assert (found["allocator blocks"], found["allocator cache"]) == (512, 1536)


def test_activations_name_the_line_of_the_model_that_makes_them() -> None:
    rows = kept().at_peak()
    code = "hidden = functional.gelu(hidden)"
    line = row_of(rows, "gelu").line
    assert line is not None
    assert (line.file, line.number, line.code) == (Path(__file__).name, number_of(code), code)
    assert row_of(rows, "gelu").place == f"{line.place}: {code}"
    up = row_of(rows, "addmm")
    assert up.line is not None
    assert up.line.code == "hidden = self.up(x)"
    assert up.module.endswith(".up")


def test_repeated_blocks_are_one_row() -> None:
    row = row_of(kept().at_peak(), "gelu", "recompute")
    assert (row.module, row.tensors) == ("layers.0–2", 3)  # the last block runs at the peak


@pytest.mark.parametrize(
    ("outer", "module", "path"),
    [
        ("layers.2", "up", "layers.2.up"),
        ("layers.2", "layers.2.up", "layers.2.up"),
        ("layers.2.up", "up", "layers.2.up"),
        ("layers.2.mlp", "mlp.up", "layers.2.mlp.up"),
        ("", "up", "up"),
        ("head", "", "head"),
        ("0", "0", "0"),
        ("1", "0", "1.0"),
    ],
)
def test_the_path_in_a_region_is_one_in_the_model(outer: str, module: str, path: str) -> None:
    assert joined(outer, module) == path


@pytest.mark.parametrize(
    ("modules", "name"),
    [
        (["layers.0.up", "layers.1.up", "layers.2.up"], "layers.0–2.up"),
        (["layers.0.up", "layers.2.up"], "layers.{0,2}.up"),
        ([f"layers.{i}" for i in (0, 2, 4, 6, 8)], "layers.{0,…,8}"),
        (["layers.0.experts.1", "layers.1.experts.0"], "layers.0–1.experts.0–1"),
        (["head", "head"], "head"),
        (["", ""], ""),
    ],
)
def test_the_name_of_repeated_modules_says_which(modules: list[str], name: str) -> None:
    assert repeated(modules) == name


def test_each_kind_says_what_would_free_it() -> None:
    found = {row.kind: row.how_to_free for row in least().at_peak()}
    assert "8-bit" in found["optimizer state"]
    assert "fully_shard" in found["parameters"]
    assert "recompute" not in found["parameters"]


def test_an_unknown_loss_is_said_to_be_assumed() -> None:
    model, x = nn.Sequential(nn.Linear(8, 512)), torch.randn(64, 8)
    unknown = fxremat.plan(model, x, 1.0, effort=WHOLE).at_peak()
    given = fxremat.plan(model, x, 1.0, loss=torch.sum, effort=WHOLE).at_peak()
    assert all("loss=:" in row.how_to_free for row in unknown if row.kind == "loss")
    assert any(row.kind == "loss" for row in unknown)
    assert not any("loss=:" in row.how_to_free for row in given)


def test_what_runs_at_the_peak_is_not_said_to_be_freed_by_recomputing_it() -> None:
    plan = kept()
    peak = next(e.op for e in plan.timeline.events if e.peak_bytes == plan.predicted_held_bytes)
    used = [row for row in plan.at_peak() if f"in use by {peak}" in row.how_to_free]
    assert used
    assert all(row.recompute_s is None for row in used)


@pytest.mark.parametrize("what", ["gelu", "addmm"])
def test_recomputing_costs_what_is_said(what: str) -> None:
    def estimated(policy: Any = None) -> Plan:
        with torch.device("meta"):
            model, x = Net(256), torch.empty(8192, 256)
        found = fxremat.estimate(
            model, x, device="H100", budget=1.0, loss="own", policy=policy, effort=WHOLE
        )
        assert found.plan is not None
        return found.plan

    plan = estimated()
    row = row_of(plan.at_peak(), what, "recompute")
    assert row.recompute_s is not None
    modules = {f"layers.{i}{row.module[len('layers.0–2') :]}" for i in range(row.tensors)}

    def policy(operation: fxremat.Operation) -> Any:
        is_it = operation.module in modules and what in str(operation.target)
        return "recompute" if is_it else "keep"

    forced = estimated(policy)
    assert forced.predicted_s - plan.predicted_s == pytest.approx(row.recompute_s, rel=0.05)
    assert forced.predicted_peak_bytes < plan.predicted_peak_bytes


def test_a_link_to_the_host_gives_seconds_of_copies() -> None:
    model, x = net()
    plan = fxremat.plan(model, x, 1.0, loss="own", offload="auto", effort=WHOLE)
    assert plan.measured is not None
    link = plan.measured.link
    assert link is not None
    row = row_of(plan.at_peak(), "gelu", "offload")
    both_s = row.nbytes / link.offload_bytes_per_s + row.nbytes / link.prefetch_bytes_per_s
    assert row.offload_s == pytest.approx(both_s)


def test_a_saved_plan_has_the_same_rows(tmp_path: Path) -> None:
    least().save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json").at_peak() == least().at_peak()
    rows = json.loads(json.dumps([row.facts() for row in least().at_peak()]))
    assert sum(row["nbytes"] for row in rows) == least().predicted_peak_bytes


def test_a_plan_without_a_record_of_tensors_has_no_rows(capsys: pytest.CaptureFixture[str]) -> None:
    plan = plan_of(everything_kept(2), stages=2)
    with pytest.raises(PlanError, match="not made from a model"):
        plan.at_peak()
    assert "at peak" not in plan.explain()


def test_the_table_and_print_start_with_the_most(capsys: pytest.CaptureFixture[str]) -> None:
    text, rows = kept().explain(), kept().at_peak()
    assert text.index(rows[0].origin.split(" ")[0]) < text.index(" stage ")
    assert all(len(line) <= 100 for line in text.splitlines())
    assert "test_peak.py" in text
    assert rows[0].origin in repr(kept())


def test_a_step_of_several_graphs_has_rows_of_all() -> None:
    torch.manual_seed(0)
    model, x = Net(breaks=True), torch.randn(512, 32)
    call = fxremat.compile(model, x, 1.0, effort=WHOLE)
    for _ in range(4):
        model.zero_grad()
        call(x).backward()
    plan = call.plan
    assert isinstance(plan, StepPlan)
    rows = plan.at_peak()
    assert sum(row.nbytes for row in rows) == plan.predicted_peak_bytes
    assert all(row.nbytes > 0 for row in rows)
    gelu = [row for row in rows if row.what == "gelu"]
    assert sum(row.tensors for row in gelu) >= LAYERS - 1
    assert {row.line.code for row in gelu if row.line} == {"hidden = functional.gelu(hidden)"}
    assert any(row.module.startswith("layers.") for row in gelu)
    assert "test_peak.py" in plan.explain()


def test_a_plan_at_another_size_has_rows_too() -> None:
    model, x = net()
    call = fxremat.compile(model, x, 1.0, dynamic=True, effort=WHOLE, loss="own")
    for size in (512, 384):
        call.zero_grad()
        call(x[:size]).backward()
        rows = call.plan.at_peak()
        assert sum(row.nbytes for row in rows) == call.plan.predicted_peak_bytes
        assert row_of(rows, "gelu").line is not None


def test_an_estimate_names_lines_without_a_device() -> None:
    with torch.device("meta"):
        model, x = Net(256), torch.empty(4096, 256)
    found = fxremat.estimate(model, x, device="H100", budget="min", loss="own")
    for plan in (found.kept, found.plan):
        assert plan is not None
        assert any(row.line and row.line.file == "test_peak.py" for row in found.at_peak(plan))
    assert "test_peak.py" in "\n".join(found.lines())
