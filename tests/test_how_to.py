"""How-to guides: their code runs, prints what they show, and their commands work."""

from __future__ import annotations

import os
import re
import shlex
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn

import fxremat
from fxremat.command import main
from tests.pages import DOCS, run_page

transformers = pytest.importorskip("transformers")
accelerate = pytest.importorskip("accelerate")
lightning = pytest.importorskip("lightning")
pytest.importorskip("peft")

FOLDER = DOCS / "how-to"

OPTIONAL = {"bitsandbytes", "hydra", "torchao", "trl"}
"""Libraries that only ``make test-works`` installs. Without them, blocks that import them are
skipped."""

VOCABULARY, LENGTH, WIDTH = 97, 24, 64

pytestmark = [
    pytest.mark.usefixtures("fresh_dynamo"),
    pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning"),
]


def config() -> Any:
    return transformers.LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=WIDTH, intermediate_size=2 * WIDTH,
        num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2,
        max_position_embeddings=4096, bos_token_id=0, eos_token_id=1, use_cache=False,
    )  # fmt: skip


def llama() -> nn.Module:
    return transformers.LlamaForCausalLM(config())


def batch(rows: int = 4, length: int = LENGTH) -> dict[str, torch.Tensor]:
    ids = torch.randint(2, VOCABULARY, (rows, length))
    return {"input_ids": ids, "labels": ids}


def block() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))


def network() -> nn.Module:
    return nn.Sequential(*(block() for _ in range(4)))


