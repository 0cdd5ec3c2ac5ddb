"""The scripts that are written for a GPU, on a CPU: the same code with tiny networks."""

from __future__ import annotations

import gc
import json
import subprocess
import sys
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import fxremat
from benchmarks import gpu
from benchmarks.gpu_networks import NETWORKS, VGG, Classifier
from benchmarks.gpu_peers import PEERS
from benchmarks.gpu_probe.probe import Finding, Probe
from benchmarks.gpu_probe.rounding import KNOWN_MIB
from benchmarks.gpu_report import line
from benchmarks.offload_ablation import BlockingOffload, Host, afresh
from benchmarks.rows import Row, Rows, append, failure, run_part
from fxremat import torch_compat
from fxremat.errors import CostError, HostMemoryError
from fxremat.planner.allocator.allocator import AllocatorSettings, CachingAllocator
from tests.models.bits import assert_bitwise_equal
from tests.models.images import images, labels
from tests.models.zoo import drawn_once

CPU = torch.device("cpu")


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize(
    "script",
    [
        "benchmarks.gpu",
        "benchmarks.gpu_probe",
        "benchmarks.gpu_promise",
        "benchmarks.offload_ablation",
    ],
)
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


def rows_of(path: Path) -> list[Row]:
    rows: list[Row] = json.loads(path.read_text())["results"]["rows"]
    return rows


def bench(add: Callable[[Row], None]) -> gpu.Bench:
    """VGG in small, each contender timed once or a few times."""
    return gpu.Bench(NETWORKS["vgg19"](tiny=True), CPU, limit_s=1e6, rounds=1, add=add)


def failing(error: BaseException) -> Any:
    def peer(*_arguments: object) -> Any:
        raise error

    return peer


def out_of_memory() -> CostError:
    """As planning wraps it."""
    error = CostError("operation mm cannot be run by itself")
    error.__cause__ = torch.OutOfMemoryError("CUDA out of memory")
    return error


FAILURES: dict[str, tuple[Exception, str, str]] = {
    "CostError": (
        CostError("operation mm cannot be run by itself"),
        "failed",
        "CostError: operation",
    ),
    "CUDA error": (RuntimeError("CUDA error: an illegal access"), "failed", "RuntimeError: CUDA"),
    "out of memory": (torch.OutOfMemoryError("CUDA out of memory"), "skipped", "does not fit"),
    "wrapped": (out_of_memory(), "skipped", "does not fit"),
    "host memory": (HostMemoryError("pinned: none", asked_bytes=1), "skipped", "does not fit"),
}
"""What a contender raises, how its row tells it, and in which words."""


def test_contenders_that_fail_are_rows_and_not_the_end(monkeypatch: pytest.MonkeyPatch):
    bad = {name: failing(error) for name, (error, _, _) in FAILURES.items()}
    monkeypatch.setattr(gpu, "PEERS", {"eager": PEERS["eager"], **bad, "again": PEERS["eager"]})
    monkeypatch.setattr(gpu, "PLANS", ())
    rows: list[Row] = []
    bench(rows.append).run()
    found = {row["what"]: row for row in rows}
    for name, (_, told_as, words) in FAILURES.items():
        assert words in found[name][told_as]
        assert words in line(found[name])[-1]
    assert found["again"]["seconds"]
    assert found["again"]["base"] == "eager"


def test_after_an_interruption_the_rows_so_far_are_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    peers = {"eager": PEERS["eager"], "interrupted": failing(KeyboardInterrupt())}
    monkeypatch.setattr(gpu, "PEERS", peers)
    with pytest.raises(KeyboardInterrupt):
        bench(Rows("kept", {"device": "cpu"}, folder=tmp_path).add).run()
    (row,) = rows_of(tmp_path / "kept.json")
    assert row["what"] == "eager"
    assert row["peak_bytes"] > 0


