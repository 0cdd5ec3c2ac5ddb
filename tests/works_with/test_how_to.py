"""How-to guides whose code imports libraries that only this environment has."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import fxremat
from tests import test_how_to as guides
from tests.pages import blocks_in
from tests.works_with.test_trl import sentences, tokenizer

pytest.importorskip("bitsandbytes")
pytest.importorskip("torchao")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.usefixtures("fresh_dynamo"),
    pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning"),
]


def tuned() -> dict[str, Any]:
    return {**guides.trainer(), "tokenized": sentences(), "tokenizer": tokenizer()}


@pytest.mark.parametrize("name", ["trainer.md", "peft-and-qlora.md", "configuration-files.md"])
def test_a_guide_runs_as_a_whole(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(guides.GIVEN, "trainer.md", tuned)
    assert not guides.run_guide(name, tmp_path, monkeypatch)


def test_hydra_fills_the_options(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hydra = pytest.importorskip("hydra")
    monkeypatch.chdir(tmp_path)
    names = guides.configured() | {"fxremat": fxremat}
    blocks = blocks_in((guides.FOLDER / "configuration-files.md").read_text())
    (block,) = (own for own in blocks if "@hydra.main" in own.text)
    exec(block.code, names)
    with hydra.initialize(version_base=None):
        config = hydra.compose("config", overrides=["fxremat.budget=20GiB", "fxremat.loss=own"])
    model = names["main"].__wrapped__(config)
    assert model.plan.budget_bytes == 20 << 30