class Layered(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(block() for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x


def rows() -> torch.Tensor:
    return torch.randn(256, WIDTH)


def trainer() -> dict[str, Any]:
    dataset = [{name: own[0] for name, own in batch(1).items()} for _ in range(8)]
    arguments = transformers.TrainingArguments(
        output_dir="first", max_steps=2, per_device_train_batch_size=4, report_to=[]
    )
    return {"model": llama(), "dataset": dataset, "arguments": arguments}


def lightning_modules() -> dict[str, Any]:
    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = network()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.net(x)

        def training_step(self, x: torch.Tensor, _index: int) -> torch.Tensor:
            return self(x).square().mean()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters())

    loader = torch.utils.data.DataLoader(torch.randn(512, WIDTH), batch_size=256)
    return {"module": Module(), "loader": loader, "build_net": network}


def classified() -> dict[str, Any]:
    data = torch.utils.data.TensorDataset(torch.randn(512, WIDTH), torch.randint(WIDTH, (512,)))
    model, loader = network(), torch.utils.data.DataLoader(data, batch_size=256)
    x, y = next(iter(loader))
    return {
        "model": model, "build_model": network, "loader": loader, "x": x, "y": y,
        "optimizer": torch.optim.AdamW(model.parameters()), "criterion": nn.CrossEntropyLoss(),
    }  # fmt: skip


def adapted() -> dict[str, Any]:
    one = batch()

    def in_layers(module: nn.Module, name: str) -> bool:
        return isinstance(module, nn.Linear) and "lm_head" not in name

    llama().save_pretrained("checkpoint")
    return {
        "base": llama(), "other_base": llama(), "checkpoint": "checkpoint", "batch": one,
        "loader": [batch() for _ in range(2)], "in_layers": in_layers,
    }  # fmt: skip


def gan() -> dict[str, Any]:
    def critic() -> nn.Module:
        return nn.Sequential(block(), nn.Linear(WIDTH, 1))

    images, noise = rows(), rows()
    return {
        "generator": network(), "critic": critic(), "noise": noise, "images": images,
        "loader": [rows() for _ in range(2)], "criterion": nn.BCEWithLogitsLoss(),
        "real": torch.ones(256, 1), "wrong": torch.zeros(256, 1),
        "teacher": network(), "student": network(), "x": rows(),
    }  # fmt: skip


def configured() -> dict[str, Any]:
    page = (FOLDER / "configuration-files.md").read_text()
    (text,) = re.findall(r"```yaml\n(.*?)```", page, flags=re.S)
    Path("train.yaml").write_text(text)
    return {"model": llama(), "batch": batch(), "build_model": llama}


def estimated() -> dict[str, Any]:
    config().save_pretrained(".")
    Path("config.json").rename("1b.json")
    Path("my").mkdir()
    Path("my/module.py").write_text(
        "import torch\n\n\ndef build():\n    return torch.nn.Linear(8, 8), torch.ones(4, 8)\n"
    )
    return {"config": config(), "net": network(), "x": rows()}


GIVEN: dict[str, Callable[[], dict[str, Any]]] = {
    "trainer.md": trainer,
    "lightning.md": lightning_modules,
    "accelerate.md": classified,
    "peft-and-qlora.md": adapted,
    "ddp-and-fsdp2.md": lambda: {
        "build_model": Layered, "x": rows(), "loader": [rows() for _ in range(4)],
    },
    "offload.md": lambda: {
        "model": (model := network()), "build_model": network, "sample": rows(),
        "optimizer": torch.optim.AdamW(model.parameters()),
    },
    "several-graphs.md": lambda: {"block": block, "x": rows()},
    "long-sequences.md": lambda: {"config": config(), "batch": batch(2, 48)},
    "estimate.md": estimated,
    "configuration-files.md": configured,
    "several-networks.md": gan,
    "torch-compile.md": lambda: {
        "model": (model := network()), "net": network(), "other": network(), "x": rows(),
        "loader": [rows() for _ in range(2)],
        "optimizer": torch.optim.AdamW(model.parameters()),
    },
}  # fmt: skip
"""By page, what its code is given: small objects of the kinds that a reader has."""

OF_OTHERS = {"README.md", "read-a-plan.md", "report-a-problem.md"}
"""Pages without code of this kind."""


@contextmanager
def one_process() -> Iterator[None]:
    """Set the environment that ``torchrun`` gives a process that trains by itself."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"}
    accelerate.state.AcceleratorState._reset_state(True)
    with patch.dict(os.environ, environment | {"MASTER_PORT": str(port)}):
        yield
    accelerate.state.AcceleratorState._reset_state(True)
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def check_shell(text: str) -> None:
    """Run a command of fxremat, or let the parser of another one read it."""
    for line in text.splitlines():
        command, *words = shlex.split(line)
        if command == "fxremat":
            assert main(words) == 0, line
        elif command == "torchrun":
            from torch.distributed.run import get_args_parser

            assert get_args_parser().parse_args(words).nproc_per_node
        else:
            assert (command, words[0]) == ("pip", "install"), line
            extras = re.findall(r"\.\[(.*?)\]", line)
            settings = (DOCS.parent / "pyproject.toml").read_text()
            assert all(re.search(rf"^{extra} = \[", settings, flags=re.M) for extra in extras), line


def check_yaml(text: str) -> None:
    yaml = pytest.importorskip("yaml")
    options = fxremat.Options.from_dict(yaml.safe_load(text)["fxremat"])
    assert options.arguments() == {"budget": "20GiB", "loss": "own", "offload": "auto"}


def run_guide(name: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Run a guide, and return the libraries that its code lacks here."""
    monkeypatch.chdir(folder)
    monkeypatch.setenv("FXREMAT_PROGRESS", "0")
    monkeypatch.setattr(sys, "path", [*sys.path, str(folder)])
    names = {"torch": torch, "nn": nn, "fxremat": fxremat, "transformers": transformers}
    page = FOLDER / name
    with one_process():
        torch.manual_seed(0)
        others = {"shell": check_shell, "yaml": check_yaml}
        missing = run_page(page, {**names, **GIVEN[name]()}, folder, others)
    for line in re.findall(r"`(fxremat (?:estimate|plan|report) .*?)`", page.read_text()):
        check_shell(line)
    return missing


def test_every_guide_is_run() -> None:
    assert {page.name for page in FOLDER.glob("*.md")} <= GIVEN.keys() | OF_OTHERS
    index = (FOLDER / "README.md").read_text()
    assert all(f"({name})" in index for name in GIVEN)


@pytest.mark.parametrize("name", GIVEN)
def test_a_guide_does_what_it_says(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run_guide(name, tmp_path, monkeypatch) <= OPTIONAL
