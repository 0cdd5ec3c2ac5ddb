"""The scripts that are written for a GPU, on a CPU: the same code with tiny networks."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from benchmarks.gpu_networks import NETWORKS, VGG, Classifier
from benchmarks.gpu_peers import PEERS
from benchmarks.offload_ablation import BlockingOffload, Host, afresh
from fxremat import torch_compat
from tests.models.bits import assert_bitwise_equal
from tests.models.images import images, labels
from tests.models.zoo import drawn_once

CPU = torch.device("cpu")


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("script", ["benchmarks.gpu", "benchmarks.offload_ablation"])
def test_without_a_gpu_it_says_so_in_a_line(script: str):
    done = run(script)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.count("\n") == 1
    assert "no CUDA device" in done.stderr


def in_one_piece() -> Host:
    memory = torch.empty(1 << 22, dtype=torch.uint8)
    return lambda begin, nbytes: memory[begin : begin + nbytes]


def held_bytes(forward: Callable[[], torch.Tensor]) -> int:
    """What is allocated while the loss exists."""
    with torch_compat.AllocationLog() as log:
        loss = forward()
    del loss
    return sum(change for _mark, change in log.events)


@pytest.mark.parametrize("host", [in_one_piece, lambda: afresh(CPU)], ids=["arena", "afresh"])
def test_blocking_transfers_change_no_bit_and_save_memory(host: Callable[[], Host]):
    model = drawn_once(lambda: Classifier(VGG(width=2, hidden=8, classes=10, dropout=0.0)))()
    inputs = (images(0, batch=2, size=64), labels(0, batch=2, classes=10))
    model(*inputs).backward()
    expected = [p.grad for p in model.parameters()]
    moving = BlockingOffload(host(), CPU)
    moving.learn(model, model, inputs)
    # All inputs but the first, which the caller holds: 15 of convolutions, 5 of poolings.
    assert len(moving.readers) == 20
    for _ in range(2):
        model.zero_grad(set_to_none=True)
        moving.forward(model, inputs).backward()
        assert_bitwise_equal([p.grad for p in model.parameters()], expected)
    kept = held_bytes(lambda: model(*inputs))
    assert held_bytes(lambda: moving.forward(model, inputs)) <= kept - moving.total_bytes // 2


@pytest.mark.slow
def test_every_network_trains_in_every_way(tmp_path: Path):
    names = list(NETWORKS)
    done = run(
        "benchmarks.gpu", "--device", "cpu", "--tiny", "--rounds", "2", "--results", str(tmp_path)
    )
    assert done.returncode == 0, done.stderr
    rows = json.loads((tmp_path / "gpu-tried-on-cpu.json").read_text())["results"]["rows"]
    assert len({row["network"] for row in rows}) == len(names)
    for network in {row["network"] for row in rows}:
        own = {row["what"]: row for row in rows if row["network"] == network}
        assert own.keys() >= set(PEERS)
        assert own["torch offloading"]["skipped"] == "moves from a GPU only"
        planned = [row for row in own.values() if "kept" in row]
        assert planned, "nothing was planned"
        assert all(row["kept"] for row in planned)
        measured = [row for row in own.values() if "skipped" not in row]
        assert all(len(row["seconds"]) == 2 for row in measured)
    assert (tmp_path / "gpu-tried-on-cpu.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_the_ablation_has_a_row_for_each_step(tmp_path: Path):
    done = run(
        "benchmarks.offload_ablation",
        *("--device", "cpu", "--tiny", "--rounds", "2", "--results", str(tmp_path)),
    )
    assert done.returncode == 0, done.stderr
    rows = json.loads((tmp_path / "offload_ablation_cpu.json").read_text())["results"]["rows"]
    found = {row["what"]: row for row in rows}
    assert found.keys() >= {"nothing moved", "fresh file, blocking", "pinned, blocking"}
    overlapped = found["pinned, overlapped, least peak"]
    assert overlapped["peak_bytes"] < found["nothing moved"]["peak_bytes"]
    assert overlapped["moved_bytes"] > 0
    for what in ("pinned, overlapped, least peak", "pinned, overlapped, half way"):
        assert found[what]["peak_bytes"] <= found[what]["budget_bytes"]
