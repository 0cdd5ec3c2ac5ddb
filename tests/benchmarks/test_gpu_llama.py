"""``benchmarks.gpu_llama`` without a GPU: the order of rows, going on, figures, targets."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks.common import machine
from benchmarks.gpu_llama import environment
from benchmarks.gpu_llama_model import (
    SMALL,
    Llama,
    Shape,
    as_it_is,
    checkpointed,
    every_second_product_saved,
    training_flops,
)
from benchmarks.gpu_llama_order import (
    COMPILED,
    COMPILED_CHECKPOINTED,
    MEMORY_BUDGETS,
    SHARE,
    Planned,
    Start,
    contenders,
    memory_budget_name,
    remaining,
)
from benchmarks.gpu_llama_report import dense_flops, ratio, summary, targets, utilization
from benchmarks.rows import Row, Rows
from tests.models.bits import assert_bitwise_equal

WANTED = contenders("llama", "20 GiB")
AT_PEAK = Planned("inductor", 1.0, COMPILED).name


def peer(name: str, seconds: float = 0.2, **more: object) -> Row:
    row = {
        "network": "llama",
        "what": name,
        "peak_bytes": 100,
        "promised_peak_bytes": 90,
        "reserved_peak_bytes": 120,
        "seconds": [seconds] * 5,
        "update_s": [0.02] * 5,
        "items": (8192, "tokens"),
        "flops": 6e13,
        "most_flops": 989e12,
        "first_step_s": 40.0,
        "cache": "cold",
        "row_s": 50.0,
    }
    return {**row, **more}


def planned(plan: Planned, times: float, **more: object) -> Row:
    about = {
        "budget_bytes": 100,
        "predicted_peak_bytes": 90,
        "predicted_s": 0.2 * times - 0.02,
        "held": True,
        "reference": plan.reference,
        "reference_seconds": [0.2] * 5,
        "first_step_s": 30.0,
    }
    return peer(plan.name, 0.2 * times, **{**about, **more})


def test_the_most_telling_rows_come_first():
    names = [each.name for each in WANTED]
    assert len(set(names)) == len(names)
    assert names[:5] == [
        COMPILED,
        AT_PEAK,
        f"fxremat (inductor) at 57% of the peak of {COMPILED}",
        COMPILED_CHECKPOINTED,
        f"fxremat (inductor) at the peak of {COMPILED_CHECKPOINTED}",
    ]
    assert names[5:7] == [
        memory_budget_name(MEMORY_BUDGETS[0]),
        f"fxremat (inductor) at the peak of {memory_budget_name(MEMORY_BUDGETS[0])}",
    ]
    assert sum("(eager)" in name for name in names) == sum("(inductor)" in n for n in names) - 1


@pytest.mark.parametrize("network", ["llama", "resnet50"])
def test_whoever_gives_a_peak_comes_before(network: str):
    names = [each.name for each in contenders(network, "20 GiB")]
    for index, each in enumerate(contenders(network, "20 GiB")):
        if isinstance(each, Planned):
            assert each.reference in names[:index]
        if isinstance(each, Start):
            assert each.of in names[:index]


def test_a_later_call_goes_on_where_one_has_stopped():
    done = [peer(COMPILED), {"network": "llama", "what": AT_PEAK, "failed": "OutOfMemoryError: no"}]
    waiting = {"network": "llama", "what": WANTED[2].name, "skipped": "no peak", "waits": True}
    assert remaining(WANTED, [])[0].name == COMPILED
    assert [each.name for each in remaining(WANTED, [*done, waiting])] == [
        each.name for each in WANTED[2:]
    ]
    chosen = remaining(WANTED, done, ["57%", "per-op SAC"])
    assert {each.name for each in chosen} >= {WANTED[2].name, "per-op SAC"}
    assert COMPILED not in {each.name for each in chosen}


def test_rows_of_another_device_are_not_gone_on_from(tmp_path: Path):
    from benchmarks.gpu_llama_run import Saved, earlier_rows

    first, second = tmp_path / "first", tmp_path / "second"
    saved = Saved(Rows("gpu_llama", {"device": "H200"}, folder=first), second)
    saved.add(peer(COMPILED))
    saved.add(peer(COMPILED, 0.3))
    rows = saved.of("llama")
    assert [row["seconds"][0] for row in rows] == [0.3]
    (found,) = earlier_rows("gpu_llama", (first, second), "H200")
    assert found["peak_bytes"] == 100
    assert earlier_rows("gpu_llama", (first,), "H100") == []
    (first / "gpu_llama.json").unlink()
    assert len(earlier_rows("gpu_llama", (first, second), "H200")) == 1
    assert machine()["torch"] == torch.__version__


def test_users_keep_the_variables_that_they_have_set(tmp_path: Path):
    found = environment({"FXREMAT_CACHE": "0"}, tmp_path, small=False)
    assert found["FXREMAT_CACHE"] == str(tmp_path / "fxremat")
    assert found["PYTORCH_ALLOC_CONF"] == "expandable_segments:True"
    assert "STAND_IN_VALUES" not in found
    given = {
        "FXREMAT_CACHE": "/there",
        "TRITON_CACHE_DIR": "/here",
        "PYTORCH_CUDA_ALLOC_CONF": "backend:native",
    }
    kept = environment(given, tmp_path, small=True)
    assert kept.keys() == {"TORCHINDUCTOR_CACHE_DIR", "STAND_IN_VALUES"}


def test_flops_are_those_of_the_matrices():
    """Counted by torch for a forward, and three times that: all but the mask of attention."""
    from torch.utils.flop_counter import FlopCounterMode

    shape = Shape(2, width=64, heads=4, key_heads=2, hidden=256, vocabulary=96, batch=2, length=32)
    model = Llama(shape)
    tokens = torch.randint(0, 96, (2, 32))
    counter = FlopCounterMode(display=False)
    with counter, torch.no_grad():
        model(tokens, tokens)
    matrices = sum(p.numel() for name, p in model.named_parameters() if "norm" not in name)
    expected = training_flops(matrices, shape.tokens, layers=2, width=64, length=32)
    assert 3 * counter.get_total_flops() == pytest.approx(expected, rel=0.1)


def test_the_share_of_what_a_device_can_do():
    assert dense_flops("NVIDIA H200") == dense_flops("NVIDIA H100 80GB HBM3") == 989e12
    assert dense_flops("another") is None
    assert utilization(989e12 * 0.1, 0.2, 989e12) == pytest.approx(0.5)


def test_llama_has_the_parameters_of_the_real_one():
    with torch.device("meta"):
        model = Llama(Shape())
    assert sum(p.numel() for p in model.parameters()) == 1_235_814_400


def test_every_way_computes_the_same_and_leaves_the_module():
    shape = Shape(2, width=64, heads=4, key_heads=2, hidden=256, vocabulary=96, batch=2, length=32)
    model = Llama(shape)
    tokens = torch.randint(0, 96, (2, 32))
    found = []
    for way in (as_it_is, checkpointed, every_second_product_saved, as_it_is):
        way(model)(tokens, tokens).backward()
        found.append([p.grad for p in model.parameters()])
        model.zero_grad(set_to_none=True)
    for other in found[1:]:
        assert_bitwise_equal(other, found[0])


def test_targets_are_held_against_the_rows():
    reached = [
        planned(Planned("inductor", 1.0, COMPILED), 0.99),
        planned(Planned("inductor", SHARE, COMPILED), 1.04),
        planned(Planned("inductor", 1.0, COMPILED_CHECKPOINTED), 0.9),
        *(planned(Planned("inductor", 1.0, memory_budget_name(s)), 1.0) for s in MEMORY_BUDGETS),
        peer(COMPILED),
        peer(Start(COMPILED).name, cache="warm"),
        peer(Start(AT_PEAK).name, cache="warm", first_step_s=30.0),
    ]
    assert [each.holds for each in targets(reached)] == [True] * 9
    assert [each.holds for each in targets([])] == [None] * 9
    ratio_of_first = ratio(reached[0])
    assert ratio_of_first is not None
    assert ratio_of_first.median == pytest.approx(0.99)


def test_what_misses_a_target_is_said():
    plan = Planned("inductor", 1.0, COMPILED)
    missed = planned(plan, 1.1, held=False, predicted_peak_bytes=99, predicted_s=0.1)
    refused = {
        "network": "llama",
        "what": Planned("inductor", SHARE, COMPILED).name,
        "refused": "the budget is 1",
    }
    slower = [peer(COMPILED, first_step_s=20.0), missed, refused]
    by_text = {each.text: each for each in targets(slower)}
    assert by_text["measured peak <= budget"].holds is False
    assert by_text["predicted bytes"].found == "0 of 1, +10.00% to +10.00%"
    assert [each.holds for each in targets(slower)][:3] == [False, False, None]
    text = summary(slower)
    assert "refused: the budget is 1" in text
    assert (
        "| fxremat (inductor) at the peak of torch.compile / its time | <= 1.00 | 1.100 | NO |"
        in text
    )


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so_in_a_line(tmp_path: Path):
    command = [sys.executable, "-m", "benchmarks.gpu_llama", "--results", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "no CUDA device" in done.stderr
    assert not list(tmp_path.iterdir())


def test_the_small_shape_needs_no_sorted_indices():
    """Of more tokens the embedding's gradient asks the device, where nothing was computed."""
    assert SMALL.tokens <= 3072
