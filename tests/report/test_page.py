"""The page of a plan: whole in itself, and with the plan's numbers, as a browser shows it."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from dataclasses import replace
from datetime import datetime
from html.parser import HTMLParser
from importlib import resources
from pathlib import Path

import pytest
import torch

import fxremat
from fxremat.errors import PlanError
from fxremat.ir import Stage
from fxremat.report.areas import areas_of
from fxremat.report.memory import Kind
from fxremat.report.page import data_of, page_with
from fxremat.report.plan import Plan
from fxremat.report.stages import report_stages
from tests.plans import everything_kept, plan_of
from tests.trials import plan_of_model

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


class Page(HTMLParser):
    """What elements say: attributes by id, and rows of the table."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.by_id: dict[str, dict[str, str]] = {}
        self.body: dict[str, str] = {}
        self.hidden_rows = 0
        self.rows: list[dict[str, str]] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        named = {name: value or "" for name, value in attrs}
        if "id" in named:
            self.by_id[named["id"]] = named
        if tag == "body":
            self.body = named
        if tag == "tr":
            self.rows.append({})
            self.hidden_rows += "hidden" in named
        if tag == "td" and self.rows:
            data = {k[5:].replace("-", "_"): v for k, v in named.items() if k[:5] == "data-"}
            self.rows[-1].update(data)


def data_in(page: str) -> dict[str, object]:
    """The data that the page's script reads."""
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    assert found
    return json.loads(found[1])


