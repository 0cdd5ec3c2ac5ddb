"""The notebook: its cells run, and their saved outputs are what they print."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.notebook import code_cells, run_cells
from tests.pages import compare

pytest.importorskip("peft")
pytest.importorskip("transformers")
pytest.importorskip("matplotlib")

NOTEBOOK = Path(__file__).parent.parent / "examples" / "lora.ipynb"


def text_of(output: dict[str, Any]) -> str:
    """Return the text of an output that is no picture."""
    lines = output["text"] if output["output_type"] == "stream" else output["data"]["text/plain"]
    return "".join(lines)


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
def test_cells_print_what_the_notebook_shows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FXREMAT_PROGRESS", "0")
    monkeypatch.setenv("MPLBACKEND", "Agg")
    cells = code_cells(NOTEBOOK)
    for cell, outputs in zip(cells, run_cells(cells, tmp_path), strict=True):
        kinds = [[own["output_type"] for own in group] for group in (cell["outputs"], outputs)]
        assert kinds[0] == kinds[1]
        for shown, found in zip(cell["outputs"], outputs, strict=True):
            assert shown.get("data", {}).keys() == found.get("data", {}).keys()
            compare(text_of(shown), text_of(found), NOTEBOOK.name)


def test_the_notebook_is_small_and_shows_its_claims() -> None:
    assert NOTEBOOK.stat().st_size < 200_000
    printed = [text_of(own) for cell in code_cells(NOTEBOOK) for own in cell["outputs"]]
    for claim in ("within the budget", "less than before", "same losses, to the last bit"):
        assert any(f"{claim}: True" in text for text in printed)
    pictures = [own for cell in code_cells(NOTEBOOK) for own in cell["outputs"] if "data" in own]
    assert any("image/png" in own["data"] for own in pictures)