@pytest.mark.slow
def test_one_plan_at_a_time_is_held(monkeypatch: pytest.MonkeyPatch):
    """Its host memory is freed with it, before the next is planned."""
    compile_ = fxremat.compile
    before: list[weakref.ref[Any]] = []

    def watched(*arguments: Any, **options: Any) -> Any:
        assert [held() for held in before] == [None] * len(before)
        made = compile_(*arguments, **options)
        before.append(weakref.ref(made))
        return made

    monkeypatch.setattr(gpu, "PEERS", {"eager": PEERS["eager"]})
    monkeypatch.setattr(gpu, "PLANS", (("only", "min"), ("auto", 0.5), (False, 1.0)))
    monkeypatch.setattr(fxremat, "compile", watched)
    rows: list[Row] = []
    bench(rows.append).run()
    assert len(before) == 3
    gc.collect()
    assert all(held() is None for held in before)
    planned = [row for row in rows if "kept" in row]
    assert len(planned) == 3
    assert all(row["kept"] and row["base"] == "eager" for row in planned)


def child(tmp_path: Path, code: str) -> list[str]:
    """Arguments of a process that runs ``code`` with ``path`` as where its rows go."""
    script = tmp_path / "child.py"
    head = "import os, sys, time, pathlib\npath = pathlib.Path(sys.argv[-1])\n"
    script.write_text(head + "from benchmarks.rows import append\n" + code)
    return ["-c", f"import runpy; runpy.run_path({str(script)!r})"]


@pytest.mark.parametrize(
    ("ending", "why"),
    [("", None), ("os._exit(3)", "status 3"), ("time.sleep(600)", "stopped after")],
    ids=["done", "crashed", "too slow"],
)
def test_rows_of_a_process_are_there_however_it_ends(ending: str, why: str | None, tmp_path: Path):
    code = f"append(path, {{'first': 1}})\nappend(path, {{'second': 2}})\n{ending}\n"
    rows: list[Row] = []
    seconds = 600.0 if why != "stopped after" else 5.0
    told = run_part(child(tmp_path, code), settings={}, seconds=seconds, add=rows.append)
    assert rows == [{"first": 1}, {"second": 2}]
    assert told is None if why is None else why in str(told)


def test_settings_reach_the_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "backend:native")
    code = "append(path, {k: v for k, v in os.environ.items() if 'ALLOC_CONF' in k})\n"
    rows: list[Row] = []
    settings = {"PYTORCH_ALLOC_CONF": "expandable_segments:True", "PYTORCH_CUDA_ALLOC_CONF": None}
    assert run_part(child(tmp_path, code), settings=settings, seconds=600, add=rows.append) is None
    assert rows == [{"PYTORCH_ALLOC_CONF": "expandable_segments:True"}]