def shown(file: Path, folder: Path) -> tuple[Page, str]:
    """The page after its script has run, and what the browser's console says."""
    assert CHROMIUM
    done = subprocess.run(
        [
            CHROMIUM,
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--enable-logging=stderr",
            f"--user-data-dir={folder}",
            "--dump-dom",
            file.as_uri(),
        ],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    return Page(done.stdout), "\n".join(x for x in done.stderr.splitlines() if "CONSOLE" in x)


@pytest.mark.skipif(CHROMIUM is None, reason="no chromium")
@pytest.mark.parametrize("mode", ["", "only"])
def test_a_browser_shows_the_plans_numbers(tmp_path: Path, mode: str):
    plan = plan_of_model("gpt", mode)
    plan = replace(plan, measured_peak_bytes=plan.predicted_held_bytes - 512)
    plan.save_html(tmp_path / "plan.html")
    page, console = shown(tmp_path / "plan.html", tmp_path / "profile")
    assert console == ""
    assert page.body["data-drawn"] == "yes"
    assert int(page.body["data-peak-bytes"]) == plan.predicted_held_bytes
    values = {
        name: float(own["data-value"]) for name, own in page.by_id.items() if "data-value" in own
    }
    assert values == {
        "counted_bytes": plan.counted_bytes,
        "measured_peak_bytes": plan.measured_peak_bytes,
        "baseline_bytes": plan.baseline_peak_bytes,
        "least_budget_bytes": plan.least_budget_bytes,
        "predicted_s": plan.predicted_s,
        **({"host_bytes": plan.host_bytes} if mode else {}),
    }
    holders = [int(row["held_bytes"]) for row in page.rows if [*row] == ["held_bytes"]]
    assert holders == [row.nbytes for row in plan.at_peak()][: len(holders)]
    assert holders
    rows = [row for row in page.rows if "stage" in row]
    stories = [story for story in report_stages(plan) if story.executed]
    assert [int(row["stage"]) for row in rows] == [story.index for story in stories]
    for row, story in zip(rows, stories, strict=True):
        assert int(row["saved_bytes"]) == story.saved_bytes
        assert float(row["forward_s"]) == story.forward_s
        assert row["module"] == plan.memory.modules[story.index]


@pytest.mark.skipif(CHROMIUM is None, reason="no chromium")
def test_the_table_is_sorted_by_the_column_that_is_clicked(tmp_path: Path):
    plan = plan_of_model("gpt")
    plan.save_html(tmp_path / "plan.html")
    text = (tmp_path / "plan.html").read_text()
    click = "<script>document.querySelector('[data-field=saved_bytes]').click()</script></body>"
    (tmp_path / "clicked.html").write_text(text.replace("</body>", click))
    page, _ = shown(tmp_path / "clicked.html", tmp_path / "profile")
    saved = [int(row["saved_bytes"]) for row in page.rows if "saved_bytes" in row]
    assert saved == sorted((s.saved_bytes for s in report_stages(plan) if s.executed), reverse=True)
    assert saved != sorted(saved)


@pytest.mark.skipif(CHROMIUM is None, reason="no chromium")
def test_a_mistake_in_the_page_would_be_seen(tmp_path: Path):
    plan = plan_of_model("gpt")
    plan.save_html(tmp_path / "plan.html")
    text = (tmp_path / "plan.html").read_text()
    (tmp_path / "bad.html").write_text(text.replace("const theme =", "const themes ="))
    page, console = shown(tmp_path / "bad.html", tmp_path / "profile")
    assert "Uncaught" in console
    assert "data-drawn" not in page.body


def test_the_data_are_the_plans():
    plan = plan_of_model("gpt", "only")
    data = data_in(_page(plan))
    for field in ("budget_bytes", "least_budget_bytes", "predicted_s", "baseline_s", "host_bytes"):
        assert data[field] == getattr(plan, field)
    assert data["frontier"] == [[p.peak_bytes, p.predicted_s] for p in plan.frontier.points]
    assert len(data["events"]) == len(plan.timeline.events)
    assert len(data["lives"]) == 4 * len(plan.memory.lives)


def test_it_says_of_what_it_is():
    plan = plan_of_model("gpt")
    data = data_in(_page(plan))
    assert data["model"] == plan.model != ""
    assert plan.origin and data["device"] == plan.origin.device
    assert all(
        place in data["batch"] and tensor in data["batch"] for place, tensor in plan.arguments
    )
    assert datetime.now().strftime("%B %Y") in data["written"]


def test_the_step_with_everything_kept_is_outlined():
    plan = plan_of_model("gpt")
    assert plan.kept is not None
    most = max(plan.kept.loss_point_bytes, *plan.kept.peaks_bytes)
    assert most == plan.baseline_peak_bytes
    assert len(plan.kept.seconds) == len(plan.kept.peaks_bytes) > plan.kept.loss_point
    assert sum(plan.kept.seconds) == pytest.approx(plan.baseline_s)
    assert data_in(_page(plan))["kept"]["peaks_bytes"] == list(plan.kept.peaks_bytes)


def test_no_two_things_have_one_colour():
    areas = areas_of(plan_of_model("gpt").memory)
    styles = resources.files("fxremat.report").joinpath("html", "page.css").read_text()
    lanes = re.findall(r"--(?:forward|again|backward|copy|accent): (#\w+)", styles)
    told = [area.colour for area in areas] + list(set(lanes))
    assert len(told) == len(set(told)) > 8


def test_optimizer_state_and_reserve_are_areas_of_their_own():
    model, x = torch.nn.Linear(64, 64), torch.randn(8, 64)
    plan = fxremat.plan(model, x, 1.0, optimizer=torch.optim.AdamW, reserve="1 MiB")
    held = {area.kind: max(plan.memory.held_bytes(area.lives)) for area in areas_of(plan.memory)}
    assert held[Kind.PARAMETERS] == 4 * (64 * 64 + 64)
    assert held[Kind.OPTIMIZER] >= 2 * held[Kind.PARAMETERS]
    assert held[Kind.RESERVE] == 1 << 20
    assert Kind.BUFFERS not in held


@pytest.mark.skipif(CHROMIUM is None, reason="no chromium")
def test_rows_of_stages_that_are_kept_are_folded_and_unfold(tmp_path: Path):
    data = data_in(_page(plan_of_model("gpt")))
    for stage in data["stages"]:
        stage |= {"extra_s": 0, "moved_bytes": 0, "held_bytes": stage["saved_bytes"]}
    text = page_with(data)
    (tmp_path / "plan.html").write_text(text)
    click = "<script>document.querySelector('tr.fold').click()</script></body>"
    (tmp_path / "clicked.html").write_text(text.replace("</body>", click))
    for name, hidden in (("plan", len(data["stages"])), ("clicked", 0)):
        shown_page, console = shown(tmp_path / f"{name}.html", tmp_path / "profile")
        assert console == ""
        assert shown_page.hidden_rows == hidden


def test_it_needs_no_network():
    text = _page(plan_of_model("gpt"))
    addresses = set(re.findall(r"\bhttps?://[^\s\"'<>)]+", text))
    assert addresses == {"http://www.w3.org/2000/svg"}  # a name, which nobody asks for
    assert not re.search(r"<(link|img|iframe)\b|\bsrc=|@import|url\(", text)


def test_names_cannot_break_out_of_the_data():
    plan = plan_of_model("gpt")
    evil = "</script><script>alert(1)</script><!--"
    stages = tuple(Stage(evil, s.saved, s.kind) for s in plan.chain.stages)
    memory = replace(plan.memory, modules=(evil,) * len(stages))
    changed = replace(plan, chain=replace(plan.chain, stages=stages), memory=memory)
    text = _page(changed)
    assert text.count("</script>") == _page(plan).count("</script>") == 2
    assert evil not in text
    assert data_in(text)["stages"][0]["module"] == evil
    assert evil not in changed._repr_html_()


def test_a_plan_on_paper_has_no_page(tmp_path: Path):
    with pytest.raises(PlanError, match="not made from a model"):
        plan_of(everything_kept(2), stages=2).save_html(tmp_path / "plan.html")
    assert not list(tmp_path.iterdir())


def test_a_notebook_shows_the_summary():
    plan = plan_of_model("gpt")
    assert f"({plan.budget_bytes} bytes)" in plan._repr_html_()
    on_paper = plan_of(everything_kept(2), stages=2)
    assert f"({on_paper.budget_bytes} bytes)" in on_paper._repr_html_()


def _page(plan: Plan) -> str:
    return page_with(data_of(plan))
