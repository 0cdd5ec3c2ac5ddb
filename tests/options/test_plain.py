"""Options from a dict, a command line and a structured config are those that compile takes."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fxremat
from fxremat.options.arguments import Arguments
from fxremat.options.loss import own_loss
from fxremat.options.plain import gathered
from fxremat.options.table import OPTIONS

OTHERS: dict[str, Any] = {
    "budget": "6 GiB reserved", "reserve": "64 MiB", "optimizer": "AdamW", "loss": "own",
    "accumulate": True, "offload": "auto", "bits": "rounding", "effort": 2.0,
    "executor": "inductor", "dynamic": False, "regions": "one", "in_flight": 2, "strict": True,
    "assume": "strict",
}  # fmt: skip
"""A value of each option but its default, as ``compile`` takes it."""

TOGETHER: list[tuple[dict[str, Any], str, Any]] = [
    (
        {"offload": "only", "host_limit": "8G", "host_dir": "."},
        "offload",
        fxremat.HostMemory("only", limit="8G", folder="."),
    ),
    ({"verify_bits": 100}, "bits", fxremat.Bits(verify_every=100)),
    ({"bits": "rounding", "verify_bits": 2}, "bits", fxremat.Bits("rounding", verify_every=2)),
    (
        {"effort": 2.0, "generators": "rotor, join", "forms": "norms"},
        "effort",
        fxremat.Effort(2.0, generators=("rotor", "join"), forms=("norms",)),
    ),
    ({"forms": ""}, "effort", fxremat.Effort(forms=())),
    ({"regions": "layers.0, layers.1"}, "regions", ("layers.0", "layers.1")),
]
"""Plain values, and the argument that they make up."""


def small() -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    blocks = (nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16)) for _ in range(4))
    return nn.Sequential(*blocks), torch.randn(256, 16)


def test_every_option_that_text_can_say_has_its_values() -> None:
    names = {field.name for field in dataclasses.fields(fxremat.Options)}
    assert names == {"budget", *(field.name for option in OPTIONS for field in option.fields)}
    bare = {option.name for option in OPTIONS if not option.fields}
    assert bare == {"ranks", "policy"}
    assert set(OTHERS) == {"budget", *(option.name for option in OPTIONS)} - bare - {"plan"}


def test_defaults_are_those_of_compile() -> None:
    options = fxremat.Options("6 GiB")
    assert options.arguments() == {"budget": "6 GiB"}
    written = gathered(dataclasses.asdict(options))
    assert Arguments.read(**written) == Arguments.read("6 GiB")


@pytest.mark.parametrize("name", OTHERS)
def test_every_option_is_passed_on(name: str) -> None:
    values = {"budget": "1 GiB", name: OTHERS[name]}
    assert fxremat.Options.from_dict(values).arguments() == values


@pytest.mark.parametrize(("values", "name", "expected"), TOGETHER, ids=str)
def test_values_make_up_one_argument(values: dict[str, Any], name: str, expected: Any) -> None:
    options = fxremat.Options.from_dict({"budget": "1 GiB", **values})
    assert options.arguments() == {"budget": "1 GiB", name: expected}


def test_outputs_are_dropped_with_a_loss_only() -> None:
    options = fxremat.Options("1 GiB", loss="own", drop_unused=True)
    read = Arguments.read(**options.arguments())
    assert read.drop_unused and read.loss is own_loss
    with pytest.raises(fxremat.ArgumentError, match="loss="):
        fxremat.Options("1 GiB", drop_unused=True).arguments()


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
    text = (Path(__file__).parents[2] / "docs/how-to/configuration-files.md").read_text()
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


@pytest.mark.parametrize(
    "values, argument",
    [({"budgte": 1}, "budgte"), ({"budget": 1, "split": True}, "split"), ({}, "budget")],
)
def test_a_wrong_name_is_refused(values: dict[str, Any], argument: str) -> None:
    with pytest.raises(fxremat.ArgumentError) as caught:
        fxremat.Options.from_dict(values)
    assert caught.value.argument == argument


def test_a_command_line_fills_them_beside_those_of_a_trainer(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    parser = transformers.HfArgumentParser((transformers.TrainingArguments, fxremat.Options))
    line = f"--output_dir {tmp_path} --budget 6GiB --bits rounding --dynamic false"
    _, options = parser.parse_args_into_dataclasses([*line.split(), "--loss", "own"])
    assert options.arguments() == {
        "budget": "6GiB", "loss": "own", "bits": "rounding", "dynamic": False,
    }  # fmt: skip


def test_a_structured_config_takes_overrides() -> None:
    omegaconf = pytest.importorskip("omegaconf")
    config = omegaconf.OmegaConf.structured(fxremat.Options)
    config.budget = 0.5
    config.merge_with_dotlist(["in_flight=2", "offload=auto"])
    expected = {"budget": "0.5", "in_flight": 2, "offload": "auto"}
    assert fxremat.Options.from_dict(config).arguments() == expected
