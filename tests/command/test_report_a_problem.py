"""The page ``docs/how-to/report-a-problem.md``: its program, and what its commands print."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from fxremat.command import main

PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "report-a-problem.md"

NUMBERS = re.compile(r"[0-9][0-9.,]*|\b(?:B|[KMG]iB|[mµ]?s)\b|(?<=_)[0-9a-f]{8}\b")
"""Numbers and units, which differ by machine, and digests."""


def shown(command: str) -> list[str]:
    """The lines that the page shows for a command."""
    (block,) = re.findall(rf"```console\n\$ {re.escape(command)}\n(.+?)```", PAGE.read_text(), re.S)
    return str(block).splitlines()


def words(text: str) -> set[str]:
    """The words of a text, without numbers."""
    return set(NUMBERS.sub("", text).split())


def test_env_prints_the_lines_of_the_page(capsys: pytest.CaptureFixture[str]) -> None:
    main(["env"])
    printed = {line.split("  ")[0] for line in capsys.readouterr().out.splitlines()}
    expected = {line.split("  ")[0] for line in shown("fxremat env")}
    optional = {"transformers", "devices", "$OMP_NUM_THREADS"}
    assert expected - optional <= printed


def test_doctor_prints_the_text_of_the_page(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (code,) = re.findall(r"```python\n(.+?)```", PAGE.read_text(), re.S)
    (tmp_path / "net.py").write_text(code)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("FXREMAT_CACHE", str(tmp_path / "cache"))
    monkeypatch.delitem(sys.modules, "net", raising=False)
    assert main(["doctor", "net:build", "--optimizer", "AdamW"]) == 0
    printed = capsys.readouterr().out
    expected = "\n".join(shown("fxremat doctor net:build --optimizer AdamW"))
    fixed = expected.replace("~/.cache/fxremat", "")  # where the test's folder is
    missing = words(fixed) - words(printed)
    assert not {word for word in missing if not word.startswith("parts_")}
    assert "9859744 bytes" in expected and "9859744 bytes" in printed  # bytes do not vary
