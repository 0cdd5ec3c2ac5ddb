"""The snapshot of a plan: torch's own tool reads it, and finds the plan's bytes in it."""

from __future__ import annotations

import pickle
import pickletools
from pathlib import Path
from typing import Any

import pytest
from torch.cuda import _memory_viz

from fxremat.errors import PlanError
from fxremat.report.plan import Plan
from tests.plans import everything_kept, plan_of
from tests.trials import plan_of_model

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

KNOWN_TO_THE_VIEWER = {
    *("PROTO", "FRAME", "STOP", "MARK", "MEMOIZE", "BINGET", "LONG_BINGET", "BINPUT"),
    *("EMPTY_LIST", "APPEND", "APPENDS", "EMPTY_DICT", "SETITEM", "SETITEMS"),
    *("EMPTY_TUPLE", "TUPLE1", "TUPLE2", "TUPLE3", "TUPLE", "NONE", "NEWTRUE", "NEWFALSE"),
    *("BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT", "SHORT_BINUNICODE", "BINUNICODE"),
}
"""What the unpickler in torch's MemoryViz.js reads; it stops at anything else."""


def saved(plan: Plan, folder: Path) -> dict[str, Any]:
    """What is in the snapshot."""
    plan.save_snapshot(folder / "plan.pickle")
    data = (folder / "plan.pickle").read_bytes()
    operations = [operation.name for operation, _, _ in pickletools.genops(data)]
    assert next(pickletools.genops(data))[1] == 4
    assert set(operations) <= KNOWN_TO_THE_VIEWER
    found: dict[str, Any] = pickle.loads(data)
    return found


@pytest.mark.parametrize(("name", "mode"), [("gpt", ""), ("gpt", "only"), ("unet", "")])
def test_torchs_tool_reads_it(tmp_path: Path, name: str, mode: str):
    snapshot = saved(plan_of_model(name, mode), tmp_path)
    assert "segments: 1" in _memory_viz.segsum(snapshot)
    told = _memory_viz.trace(snapshot)
    assert f"{len(snapshot['device_traces'][0])} entries" in told
    assert "del " in told
    assert "MemoryViz" in _memory_viz.trace_plot(snapshot)
    flames = _memory_viz.memory(snapshot, format_flamegraph=str)
    assert "parameters" in flames
    assert _memory_viz.segments(snapshot, format_flamegraph=str)


@pytest.mark.parametrize(("name", "mode"), [("gpt", ""), ("gpt", "only"), ("unet", "")])
def test_its_peak_is_the_plans(tmp_path: Path, name: str, mode: str):
    plan = plan_of_model(name, mode)
    snapshot = saved(plan, tmp_path)
    (events,) = snapshot["device_traces"]
    (segment,) = snapshot["segments"]
    alive = {
        segment["address"] + offset: block["size"]
        for offset, block in _offsets(segment)
        if block["state"] == "active_allocated"
    }
    assert sum(block["size"] for block in segment["blocks"]) == segment["total_size"]
    assert sum(alive.values()) == segment["allocated_size"]
    # Backwards from the end: what is freed was alive before.
    now = peak = sum(alive.values())
    for event in reversed(events):
        if event["action"] == "alloc":
            assert alive.pop(event["addr"]) == event["size"]
            now -= event["size"]
        elif event["action"] == "free_completed":
            begin, end = event["addr"], event["addr"] + event["size"]
            assert all(end <= a or begin >= a + n for a, n in alive.items())
            alive[begin] = event["size"]
            now += event["size"]
        peak = max(peak, now)
    assert peak == plan.predicted_held_bytes
    assert [e["time_us"] for e in events] == sorted(e["time_us"] for e in events)


def _offsets(segment: dict[str, Any]) -> list[tuple[int, dict[str, Any]]]:
    offset, found = 0, []
    for block in segment["blocks"]:
        found.append((offset, block))
        offset += block["size"]
    return found


def test_frames_name_the_module(tmp_path: Path):
    (events,) = saved(plan_of_model("gpt"), tmp_path)["device_traces"]
    assert any(e["frames"][0]["filename"] == "blocks.2.attention.qkv" for e in events)


def test_a_plan_on_paper_has_no_snapshot(tmp_path: Path):
    with pytest.raises(PlanError, match="not made of a model"):
        plan_of(everything_kept(2), stages=2).save_snapshot(tmp_path / "plan.pickle")
