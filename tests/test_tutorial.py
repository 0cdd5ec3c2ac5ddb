"""The tutorial: its code runs, and prints what the page shows."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.pages import DOCS, run_page

pytest.importorskip("transformers")


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
def test_the_tutorial_shows_what_is_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FXREMAT_PROGRESS", "0")
    assert not run_page(DOCS / "tutorial.md", {}, tmp_path, {"shell": lambda _text: None})
