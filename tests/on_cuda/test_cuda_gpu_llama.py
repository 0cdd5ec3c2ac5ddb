"""``benchmarks.gpu_llama --small`` from end to end."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.gpu_llama_order import COMPILED, Peer, Planned, Start, contenders
from benchmarks.rows import Row
from tests.cuda import needs_cuda

pytestmark = [*needs_cuda, pytest.mark.slow]

NETWORKS = ["llama", "resnet50"]


def run(folder: Path, *arguments: str) -> list[Row]:
    """The rows, after a run with caches that are the test's."""
    command = [sys.executable, "-m", "benchmarks.gpu_llama", "--small"]
    folders = ("--results", str(folder), "--cache", str(folder / "cache"))
    caches = {"TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"), "FXREMAT_CACHE": "0"}
    done = subprocess.run(
        [*command, *folders, *arguments],
        env={**os.environ, **caches},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "FAULT" not in done.stderr
    rows: list[Row] = json.loads((folder / "gpu_llama-small.json").read_text())["results"]["rows"]
    return rows


@pytest.mark.parametrize("network", NETWORKS)
def test_every_row_is_made(network: str, tmp_path: Path):
    """Some in a first call, the others in a second; a third makes a reference again."""
    asked = ("--network", network, "--seconds", "3000")
    first = run(tmp_path, *asked, "--only", "memory budget 0.5")
    assert len([row for row in first if row["network"]]) == 3
    rows = run(tmp_path, *asked, "--skip-done")
    assert all(row in rows for row in first if row["network"])
    chosen = f"fxremat (eager) at the peak of {COMPILED}"
    rows = run(tmp_path, *asked, "--only", chosen)
    assert chosen in [row["what"] for row in rows if "reference_made_again" in row]
    assert not [row for row in rows if "failed" in row or "reference_failed" in row]
    found = {row["what"]: row for row in rows if row["network"] == network}
    for each in contenders(network, "32 MiB"):
        row = found[each.name]
        if "refused" in row:  # so small a ResNet may have no plan there
            assert network == "resnet50"
            assert isinstance(each, Planned)
            assert each.budget != "min"
            continue
        if "skipped" in row:
            refused = isinstance(each, Start) and "refused" in found[each.of]
            missing = [name for name in found if "not installed" in found[name].get("skipped", "")]
            assert refused or each.name in missing or any(n in each.name for n in missing), row
            continue
        assert row["first_step_s"] > 0
        if isinstance(each, Start):
            assert row["cache"] == "warm"
            continue
        assert len(row["seconds"]) == 5
        assert row["peak_bytes"] >= row["promised_peak_bytes"] > 0
        if isinstance(each, Planned):
            assert row["held"], row
            assert len(row["reference_seconds"]) == 5
        assert isinstance(each, Peer) or row["predicted_peak_bytes"] <= row["budget_bytes"]
    text = (tmp_path / "gpu_llama-small.md").read_text()
    assert all(name in text for name in found)
