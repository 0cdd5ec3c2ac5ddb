"""The ways to plan that the ablation compares: none beats what no plan can, and some fit."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from benchmarks.ablation import ablated, of_part, of_way
from benchmarks.ablation_ways import ADDED, MOVED, WHOLE, WITHOUT

NAME = "tied"


@pytest.mark.usefixtures("fresh_dynamo")
def test_all_ways_to_plan_a_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.ablation_ways.MOST_STAGES", 0)  # CP-SAT takes long
    threads = torch.get_num_threads()
    row = ablated(NAME)
    torch.set_num_threads(threads)
    ways, bounds = row["ways"], row["bound_s"]
    assert "stages" in ways["CP-SAT"]["why_not"]
    for way, found in ways.items():
        if way not in (MOVED, "CP-SAT") and "transfers" not in way:
            for seconds, bound in zip(found["seconds"], bounds, strict=False):
                assert seconds is None or seconds >= bound * (1 - 1e-6), way
    whole = ways[WHOLE]["seconds"][: len(bounds)]
    assert None not in whole
    steps = [ways[way]["seconds"] for way in ("+ save options", "+ climbing", WHOLE)]
    for before, after in pairwise(steps):  # each has all schedules of the one before it
        assert all(a is None or a >= b for a, b in zip(before, after, strict=True))
    assert any(seconds is not None for seconds in ways["greedy"]["seconds"])
    for way in ADDED:
        assert len(of_way([row], way)) == 8
    for part in WITHOUT:
        assert len(of_part([row], part)) == 7
