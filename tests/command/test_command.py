"""The command: what it prints, and its exit codes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import nn

import fxremat
from fxremat.command import main

SOURCE = "tests.command.test_command:small"


def small() -> tuple[nn.Module, object]:
    """A model and a sample, as a source returns them."""
    model = nn.Sequential(nn.Linear(8, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU())
    return model, torch.ones(32, 8)


class Scored(nn.Module):
    """Returns its loss, and what it is computed from, which is large."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 512)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        scores = self.layer(x)
        return nn.functional.cross_entropy(scores, labels), scores


def scored() -> tuple[nn.Module, object]:
    """Of a model that computes its own loss."""
    return Scored(), (torch.ones(32, 8), torch.zeros(32, dtype=torch.long))


def failing() -> tuple[nn.Module, object]:
    """Its own code is wrong."""
    raise ZeroDivisionError("of the\nmodel itself")


def mismatched() -> tuple[nn.Module, object]:
    """The model rejects its sample."""
    return nn.Linear(8, 8), torch.ones(32, 9)


def no_pair() -> object:
    """No source."""
    return small()[0]


@pytest.fixture(autouse=True)
def no_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    """What goes wrong is all that is told."""
    monkeypatch.setenv("FXREMAT_PROGRESS", "0")


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
        ["estimate", "tests.command.test_command:nothing"],
        ["estimate", "tests.command.test_command:no_pair"],
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
        ["plan", SOURCE, "--budget", "1.0", "--device", "H100"],
        ["plan", SOURCE, "--budget", "1.0", "--device", "abacus"],
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


@pytest.mark.parametrize("command", ["estimate", "plan"])
@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("failing", ("ZeroDivisionError: of the model itself",)),
        ("mismatched", ("RuntimeError", "32")),
    ],
)
def test_a_model_that_fails_exits_with_3(
    command: str, name: str, words: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [command, f"tests.command.test_command:{name}", "--budget", "1GiB"]
    assert main(arguments) == 3
    said = capsys.readouterr()
    assert not said.out
    assert said.err.count("\n") == 1 and all(word in said.err for word in words)
    assert main([*arguments, "--traceback"]) == 3
    assert "Traceback" in capsys.readouterr().err


def test_models_of_timm_are_made_by_name(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    made: list[dict[str, object]] = []

    def create_model(name: str, **keywords: object) -> nn.Module:
        made.append({"name": name, **keywords})
        return nn.Sequential(nn.Flatten(), nn.Linear(12, 4))

    library = ModuleType("timm")
    library.list_models = lambda: ["net"]  # type: ignore[attr-defined]
    library.create_model = create_model  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "timm", library)
    config = tmp_path / "config.json"
    config.write_text('{"num_classes": 4}')
    arguments = ["estimate", "timm:net", "--config", str(config), "--json"]
    assert main([*arguments, "--batch", "8x3x2x2"]) == 0
    assert made == [{"name": "net", "pretrained": False, "num_classes": 4}]
    assert printed(capsys)["fits"] is True
    assert main(["estimate", "timm:other", "--batch", "8x3x2x2"]) == 2
    assert main(arguments) == 2
    assert "8x3x224x224" in capsys.readouterr().err


def test_the_loss_of_a_model_that_returns_it_is_known(capsys: pytest.CaptureFixture[str]) -> None:
    source = "tests.command.test_command:scored"
    model, sample = scored()
    peaks = []
    for more in ([], ["--loss", "own"], ["--loss", "outside"], ["--drop-unused"]):
        assert main(["estimate", source, "--json", *more]) == 0
        peaks.append(printed(capsys)["peak_bytes"])
    assert peaks[0] == peaks[1] == fxremat.estimate(model, sample, loss="own").peak_bytes
    assert peaks[3] < peaks[1] < peaks[2]  # type: ignore[operator]
    assert main(["plan", source, "--budget", "1.0", "--json"]) == 0
    assert (
        printed(capsys)["budget_bytes"] == fxremat.plan(model, sample, 1.0, loss="own").budget_bytes
    )


def test_flags_are_options_of_compile(capsys: pytest.CaptureFixture[str]) -> None:
    model, sample = small()
    flags = "--bits rounding --effort 2 --forms parts --host-limit 1MiB --offload only"
    command = ["plan", SOURCE, "--budget", "1.0 reserved", "--json", *flags.split()]
    assert main(command) == 0
    expected = fxremat.plan(
        model,
        sample,
        "1.0 reserved",
        bits="rounding",
        effort=fxremat.Effort(2, forms=("parts",)),
        offload=fxremat.HostMemory("only", limit="1MiB"),
    )
    assert printed(capsys)["budget_bytes"] == expected.budget_bytes
    assert main(["plan", SOURCE, "--budget", "1.0", "--host-limit", "1MiB"]) == 2
    assert "offload" in capsys.readouterr().err


def test_help_and_version_are_there_without_torch() -> None:
    for argument, word in (("--help", "estimate"), ("--version", fxremat.__version__)):
        code = f"import sys; from fxremat.command import main; sys.argv[1:] = ['{argument}']\n"
        code += "try: main()\nexcept SystemExit as e: sys.exit(e.code or 'torch' in sys.modules)"
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        assert word in done.stdout


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
    assert facts["at_peak"] == [row.facts() for row in plan.at_peak()]
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
    assert main([*command, "--batch", "2x16", "--dtype=bf16", "--device", "RTX 4090"]) == 0
    assert printed(capsys)["device"] == "4090"


def test_labels_are_of_the_shape_that_the_model_takes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("transformers")
    file = tmp_path / "config.json"
    config = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1}
    file.write_text(json.dumps({**config, "num_attention_heads": 4, "vocab_size": 100}))
    source = "transformers:BertForSequenceClassification"
    assert main(["estimate", source, "--config", str(file), "--batch", "2x16", "--json"]) == 0
    assert printed(capsys)["fits"] is True


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