@pytest.mark.parametrize(("mib", "expandable"), KNOWN_MIB)
def test_the_sizes_worked_out_by_hand_are_those_simulated(mib: float, expandable: bool):
    given, taken = KNOWN_MIB[mib, expandable]
    simulated = CachingAllocator(AllocatorSettings(expandable_segments=expandable))
    asked = int(mib * 2**20)
    simulated.allocate(asked)
    handed_out = -(-asked // 512) * 512 if given is None else given * 2**20
    assert simulated.allocated_bytes == handed_out
    assert simulated.reserved_bytes == taken * 2**20


def test_a_question_that_fails_is_an_answer(tmp_path: Path):
    probe = Probe("part", CPU, True, float("inf"), tmp_path / "rows")

    def fails() -> Finding:
        raise RuntimeError("no such kernel")

    probe.ask("first", fails)
    probe.ask("second", lambda: Finding("22 MiB", "22 MiB", True))
    late = Probe("part", CPU, True, 0.0, tmp_path / "rows")
    late.ask("third", lambda: Finding("never asked"))
    first, second, third = (json.loads(x) for x in (tmp_path / "rows").read_text().splitlines())
    assert first["failed"] == "RuntimeError: no such kernel"
    assert second["holds"] is True
    assert third["skipped"]


def test_an_error_is_told_with_its_causes(tmp_path: Path):
    told = failure(out_of_memory())
    assert "CostError" in told["failed"]
    assert "out of memory" in told["causes"][0]
    append(tmp_path / "rows", told)
    assert json.loads((tmp_path / "rows").read_text()) == told


@pytest.mark.parametrize(
    "section",
    [
        pytest.param("memory", marks=pytest.mark.slow),
        "pinning",
        pytest.param("operations", marks=pytest.mark.slow),
    ],
)
def test_the_probe_asks_what_applies_to_a_cpu(section: str, tmp_path: Path):
    done = run(
        "benchmarks.gpu_probe",
        *("--device", "cpu", "--tiny", "--section", section, "--results", str(tmp_path)),
    )
    assert done.returncode == 0, done.stderr
    rows = rows_of(tmp_path / "gpu_probe-tried-on-cpu.json")
    assert rows
    assert [row for row in rows if "failed" in row or row["holds"] is False] == []
    assert section == "pinning" or any(row["holds"] for row in rows)


@pytest.mark.slow
def test_the_probe_disturbs_steps_on_a_cpu(tmp_path: Path):
    done = run(
        "benchmarks.gpu_probe",
        *("--device", "cpu", "--tiny", "--section", "stress", "--results", str(tmp_path)),
    )
    assert done.returncode == 0, done.stderr
    rows = rows_of(tmp_path / "gpu_probe-tried-on-cpu.json")
    assert all(row.get("holds") for row in rows)
    assert any("copies" in row["figures"] and row["figures"]["copies"] for row in rows)


def promised(tmp_path: Path, *networks: str) -> list[Row]:
    done = run(
        "benchmarks.gpu_promise",
        *(*networks, "--device", "cpu", "--tiny", "--results", str(tmp_path)),
    )
    assert done.returncode == 0, done.stderr
    return rows_of(tmp_path / "gpu_promise-tried-on-cpu.json")


def check_promise(rows: list[Row]) -> None:
    assert all("failed" not in row for row in rows)
    planned = [row for row in rows if "skipped" not in row]
    assert {row["budget"] for row in planned} >= {"1.0", "min"}
    for row in planned:
        assert row["measured_bytes"] <= row["budget_bytes"]
        assert row["bits"]
    least, full = (
        next(row for row in planned if row["budget"] == b)["budget_bytes"] for b in ("min", "1.0")
    )
    assert least < full


@pytest.mark.slow
def test_the_promise_on_a_cpu(tmp_path: Path):
    check_promise(promised(tmp_path, "gpt"))


@pytest.mark.slow
def test_the_promise_of_the_other_networks_on_a_cpu(tmp_path: Path):
    pytest.importorskip("transformers")
    rows = promised(tmp_path, "llama-1b", "resnet50")
    for network in ("llama-1b", "resnet50"):
        check_promise([row for row in rows if row["network"] == network])


@pytest.mark.slow
def test_every_network_trains_in_every_way(tmp_path: Path):
    names = list(NETWORKS)
    done = run(
        "benchmarks.gpu", "--device", "cpu", "--tiny", "--rounds", "2", "--results", str(tmp_path)
    )
    assert done.returncode == 0, done.stderr
    rows = rows_of(tmp_path / "gpu-tried-on-cpu.json")
    assert not [row for row in rows if "failed" in row]
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
        beside = [row for row in measured if row["what"] != "eager"]
        assert all(len(row["base_seconds"]) == 2 for row in beside)
    assert (tmp_path / "gpu-tried-on-cpu.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_the_ablation_has_a_row_for_each_step(tmp_path: Path):
    done = run(
        "benchmarks.offload_ablation",
        *("--device", "cpu", "--tiny", "--rounds", "2", "--results", str(tmp_path)),
    )
    assert done.returncode == 0, done.stderr
    found = {row["what"]: row for row in rows_of(tmp_path / "offload_ablation_cpu.json")}
    assert found.keys() >= {"nothing moved", "fresh file, blocking", "pinned, blocking"}
    overlapped = found["pinned, overlapped, least peak"]
    assert overlapped["peak_bytes"] < found["nothing moved"]["peak_bytes"]
    assert overlapped["moved_bytes"] > 0
    for what in ("pinned, overlapped, least peak", "pinned, overlapped, half way"):
        assert found[what]["peak_bytes"] <= found[what]["budget_bytes"]
