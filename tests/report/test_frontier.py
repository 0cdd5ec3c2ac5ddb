"""The memory-time curve for people."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import fxremat
from fxremat.errors import BudgetError
from fxremat.report.frontier import frontier_of


def test_only_the_best_are_on_it():
    curve = frontier_of([(5, 2.0), (3, 4.0), (4, 4.0), (5, 3.0), (9, 1.0), (8, 2.0)])
    assert [(p.peak_bytes, p.predicted_s) for p in curve.points] == [(3, 4.0), (5, 2.0), (9, 1.0)]
    assert curve.least_budget_bytes == 3
    assert curve.baseline.peak_bytes == 9
    assert curve.at(2) is None
    assert curve.at(8) == curve.points[1]
    assert curve.at(100) == curve.points[2]
    assert curve.at("8 B") == curve.at(np.int64(8)) == curve.points[1]


@pytest.mark.parametrize("budget", ["much", 8.0, None, True, [8]])
def test_only_bytes_are_asked_for(budget: Any):
    with pytest.raises(BudgetError) as caught:
        frontier_of([(3, 4.0), (9, 1.0)]).at(budget)
    assert repr(budget) in str(caught.value)


def test_it_is_printed_in_a_few_lines():
    curve = frontier_of([(i << 20, 60.0 - i) for i in range(1, 51)])
    text = repr(curve)
    assert str(curve) == text
    assert len(text.splitlines()) < 12
    assert max(map(len, text.splitlines())) <= 80
    for told in ("50 plans", "1.0 MiB", "50.0 MiB", "10 s", "59 s"):
        assert told in text
    assert curve._repr_html_().count("<tr>") == len(curve.rows()) + 1


def test_it_is_that_of_the_plans(tmp_path: Path):
    torch.manual_seed(0)
    parts = [nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 32)) for _ in range(4)]
    model, x = nn.Sequential(*parts), torch.randn(64, 32)
    curve = fxremat.frontier(model, x, assume="strict")
    assert len(curve.points) > 2
    for less, more in itertools.pairwise(curve.points):
        assert less.peak_bytes < more.peak_bytes
        assert less.predicted_s > more.predicted_s
    plan = fxremat.plan(model, x, curve.points[1].peak_bytes, assume="strict")
    assert plan.predicted_peak_bytes == curve.points[1].peak_bytes
    assert plan.predicted_s == pytest.approx(curve.points[1].predicted_s)
    least = fxremat.plan(model, x, "min", assume="strict")
    assert least.budget_bytes == curve.least_budget_bytes
    pytest.importorskip("matplotlib")
    curve.plot(tmp_path / "curve.png")
    assert (tmp_path / "curve.png").read_bytes().startswith(b"\x89PNG")
