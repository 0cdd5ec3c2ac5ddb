"""The trace of a plan: events of the format that Chrome and Perfetto read."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fxremat.errors import PlanError
from fxremat.ir import Copy, Timeline
from tests.trials import compiled_once, plan_of_model

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

PHASES = {"M", "X", "C"}


def events_of(file: Path) -> list[dict[str, Any]]:
    """The events of a trace, all of them well-formed."""
    trace = json.loads(file.read_text())
    assert trace["displayTimeUnit"] in ("ms", "ns")
    events: list[dict[str, Any]] = trace["traceEvents"]
    for event in events:
        assert event["ph"] in PHASES
        assert isinstance(event["name"], str)
        assert isinstance(event["ts"], float)
        assert event["ts"] >= 0
        assert isinstance(event["pid"], int)
        assert isinstance(event["tid"], int)
        assert isinstance(event["args"], dict)
        if event["ph"] == "X":
            assert event["dur"] >= 0
        if event["ph"] == "C":
            assert all(type(value) is int and value >= 0 for value in event["args"].values())
    assert [e["ts"] for e in events] == sorted(e["ts"] for e in events)
    return events


@pytest.mark.parametrize("mode", ["", "only"])
def test_a_plan_alone(tmp_path: Path, mode: str):
    plan = plan_of_model("gpt", mode)
    plan.save_trace(tmp_path / "trace.json")
    events = events_of(tmp_path / "trace.json")
    runs = [e for e in events if e["ph"] == "X"]
    assert {e["pid"] for e in events} == {1}
    assert sorted(e["name"] for e in runs) == sorted(str(e.op) for e in plan.timeline.events)
    assert sum(e["dur"] for e in runs) == pytest.approx(
        1e6 * sum(e.end_s - e.start_s for e in plan.timeline.events)
    )
    memory = [sum(e["args"].values()) for e in events if e["name"] == "device memory"]
    assert memory == list(plan.memory.held_bytes())
    host = [e["args"]["on the host"] for e in events if e["name"] == "host memory"]
    copied = sum(isinstance(e.op, Copy) for e in plan.timeline.events)
    assert len(host) == copied
    assert (max(host, default=0) > 0) == bool(mode)
    assert host[-1:] == [0] * bool(mode)


def test_predicted_and_measured_side_by_side(tmp_path: Path):
    call, step = compiled_once("gpt", "only")
    step()
    traced = call.trace_step(step)
    call.plan.save_trace(tmp_path / "trace.json", traced)
    events = events_of(tmp_path / "trace.json")
    names = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert sorted(names.values()) == ["measured", "predicted"]
    for pid, timeline in zip(sorted(names), (call.plan.timeline, traced.measured), strict=True):
        runs = [e for e in events if e["ph"] == "X" and e["pid"] == pid]
        assert len(runs) == len(timeline.events)
        assert max(e["ts"] + e["dur"] for e in runs) == pytest.approx(1e6 * timeline.makespan_s)
        memory = [
            sum(e["args"].values())
            for e in events
            if e["name"] == "device memory" and e["pid"] == pid
        ]
        assert max(memory) == call.plan.predicted_held_bytes


def test_a_step_of_another_plan_is_refused(tmp_path: Path):
    call, step = compiled_once("gpt", "only")
    step()
    traced = call.trace_step(step)
    other = replace(traced, measured=Timeline(traced.measured.events[1:]))
    with pytest.raises(PlanError, match="trace a step"):
        call.plan.save_trace(tmp_path / "trace.json", other)
    assert not list(tmp_path.iterdir())
