"""What README tells is true: its code runs."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fxremat

ROOT = Path(__file__).parent.parent
TEXT = (ROOT / "README.md").read_text()


def code(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", TEXT, flags=re.DOTALL)


def test_the_example_holds_its_budget(capsys: pytest.CaptureFixture[str]) -> None:
    names: dict[str, Any] = {}
    exec(code("python")[0], names)
    model, optimizer, x = names["model"], names["optimizer"], names["x"]
    assert "128.0 MiB (134217728 bytes)" in capsys.readouterr().out

    def step() -> None:
        model(x).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    peak_bytes = fxremat.measure_step(model, step).peak_bytes
    assert peak_bytes <= model.plan.budget_bytes == 128 << 20


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


def own_loop(_folder: Path) -> dict[str, Any]:
    model = Net()
    loader = [(torch.randn(16, 8), torch.randint(8, (16,))) for _ in range(2)]
    optimizer = torch.optim.AdamW(model.parameters())
    names = {"model": model, "loader": loader, "optimizer": optimizer}
    x, y = loader[0]
    return {**names, "x": x, "y": y, "criterion": nn.CrossEntropyLoss()}


def llama() -> tuple[Any, Any]:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=2,
    )  # fmt: skip
    return transformers, config


def trainer(folder: Path) -> dict[str, Any]:
    pytest.importorskip("accelerate")
    transformers, config = llama()
    rows = torch.randint(64, (8, 16))
    return {
        "transformers": transformers,
        "model": transformers.LlamaForCausalLM(config),
        "dataset": [{"input_ids": row, "labels": row} for row in rows],
        "arguments": transformers.TrainingArguments(
            output_dir=str(folder), max_steps=2, per_device_train_batch_size=4, use_cpu=True,
            report_to=[], disable_tqdm=True,
        ),
    }  # fmt: skip


def lightning_module(_folder: Path) -> dict[str, Any]:
    lightning = pytest.importorskip("lightning")

    class Module(lightning.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.net = Net()

        def training_step(self, batch: torch.Tensor, _index: int) -> torch.Tensor:
            return self.net(batch).square().mean()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), 1e-2)

    loader = torch.utils.data.DataLoader(torch.randn(32, 8), batch_size=16)
    return {"lightning": lightning, "lightning_module": Module(), "loader": loader}


def estimated(_folder: Path) -> dict[str, Any]:
    transformers, config = llama()
    ids = torch.randint(64, (2, 16))
    sample = {"input_ids": ids, "labels": ids}
    return {"transformers": transformers, "config": config, "sample": sample}


GIVEN = {
    'fxremat.compile(model, x, "6': own_loop,
    "transformers.Trainer(": trainer,
    "lightning.Trainer(": lightning_module,
    "fxremat.estimate(": estimated,
}
"""What a piece of code takes for given, by what is in it."""


def test_no_code_is_left_out() -> None:
    found = [[key for key in GIVEN if key in text] for text in code("python")[1:]]
    assert sorted(key for keys in found for key in keys) == sorted(GIVEN)
    assert all(len(keys) == 1 for keys in found)


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("key", list(GIVEN))
def test_code_runs(key: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (text,) = (text for text in code("python")[1:] if key in text)
    names: dict[str, Any] = {"torch": torch, "fxremat": fxremat, **GIVEN[key](tmp_path)}
    exec(text, names)
