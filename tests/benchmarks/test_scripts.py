"""The scripts that ``benchmarks.scripts`` trains, its counter, and what it finds wrong."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from benchmarks.allocated import built
from benchmarks.rows import Row
from benchmarks.script_row import Training, named_bytes
from benchmarks.scripts import NAMES
from benchmarks.scripts.__main__ import finish, over_budget

FOLDER = Path(__file__).parents[2]


@pytest.fixture
def one_thread() -> Iterator[None]:
    threads, drawn = torch.get_num_threads(), torch.get_rng_state()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
    torch.set_rng_state(drawn)


def test_there_are_thirty():
    files = {path.stem for path in (FOLDER / "benchmarks" / "scripts").glob("[!_]*.py")}
    assert set(NAMES) == files
    assert len(NAMES) == 30


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("name", NAMES)
def test_each_trains_two_steps_and_repeats_them(name: str):
    losses = []
    for _ in range(2):
        training = Training.of(name, "eager", steps=2, allocated=None)
        for _ in range(2):
            losses.append(training.step())
            _, seconds = training.meter.taken()
            assert seconds > 0
        with pytest.raises(StopIteration):
            next(training.steps)
    assert losses[:2] == losses[2:]
    assert losses[0] != losses[1]


@pytest.mark.skipif(shutil.which("gcc") is None, reason="the counter is compiled by gcc")
def test_the_counter_counts_tensors_and_nothing_else(tmp_path: Path):
    code = """
import torch
from benchmarks.allocated import Allocated
before = torch.empty(1000)
counter = Allocated()
base = counter.now_bytes
del before
held = torch.empty(1 << 20, dtype=torch.uint8)
assert counter.now_bytes - base == 1 << 20
counter.mark()
other = [bytearray(1 << 20) for _ in range(10)]
assert counter.most_bytes - base == 1 << 20
blocks = [torch.empty(4096, dtype=torch.uint8) for _ in range(1000)]
view = held[:100]
del held, blocks[::2]
assert counter.most_bytes - base == (1 << 20) + 1000 * 4096
assert counter.now_bytes - base == (1 << 20) + 500 * 4096
counter.mark()
assert counter.most_bytes == counter.now_bytes
del view
assert counter.now_bytes - base == 500 * 4096
"""
    environment = {**os.environ, "LD_PRELOAD": str(built(tmp_path))}
    command = [sys.executable, "-c", code]
    ran = subprocess.run(
        command, env=environment, cwd=FOLDER, capture_output=True, text=True, check=False
    )
    assert ran.returncode == 0, ran.stderr


def row(**changed: object) -> Row:
    steps = 7
    found: Row = {
        "script": "quickstart",
        "setting": "0.6",
        "budget": 0.6,
        "losses": ["1", "2", "3", "4", "5", "6", "7"],
        "peaks_bytes": [90] * steps,
        "budgets_bytes": [100] * steps,
        "predicted_bytes": [90] * steps,
        "warnings": [],
        "whole": True,
    }
    return {**found, **changed}


REFERENCE: Row = {"losses": ["1", "2", "3", "4", "5", "6", "7"]}


def test_what_trains_within_its_budget_has_no_fault():
    found = finish(row(), REFERENCE)
    assert found["faults"] == []
    assert found["outcome"] == "trains"
    assert found["predicted_by_measured"] == [1, 1]


def test_steps_over_budget_need_a_warning_by_their_end():
    peaks = [90, 120, 120, 90, 90, 90, 90]
    warned = [[2, "BudgetWarning", "grew"], [0, "GraphBreakWarning", "pieces"]]
    found = over_budget(row(peaks_bytes=peaks, warnings=warned))
    assert (found["over_steps"], found["silent_steps"]) == ([1, 2], [1])
    assert found["worst_over"] == 1.2
    in_time = over_budget(row(peaks_bytes=peaks, warnings=[[1, "BudgetWarning", "grew"]]))
    assert in_time["silent_steps"] == []
    unknown = over_budget(row(peaks_bytes=peaks, budgets_bytes=[None] * 7))
    assert unknown["over_steps"] == []


def test_the_least_is_what_an_error_names_or_a_warning_says_would_do():
    refused = row(failed="BudgetError: 9", least_budget_bytes=9)
    assert named_bytes(refused) == 9
    warned = [[0, "BudgetWarning", "a budget of 5 suffices"], [1, "BudgetWarning", "took 7"]]
    assert named_bytes(row(warnings=warned)) == 5
    assert named_bytes(row()) is None


def test_a_refusal_is_a_fault_only_of_the_least_that_was_named():
    refused = {"failed": "BudgetError: 9", "died_at": 0, "steps_ended": 0, "least_budget_bytes": 9}
    refused |= {"losses": [], "peaks_bytes": [], "budgets_bytes": [], "predicted_bytes": []}
    assert finish(row(**refused), REFERENCE)["faults"] == []
    assert finish(row(**refused, setting="least"), REFERENCE)["faults"]


def test_a_death_in_the_loop_and_other_losses_are_faults():
    died = {"failed": "BudgetError: 9", "died_at": 1, "steps_ended": 1, "least_budget_bytes": 9}
    assert "died at step 2" in finish(row(**died), REFERENCE)["faults"][0]
    # An iteration may hold several steps, as that of LBFGS: it dies of the second one.
    assert "died at step 1" in finish(row(**{**died, "died_at": 0}), REFERENCE)["faults"][0]
    differs = finish(row(losses=["1", "2", "0", "4", "5", "6", "7"]), REFERENCE)
    assert differs["differs_at"] == 2
    assert differs["faults"]
