"""What works without packages that a plan can do without."""

from __future__ import annotations

import json
import logging
import subprocess
import sys

import pytest

from fxremat import optional

HIDE = """
import sys
for name in {hidden!r}:
    sys.modules[name] = None
"""

TRAIN = """
import copy, json, logging
records = []
handler = logging.Handler()
handler.emit = records.append
logging.getLogger("fxremat").addHandler(handler)

import torch
from torch import nn
import fxremat

torch.manual_seed(0)
layers = []
for _ in range(6):
    layers += [nn.Linear(64, 256), nn.GELU(), nn.Dropout(0.1), nn.Linear(256, 64)]
model, x = nn.Sequential(*layers), torch.randn(128, 64)

def step(module):
    torch.manual_seed(1)
    module(x).square().sum().backward()
    gradients = [p.grad for p in module.parameters()]
    module.zero_grad()
    return gradients

def loss(out):
    return out.square().sum()

full = fxremat.compile(model, x, 1.0, loss=loss)
expected = step(full)
least = full.plan.least_budget_bytes
half = (least + full.plan.baseline_peak_bytes) // 2
rows = []
for budget in (half, "min"):
    torch._dynamo.reset()
    other = copy.deepcopy(model)
    compiled = fxremat.compile(other, x, budget, loss=loss)
    found = step(compiled)
    plan = compiled.plan
    rows.append({
        "same": all(torch.equal(a, b) for a, b in zip(found, expected, strict=True)),
        "peak": fxremat.measure_step(compiled, lambda: step(compiled)).peak_bytes,
        "budget": plan.budget_bytes,
        "bound": plan.lower_bound_s / plan.baseline_s,
        "time": plan.predicted_s / plan.baseline_s,
    })
try:
    text = compiled.plan.explain()
except ImportError as error:
    text = str(error)
logs = [(record.levelname, record.getMessage()) for record in records]
loaded = sorted(name for name in ("ortools", "rich") if sys.modules.get(name))
print(json.dumps({"rows": rows, "text": text, "logs": logs, "loaded": loaded}))
"""


def trained(*hidden: str) -> dict:
    """A few steps in a process in which some packages cannot be imported."""
    done = subprocess.run(
        [sys.executable, "-c", HIDE.format(hidden=hidden) + TRAIN],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize(
    "hidden", [("ortools", "rich"), pytest.param(("ortools",), marks=pytest.mark.slow)]
)
def test_a_model_trains_without(hidden: tuple[str, ...]):
    told = trained(*hidden)
    assert set(told["loaded"]).isdisjoint(hidden)
    assert any(row["time"] > 1 for row in told["rows"]), "nothing recomputed"
    for row in told["rows"]:
        assert row["same"]
        assert row["peak"] <= row["budget"]
        assert row["bound"] == 1  # of nothing recomputed: it always holds
    warnings = [message for level, message in told["logs"] if level == "WARNING"]
    assert len(warnings) == 1, warnings
    assert "ortools" in warnings[0] and "pip install ortools" in warnings[0]
    assert ("pip install rich" in told["text"]) == ("rich" in hidden)
    assert ("no better bound" in told["text"]) == ("rich" not in hidden)


def test_importing_needs_none_of_them():
    names = ("ortools", "rich", "matplotlib")
    code = HIDE.format(hidden=names) + "import fxremat\nfxremat.compile\nfxremat.TransferError"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_what_is_installed_is_found(caplog: pytest.LogCaptureFixture):
    with caplog.at_level(logging.DEBUG, logger="fxremat"):
        assert optional.find("ortools.linear_solver.pywraplp").__name__.endswith("pywraplp")
        assert optional.find("rich") is sys.modules["rich"]
    assert not caplog.records
