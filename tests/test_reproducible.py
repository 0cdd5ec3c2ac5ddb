"""The same costs give the same plan and the same code, whatever the process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import fxremat
from fxremat.graph import graph as graphs
from tests.efforts import WHOLE
from tests.models import ZOO
from tests.planning.test_emission import SAMPLE, model

PLANS = ("gpt", "siamese", "transfers")
"""A line with draws, a join, and what travels to host memory."""


def save_plans(folder: Path) -> None:
    """Plan each of them into a file."""
    for name in PLANS:
        torch._dynamo.reset()
        if name in ZOO:
            entry = ZOO[name]
            built, sample = entry.build(), fxremat.Sample(*entry.sample(0))
            loss = None if entry.loss_inside else entry.loss
            plan = fxremat.plan(built, sample, 0.75, loss=loss)
        else:
            plan = fxremat.plan(model(), SAMPLE, "min", loss=torch.sum, offload="only")
        plan.save(folder / f"{name}.json")
    torch._dynamo.reset()


def contents(folder: Path) -> dict[str, bytes]:
    return {name: (folder / f"{name}.json").read_bytes() for name in PLANS}


SCRIPT = """
import sys
from importlib import import_module
from pathlib import Path
from tests.models import ZOO
from tests import test_reproducible as test

folder, *refused = sys.argv[1:]
for place in refused:
    file, _, name = place.rpartition(".")
    setattr(import_module("fxremat." + file), name, test.refuse)
test.save_plans(Path(folder))
"""


def in_another_process(
    folder: Path, cache: Path, *, seed: int, refused: tuple[str, ...]
) -> dict[str, bytes]:
    """The plans that it makes, without what is ``refused``."""
    folder.mkdir()
    environment = {**os.environ, "FXREMAT_CACHE": str(cache), "PYTHONHASHSEED": str(seed)}
    command = [sys.executable, "-c", SCRIPT, str(folder), *refused]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return contents(folder)


MEASURING = ("graph.graph.measure_line", "graph.further.measure_link")
PLANNING = ("planning.planner.emit", "planning.choose.fastest")


@pytest.mark.slow
def test_other_processes_plan_the_same_or_know_it(tmp_path: Path):
    cache = tmp_path / "cache"
    first = in_another_process(tmp_path / "first", cache, seed=1, refused=())
    for entry in cache.glob("fxremat-plan-*"):
        entry.unlink()
    assert list(cache.iterdir())
    again = in_another_process(tmp_path / "again", cache, seed=2, refused=MEASURING)
    assert again == first
    refused = (*MEASURING, *PLANNING)
    assert in_another_process(tmp_path / "known", cache, seed=3, refused=refused) == first
    assert fxremat.Plan.load(tmp_path / "first" / "transfers.json").host_bytes


def refuse(*_args: object, **_options: object) -> None:
    raise AssertionError("the costs are there")


@pytest.mark.usefixtures("fresh_dynamo")
def test_another_budget_needs_no_measuring(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("FXREMAT_CACHE", str(tmp_path))
    whole = {"effort": WHOLE}  # parts are cut for a budget, and measured then
    full = fxremat.plan(model(), SAMPLE, 1.0, **whole)
    torch._dynamo.reset()
    monkeypatch.setattr(graphs, "measure_line", refuse)
    least = fxremat.plan(model(), SAMPLE, "min", **whole)
    assert least.measured == full.measured
    assert least.predicted_peak_bytes < full.predicted_peak_bytes
    torch._dynamo.reset()
    with pytest.raises(AssertionError, match="the costs are there"):
        fxremat.plan(model(), SAMPLE[:8], "min", **whole)


@pytest.mark.usefixtures("fresh_dynamo")
def test_damaged_entries_are_written_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("FXREMAT_CACHE", str(tmp_path))
    first = fxremat.plan(model(), SAMPLE, "min")
    for entry in tmp_path.glob("fxremat-*"):
        entry.write_bytes(entry.read_bytes()[:-1])
    torch._dynamo.reset()
    again = fxremat.plan(model(), SAMPLE, "min")  # seconds of this process, as nothing else is
    assert again.measured == first.measured
    assert again.forward_code == first.forward_code
    torch._dynamo.reset()
    monkeypatch.setattr(graphs, "measure_line", refuse)
    assert fxremat.plan(model(), SAMPLE, "min") == again, "it was not written anew"
