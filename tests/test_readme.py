"""README's code runs, its diffs apply, and it stays short."""

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
MOST_LINES = 120
FIRST_LINES = 40
"""Lines that a reader sees first. They answer what it does, where it runs, and the gain."""


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", TEXT, flags=re.DOTALL)


(EXAMPLE,) = blocks("python")
DIFFS = blocks("diff")


def with_diff(diff: str) -> str:
    """Return the code after a diff."""
    lines = [line[1:] for line in diff.splitlines() if not line.startswith("-")]
    return "\n".join(lines)


def test_it_is_short_and_answers_first() -> None:
    lines = TEXT.splitlines()
    assert len(lines) <= MOST_LINES
    first = "\n".join(lines[:FIRST_LINES])
    for answer in ("pip install", "Python 3.10", "torch 2.11", "Linux", "CUDA", "H200", "CPU"):
        assert answer in first
    assert EXAMPLE in first


def test_the_example_holds_its_budget_and_its_numbers() -> None:
    names: dict[str, Any] = {}
    plain: dict[str, Any] = {}
    torch.manual_seed(0)
    exec(re.sub(r"^model = fxremat.compile.*\n", "", EXAMPLE, flags=re.M), plain)
    torch.manual_seed(0)
    exec(EXAMPLE, names)
    model, optimizer, x = names["model"], names["optimizer"], names["x"]
    for mine, theirs in zip(model.parameters(), plain["model"].parameters(), strict=True):
        assert torch.equal(mine, theirs)

    def step() -> None:
        model(x).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    peak_bytes = fxremat.measure_step(model, step).peak_bytes
    assert peak_bytes <= model.plan.budget_bytes == 320 << 20
    assert model.plan.baseline_peak_bytes >> 20 == 547


def test_the_printed_plan_has_the_lines_of_a_real_one(capsys: pytest.CaptureFixture[str]) -> None:
    """The first column of the summary is compared; the numbers depend on the machine."""
    model = nn.Sequential(nn.Linear(64, 256), nn.GELU())
    fxremat.plan(model, torch.ones(512, 64), 1.0, loss=torch.sum).explain()
    text = capsys.readouterr().out
    labels = set(re.findall(r"^([a-z][a-z ]+?) {2,}\S", text, flags=re.M))
    found = re.findall(r"^```(\w*)\n(.*?)^```$", TEXT, flags=re.DOTALL | re.M)
    (printed,) = (text for language, text in found if not language)
    shown = set(re.findall(r"^([a-z][a-z ]+?) {2,}\S", printed, flags=re.M))
    assert shown
    assert shown <= labels | {"measured peak"}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


def training_loop(_folder: Path) -> dict[str, Any]:
    model = Net()
    loader = [(torch.randn(16, 8), torch.randint(8, (16,))) for _ in range(2)]
    optimizer = torch.optim.AdamW(model.parameters())
    x, y = loader[0]
    names = {"model": model, "loader": loader, "optimizer": optimizer, "x": x, "y": y}
    return {**names, "criterion": nn.CrossEntropyLoss()}


def trainer(folder: Path) -> dict[str, Any]:
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=2,
    )  # fmt: skip
    rows = torch.randint(64, (8, 16))
    return {
        "Trainer": transformers.Trainer,
        "model": transformers.LlamaForCausalLM(config),
        "dataset": [{"input_ids": row, "labels": row} for row in rows],
        "arguments": transformers.TrainingArguments(
            output_dir=str(folder), max_steps=2, per_device_train_batch_size=4, use_cpu=True,
            report_to=[], disable_tqdm=True,
        ),
    }  # fmt: skip


USES = {
    "fxremat.compile(": (training_loop, ""),
    "Trainer(": (trainer, "trainer.train()"),
    "torch.compile(": (training_loop, "model(x).sum().backward()"),
}
"""For a piece of each diff: the objects that it uses, and code that runs what it makes."""


def test_no_diff_is_left_out() -> None:
    assert len(DIFFS) == len(USES)
    for piece, diff in zip(USES, DIFFS, strict=True):
        assert piece in diff
        assert len(diff.splitlines()) <= 5


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("index", range(len(USES)))
def test_diffs_run(index: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    objects, after = list(USES.values())[index]
    names: dict[str, Any] = {"torch": torch, "fxremat": fxremat, **objects(tmp_path)}
    exec(f"{with_diff(DIFFS[index])}\n{after}", names)
