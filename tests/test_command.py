"""The command: what it prints, and its exit codes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import fxremat
from fxremat.command import main

SOURCE = "tests.test_command:small"


def small() -> tuple[nn.Module, object]:
    """A model and a sample, as a source returns them."""
    model = nn.Sequential(nn.Linear(8, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU())
    return model, torch.ones(32, 8)


def no_pair() -> object:
    """No source."""
    return small()[0]


def printed(capsys: pytest.CaptureFixture[str]) -> dict[str, object]:
    found: dict[str, object] = json.loads(capsys.readouterr().out)
    return found


def test_estimate_prints_facts(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["estimate", SOURCE, "--device", "A100", "--json"]) == 0
    model, sample = small()
    assert printed(capsys) == json.loads(
        json.dumps(fxremat.estimate(model, sample, device="A100").facts())
    )


def test_estimate_prints_text(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["estimate", SOURCE, "--budget", "1MiB", "--max-batch"]) == 0
    out = capsys.readouterr().out
    assert "1.0 MiB" in out
    assert "args[0].shape[0]" in out


def test_what_does_not_fit_exits_with_1(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["estimate", SOURCE, "--budget", "1KiB", "--json"]) == 1
    assert printed(capsys)["fits"] is False
    assert main(["plan", SOURCE, "--budget", "1KiB"]) == 1
    assert capsys.readouterr().err


def test_a_share_is_a_budget(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["estimate", SOURCE, "--budget", "1.0", "--json"]) == 0
    found = printed(capsys)
    assert found["budget_bytes"] == found["peak_bytes"]


@pytest.mark.parametrize(
    "arguments",
    [
        ["estimate", "nothing"],
        ["estimate", "no.such.module:x"],
        ["estimate", "tests.test_command:nothing"],
        ["estimate", "tests.test_command:no_pair"],
        ["estimate", SOURCE, "--device", "abacus"],
        ["estimate", SOURCE, "--budget", "much"],
        ["estimate", SOURCE, "--optimizer", "Guess"],
        ["estimate", SOURCE, "--max-batch"],
        ["estimate", SOURCE, "--costs", "no/such.json"],
        ["estimate", "transformers:LlamaForCausalLM"],
        ["estimate", "transformers:LlamaForCausalLM", "--batch", "many"],
        ["estimate", "transformers:LlamaForCausalLM", "--batch", "2x8", "--dtype", "int8"],
        ["estimate", "transformers:LlamaForCausalLM", "--batch", "2x8", "--config", "no/such.json"],
        ["estimate", "transformers:AutoTokenizer", "--batch", "2x8"],
        ["report", "no/such.json"],
    ],
)
def test_wrong_arguments_exit_with_2(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    if any("transformers" in argument for argument in arguments):
        pytest.importorskip("transformers")
    assert main(arguments) == 2
    said = capsys.readouterr()
    assert said.err.startswith("fxremat: ")
    assert not said.out


@pytest.mark.parametrize("arguments", [[], ["guess"], ["plan", SOURCE]])
def test_what_argparse_refuses_exits_with_2(arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2


def test_a_plan_is_saved_reported_and_estimated_from(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = str(tmp_path / "plan.json")
    assert main(["plan", SOURCE, "--budget", "1.0", "--save", file, "--json"]) == 0
    facts = printed(capsys)
    plan = fxremat.Plan.load(file)
    assert facts["predicted_peak_bytes"] == plan.predicted_peak_bytes
    assert main(["report", file, "--json"]) == 0
    assert printed(capsys) == facts
    assert main(["report", file]) == 0
    assert capsys.readouterr().out
    assert main(["estimate", SOURCE, "--costs", file, "--json"]) == 0
    assert printed(capsys)["predicted_s"] == plan.baseline_s


def test_a_model_of_transformers_is_made_of_its_configuration(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("transformers")
    config = {
        "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
        "num_attention_heads": 4, "vocab_size": 100,
    }  # fmt: skip
    file = tmp_path / "config.json"
    file.write_text(json.dumps(config))
    command = ["estimate", "transformers:LlamaForCausalLM", "--config", str(file), "--json"]
    peaks = []
    for more in (["--batch", "2x16"], ["--batch", "4x16"], ["--batch", "2x16", "--dtype=bfloat16"]):
        assert main([*command, *more]) == 0
        peaks.append(printed(capsys)["peak_bytes"])
    assert peaks[2] < peaks[0] < peaks[1]  # type: ignore[operator]


@pytest.mark.parametrize("command", ["plan", "estimate"])
def test_a_page_is_written(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "plan.html"
    assert main([command, SOURCE, "--budget", "1.0", "--html", str(file)]) == 0
    assert "<html" in file.read_text()


def test_from_a_shell() -> None:
    command = [sys.executable, "-m", "fxremat", "estimate", SOURCE, "--budget", "1KiB"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stderr
    assert "does not fit" in done.stdout
