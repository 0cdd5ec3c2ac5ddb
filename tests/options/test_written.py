"""Options from a dict, a command line and a structured config are those that compile takes."""

from __future__ import annotations

import dataclasses
import inspect
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fxremat
from fxremat.options.arguments import Arguments

NEVER_TEXT = {"model", "sample", "target", "regions", "ranks", "generators"}
OTHERS: dict[str, Any] = {
    "budget": "6 GiB", "reserve": "64 MiB", "optimizer": "AdamW", "loss": "own",
    "drop_unused": True, "accumulate": True, "offload": "auto", "host_limit": "8G",
    "host_dir": ".", "exact": False, "split": True, "budget_on": "reserved", "executor": "inductor",
    "dynamic": False, "fullgraph": True, "in_flight": 2, "strict": True,
    "assume": "strict", "effort": 2.0, "verify_bits": 100,
}  # fmt: skip


def small() -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    blocks = (nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16)) for _ in range(4))
    return nn.Sequential(*blocks), torch.randn(256, 16)


def test_they_are_arguments_of_compile() -> None:
    names = {field.name for field in dataclasses.fields(fxremat.Options)}
    assert names == set(inspect.signature(fxremat.compile).parameters) - NEVER_TEXT
    assert set(OTHERS) == names - {"plan"}


def test_defaults_are_those_of_compile() -> None:
    options = fxremat.Options("6 GiB")
    assert options.arguments() == {"budget": "6 GiB"}
    written = dataclasses.asdict(options) | {"offload": False}
    assert Arguments.read(**written) == Arguments.read("6 GiB")


@pytest.mark.parametrize("name", OTHERS)
def test_every_option_is_passed_on(name: str) -> None:
    values = {"budget": "1 GiB", name: OTHERS[name]}
    assert fxremat.Options.from_dict(values).arguments() == values


@pytest.mark.parametrize("budget", ["90%", "0.9", 0.9])
def test_a_dict_plans_as_arguments_do(budget: str | float) -> None:
    model, x = small()
    options = fxremat.Options.from_dict({"budget": budget, "optimizer": "AdamW"})
    found = fxremat.estimate(model, x, **options.arguments())
    expected = fxremat.estimate(model, x, budget=0.9, optimizer=torch.optim.AdamW)
    assert found == expected
    assert found.plan is not None


@pytest.mark.parametrize(
    "written, nbytes", [("6G", 6 * 10**9), ("6GB", 6 * 10**9), ("6GiB", 6 << 30)]
)
def test_bytes_are_decimal_or_binary(written: str, nbytes: int) -> None:
    arguments = fxremat.Options(written).arguments()
    assert Arguments.read(**arguments).budget.nbytes == nbytes


def test_the_file_of_the_docs_is_read() -> None:
    yaml = pytest.importorskip("yaml")
    text = (Path(__file__).parents[2] / "docs" / "integrations.md").read_text()
    (block,) = re.findall(r"```yaml\n(.*?)```", text, flags=re.DOTALL)
    options = fxremat.Options.from_dict(yaml.safe_load(block)["fxremat"])
    assert Arguments.read(**options.arguments()) == Arguments.read(
        "20GiB", loss="own", offload="auto"
    )


def test_no_optimizer_can_be_told() -> None:
    assert fxremat.Options("1 GiB", optimizer="none").arguments()["optimizer"] is None


@pytest.mark.parametrize("optimizer", ["Guess", "lr_scheduler", ""])
def test_a_name_of_no_optimizer_is_refused(optimizer: str) -> None:
    model, x = small()
    with pytest.raises(fxremat.ArgumentError) as caught:
        fxremat.compile(model, x, "1 GiB", optimizer=optimizer)
    assert caught.value.argument == "optimizer"


@pytest.mark.parametrize("values, argument", [({"budgte": 1}, "budgte"), ({}, "budget")])
def test_a_wrong_name_is_refused(values: dict[str, Any], argument: str) -> None:
    with pytest.raises(fxremat.ArgumentError) as caught:
        fxremat.Options.from_dict(values)
    assert caught.value.argument == argument


def test_a_command_line_fills_them_beside_those_of_a_trainer(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    parser = transformers.HfArgumentParser((transformers.TrainingArguments, fxremat.Options))
    line = f"--output_dir {tmp_path} --budget 6GiB --drop_unused --no_exact --dynamic false"
    _, options = parser.parse_args_into_dataclasses([*line.split(), "--loss", "own"])
    assert options.arguments() == {
        "budget": "6GiB", "loss": "own", "drop_unused": True, "exact": False, "dynamic": False,
    }  # fmt: skip


def test_a_structured_config_takes_overrides() -> None:
    omegaconf = pytest.importorskip("omegaconf")
    config = omegaconf.OmegaConf.structured(fxremat.Options)
    config.budget = 0.5
    config.merge_with_dotlist(["in_flight=2", "offload=auto"])
    expected = {"budget": "0.5", "in_flight": 2, "offload": "auto"}
    assert fxremat.Options.from_dict(config).arguments() == expected
