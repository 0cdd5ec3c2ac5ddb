"""The sweep over torch's operators and modules: what it runs, finds, and survives."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("expecttest", reason="torch's databases of operators need it")

from benchmarks.sweep.__main__ import kinds_of
from benchmarks.sweep.cases import Case, Embedded, Plain, Scaled, cases, models
from benchmarks.sweep.train import OUTCOMES, aside, difference, row_of
from benchmarks.sweep.worker import Worker

FOLDER = Path(__file__).parents[2]


def swept(folder: Path, arguments: Sequence[str]) -> tuple[list[dict[str, Any]], int]:
    """Rows and exit code of the script."""
    command = [sys.executable, "-m", "benchmarks.sweep", "--folder", str(folder), *arguments]
    ran = subprocess.run(command, cwd=FOLDER, capture_output=True, text=True, check=False)
    rows = json.loads((folder / "sweep.json").read_text())["results"]["rows"]
    return rows, ran.returncode


def case(name: str, kind: str = "op", dtype: str = "float32") -> Case:
    return next(each for each in cases([kind], [dtype]) if each.name == name)


def test_a_model_keeps_the_numbers_of_a_sample():
    x, given = torch.randn(3, 4, requires_grad=True), torch.randn(3, 4)
    model = Embedded(lambda x, pair, *, other: (x * pair[0], other), (x, [given]), {"other": given})
    loss, *results = model(*model.given)
    assert len(model.given) == 1
    assert torch.equal(results[0], torch.tanh(x * given) * model.scales[0])
    loss.backward()
    assert all(p.grad is not None for p in model.parameters())


def test_a_call_by_itself_keeps_strides_and_returns_its_results():
    x, y = torch.randn(3, 1, requires_grad=True), torch.randn(8)
    model = Plain(lambda x, y: (x.exp(), [y, None]), (x, y[::2].expand(3, 4)), {})
    first, (second, nothing) = model(*model.given)
    assert model.given[0].stride() == (0, 2)
    assert torch.equal(first, x.exp())
    assert torch.equal(second, y[::2].expand(3, 4))
    assert nothing is None
    model.loss_of((first, second)).backward()
    assert torch.equal(next(model.parameters()).grad, x.exp())


def test_arguments_get_gradients_where_they_are_scaled():
    x = torch.randn(3, requires_grad=True)
    model = Scaled(torch.mul, (x, torch.ones(3)), {})
    model(*model.given).backward()
    assert model.given[0].grad is not None
    assert model.given[1].grad is None
    assert model.scale.grad is not None


def test_a_row_says_how_its_model_was_planned():
    x = torch.randn(8, 4, requires_grad=True)
    row = row_of(lambda: Plain(torch.tanh, (x,), {}))
    assert (row["outcome"], row["planned"]) == ("same", "whole")
    assert kinds_of(row) == ["same", "whole", "within"]
    row = row_of(lambda: Plain(torch.t, (x,), {}))
    assert (row["outcome"], row["planned"]) == ("same", "unplanned")
    assert "GraphBreakWarning" in row["warnings"][0]
    assert kinds_of({"outcome": "bits", "peak_bytes": 9, "budget_bytes": 8}) == ["bits", "above"]


def test_a_model_is_made_alike_each_time():
    for name, kind in (("sort", "op"), ("nn.LSTM", "train"), ("nn.BatchNorm1d", "eval")):
        for make in models(case(name, kind), samples=2):
            one, other = ({n: aside(x) for n, x in make().state_dict().items()} for _ in range(2))
            assert difference([one], [other]) is None


def test_bits_differ_by_the_sign_of_zero_and_not_by_which_nan():
    quiet, other = torch.tensor([0x7FC00000, 0x7FC00001], dtype=torch.int32).view(torch.float32)
    assert difference([{"x": aside(quiet)}], [{"x": aside(other)}]) is None
    zero, negative = torch.tensor(0.0), torch.tensor(-0.0)
    assert difference([{"x": aside(zero)}], [{"x": aside(negative)}])
    assert difference([{"x": None}], [{"x": aside(zero)}])


CALLS: list[int] = []


@torch.library.custom_op("fxremat_tests::seldom_alike", mutates_args=())
def seldom_alike(x: torch.Tensor) -> torch.Tensor:
    """Other bits in each call after those of two runs."""
    CALLS.append(len(CALLS))
    return x * (1 + 2**-20 * max(0, CALLS[-1] - 6))


seldom_alike.register_fake(torch.empty_like)


def test_what_seldom_has_the_same_bits_is_no_fault():
    x = torch.randn(8, 4, requires_grad=True)
    row = row_of(lambda: Embedded(lambda x: x * seldom_alike(x.detach()), (x,), {}))
    assert row == {"outcome": "repeats"}
    assert len(CALLS) > 40


@pytest.mark.slow
def test_a_worker_goes_on_where_one_takes_too_long():
    worker = Worker(limit_s=0.01)
    try:
        rows = list(worker.rows(case("add"), samples=2))
        assert [(row["sample"], row["outcome"]) for row in rows] == [(0, "died"), (1, "died")]
        worker.limit_s = 120
        assert [row["outcome"] for row in worker.rows(case("sin"), samples=1)] == ["same"]
    finally:
        worker.stop()


@pytest.mark.slow
def test_operators_and_modules_have_their_rows(tmp_path: Path):
    common = ["--dtypes", "float32", "--samples", "1"]
    rows, code = swept(
        tmp_path, [*common, "--kinds", "op", "--ops", "add", "nn.functional.dropout"]
    )
    assert code == 0
    assert {row["name"] for row in rows} == {"add", "nn.functional.dropout"}
    rows, code = swept(
        tmp_path, [*common, "--resume", "--kinds", "eval", "--ops", "nn.BatchNorm1d"]
    )
    assert code == 0
    assert len(rows) == 3


SOME = (
    "add",
    "as_strided.partial_views",
    "cdist",
    "index_put",
    "linalg.svd",
    "masked_select",
    "native_layer_norm",
    "nn.functional.batch_norm",
    "nn.functional.conv2d",
    "nn.functional.cross_entropy",
    "nn.functional.dropout",
    "nn.functional.embedding",
    "nn.functional.group_norm",
    "nn.functional.scaled_dot_product_attention",
    "scatter_reduce.amax",
    "sort",
    "var_mean",
)
"""Operators of every family: by rows, by channels, by indices, random, of sizes that data give."""


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_aot_eager_trains_has_its_bits_at_the_least_budget(tmp_path: Path, dtype: str):
    rows, code = swept(tmp_path, ["--kinds", "op", "--dtypes", dtype, "--ops", *SOME])
    failed = [row for row in rows if row["outcome"] in OUTCOMES[1:]]
    assert failed == []
    assert code == 0
    assert sum(row["outcome"] == "same" for row in rows) > len(rows) // 2


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["train", "eval"])
def test_modules_have_aot_eagers_bits_at_the_least_budget(tmp_path: Path, kind: str):
    names = ["nn.BatchNorm1d", "nn.Conv2d", "nn.LSTM", "nn.MultiheadAttention", "nn.GRUCell"]
    rows, code = swept(tmp_path, ["--kinds", kind, "--dtypes", "float32", "--ops", *names])
    assert [row for row in rows if row["outcome"] in OUTCOMES[1:]] == []
    assert code == 0


BY_THEMSELVES = (
    "combinations",
    "linalg.eig",
    "masked_select",
    "nn.functional.rrelu",
    "positive",
    "sort",
    "sparse.sampled_addmm",
    "split",
    "to_sparse",
    "unbind",
    "view_as_complex",
)
"""Results that are views, lists, sparse, complex, or of sizes that data give; random numbers."""


@pytest.mark.slow
def test_what_aot_eager_trains_by_itself_trains_within_its_budget(tmp_path: Path):
    common = ["--form", "plain", "--kinds", "op", "--dtypes", "float32", "--samples", "1"]
    rows, code = swept(tmp_path, [*common, "--ops", *BY_THEMSELVES])
    assert {row["name"] for row in rows} == {*BY_THEMSELVES}
    assert code == 0
    assert {row["outcome"] for row in rows} == {"same"}
    assert {"whole", "unplanned"} <= {row["planned"] for row in rows}
    assert not any("above" in kinds_of(row) for row in rows)
