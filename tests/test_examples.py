"""Each example trains within its budget, as it does without one."""

from __future__ import annotations

import dataclasses
import importlib
import subprocess
import sys

import accelerate
import pytest

from examples import compare

pytestmark = [
    pytest.mark.usefixtures("fresh_dynamo"),
    pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning"),
]


@pytest.mark.parametrize(
    ("name", "budget"),
    [
        pytest.param("unet3d", "96 MiB", marks=pytest.mark.slow),
        ("two_towers", "64 MiB"),
        pytest.param("long_context", "20 MiB", marks=pytest.mark.slow),
    ],
)
def test_example(
    name: str,
    budget: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    accelerate.state.AcceleratorState._reset_state(True)  # of another test, with its precision
    example = importlib.import_module(f"examples.{name}")
    plain, planned = example.run(2, budget)
    assert planned.plan is not None and plain.plan is None
    assert planned.peak_bytes <= planned.plan.budget_bytes < plain.peak_bytes
    assert planned.losses == plain.losses and len(set(plain.losses)) == 2
    assert compare.tell(plain, planned) == 0
    assert f"{plain.losses[-1]:.9g}" in capsys.readouterr().out
    monkeypatch.setitem(sys.modules, "rich.console", None)
    assert compare.tell(plain, planned) == 0
    assert f"{plain.losses[-1]:.9g}" in capsys.readouterr().out
    other = dataclasses.replace(plain, losses=(*plain.losses[:-1], 0.0))
    assert compare.tell(other, planned) == 1
    large = dataclasses.replace(planned, peak_bytes=planned.plan.budget_bytes + 1)
    assert compare.tell(plain, large) == 1


@pytest.mark.slow
def test_sharded_example() -> None:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    run = [*launcher, "--nproc-per-node", "2", "-m", "examples.sharded", "--steps", "5"]
    told = subprocess.run(run, capture_output=True, text=True, timeout=300, check=False)
    assert told.returncode == 0, told.stderr
    assert told.stdout.count("losses the same to the last bit") == 2
