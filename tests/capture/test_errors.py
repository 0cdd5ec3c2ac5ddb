"""Messages about captures that failed."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import fxremat
from fxremat.passes import pipeline
from fxremat.passes.contract import Pass, PassConfig
from fxremat.passes.step_graph import StepGraph


def broken(graph: StepGraph, *, config: PassConfig) -> StepGraph:
    """Fail."""
    raise IndexError("list index out of range")


def test_an_error_of_planning_is_not_blamed_on_the_model(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(pipeline, "PASSES", [Pass("broken", broken), *pipeline.PASSES])
    with pytest.raises(fxremat.CaptureError, match=r"(?s)IndexError: list index.*report") as caught:
        fxremat.compile(nn.Linear(4, 4), torch.randn(2, 4), "min", regions="one")
    assert "out of the forward" not in str(caught.value)
    assert caught.value.code == "FXR302"
