"""A plan in a file."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

import fxremat
from fxremat.errors import PlanError
from fxremat.ir import (
    Copy,
    Decision,
    Event,
    Lane,
    MeasuredLink,
    Move,
    Origin,
    RecordedCosts,
    StageSeconds,
    Timeline,
)
from fxremat.report.codec import VERSION
from fxremat.report.plan import Plan
from fxremat.units import format_bytes
from tests.plans import everything_kept, plan_of

KEPT = plan_of(everything_kept(3), stages=3)
PLAN = replace(
    KEPT,
    timeline=Timeline((*KEPT.timeline.events, Event(Copy("x", 0, 8), 0.0, 0.1, 8, 8, Lane.D2H))),
    forward_code="def forward(self, args):\n    return []\n",
    decision=Decision(((1, (4, 5)),), ((0, (2,)),), (Move(1, 8, (3,), 1, 2, 3, 4),)),
    origin=Origin("o", "c", ("float32[2]",), "a CPU", (("torch", "'2'"),), (), (), ()),
    measured=RecordedCosts(
        (StageSeconds(0.1, 0.2, 1 / 3),),
        ((3, 1e-7),),
        ((3, "again", 64),),
        (8, 16),
        (1,),
        MeasuredLink(1e9, 2e9, 1.5e9, 1.1, shared=True),
    ),
)


@pytest.mark.parametrize("name", ["plan.json", "plan.json.gz"])
def test_a_plan_comes_back_as_it_was(tmp_path: Path, name: str):
    file = tmp_path / name
    PLAN.save(file)
    found = fxremat.Plan.load(str(file))
    assert found == PLAN
    assert found.explain() == PLAN.explain()
    found.save(tmp_path / f"again.{name}")
    assert (tmp_path / f"again.{name}").read_bytes() == file.read_bytes()


def test_a_file_is_json_and_smaller_where_it_is_packed(tmp_path: Path):
    PLAN.save(tmp_path / "plan.json")
    PLAN.save(tmp_path / "plan.json.gz")
    text = (tmp_path / "plan.json").read_text()
    assert json.loads(text)["plan"]["budget_bytes"] == PLAN.budget_bytes
    assert (tmp_path / "plan.json.gz").stat().st_size < len(text) / 2


def test_what_is_no_plan_is_refused_with_its_path(tmp_path: Path):
    PLAN.save(tmp_path / "good.json")
    good = (tmp_path / "good.json").read_bytes()
    contents = {
        "truncated": good[:-100],
        "empty": b"",
        "other": b'{"a": 1}',
        "future": good.replace(b'"version":%d' % VERSION, b'"version":%d' % (VERSION + 1)),
        "changed": good.replace(b'"budget_bytes":', b'"budget_bytes":"x","budget":'),
        "less": good.replace(b'"chain":', b'"chains":'),
    }
    for name, data in contents.items():
        assert data != good, f"{name} is a plan as it was saved"
        (tmp_path / name).write_bytes(data)
    for name in (*contents, "missing", "."):
        with pytest.raises(PlanError) as caught:
            Plan.load(tmp_path / name)
        assert str(tmp_path / name) in str(caught.value)
        assert caught.value.differs == ()


def test_what_cannot_be_written_is_refused(tmp_path: Path):
    (tmp_path / "file").write_text("mine")
    for path in (tmp_path / "no" / "plan.json", tmp_path / "file" / "plan.json", tmp_path):
        with pytest.raises(PlanError, match="cannot be written"):
            PLAN.save(path)
    assert [p.name for p in tmp_path.iterdir()] == ["file"]
    with pytest.raises(PlanError, match="path"):
        PLAN.save(3)  # type: ignore[arg-type]


def test_what_is_printed_of_a_plan_is_a_few_lines_with_its_figures():
    text = repr(replace(PLAN, measured_peak_bytes=PLAN.predicted_peak_bytes))
    assert str(PLAN) == repr(PLAN)
    assert len(text.splitlines()) < 8
    assert max(map(len, text.splitlines())) <= 80
    for nbytes in (PLAN.budget_bytes, PLAN.least_budget_bytes, PLAN.predicted_peak_bytes):
        assert format_bytes(nbytes) in text
    assert "measured" in text
    assert "measured" not in repr(PLAN)
    assert "explain()" in text


def test_what_was_measured_is_no_part_of_what_was_decided():
    assert replace(PLAN, measured_peak_bytes=7) == PLAN
