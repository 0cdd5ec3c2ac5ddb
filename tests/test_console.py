"""Tables on the console, whatever it can show."""

from __future__ import annotations

import io
import os
import random
import subprocess
import sys

import pytest

from fxremat.console import Table, show


class Out(io.TextIOWrapper):
    """A standard output of some encoding, which refuses what it cannot write."""

    def __init__(self, encoding: str) -> None:
        self.written = io.BytesIO()
        super().__init__(self.written, encoding=encoding, errors="strict", write_through=True)


def table() -> Table:
    made = Table(title="5 µs × 3 …")
    made.add_column("stage", no_wrap=True, max_width=20)
    made.add_column("größe")
    made.add_row("stage of a name that is far too long for its column", "α")
    return made


def shown(encoding: str, monkeypatch: pytest.MonkeyPatch) -> str:
    out = Out(encoding)
    monkeypatch.setattr(sys, "stdout", out)
    text = show(table(), width=40)
    assert text == out.written.getvalue().decode(encoding)
    return text


def test_what_can_show_everything_gets_everything(monkeypatch: pytest.MonkeyPatch):
    text = shown("utf-8", monkeypatch)
    assert all(sign in text for sign in ("µ", "×", "…", "größe", "α", "┃", "━"))
    assert shown("utf-16", monkeypatch) == text


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "cp1252", "cp437", "koi8-r"])
def test_what_cannot_gets_the_same_table_in_ascii(encoding: str, monkeypatch: pytest.MonkeyPatch):
    text = shown(encoding, monkeypatch)
    assert text.isascii()
    full = shown("utf-8", monkeypatch)
    assert len(text.splitlines()) == len(full.splitlines())
    assert "5 us x 3 ~" in text
    assert "stage" in text and "gr" in text and "|" in text and "---" in text


def test_an_output_without_an_encoding(monkeypatch: pytest.MonkeyPatch):
    out = io.StringIO()
    monkeypatch.setattr(sys, "stdout", out)
    assert show(table(), width=40) == out.getvalue()


def test_without_an_output_there_is_still_the_text(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sys, "stdout", None)
    assert "stage" in show(table(), width=40)


EXPLAIN = """
import sys
from tests.plans import everything_kept, plan_of
text = plan_of(everything_kept(2), stages=2).explain()
sys.exit(not text.strip())
"""


def explained(**environment: str) -> bytes:
    """What ``explain()`` writes to a pipe in a process with such an environment."""
    unset = ("LC_ALL", "LC_CTYPE", "LANG", "PYTHONIOENCODING", "PYTHONUTF8")
    base = {name: value for name, value in os.environ.items() if name not in unset}
    done = subprocess.run(
        [sys.executable, "-c", EXPLAIN],
        env={**base, **environment},
        capture_output=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_plan_is_explained_on_any_terminal():
    whole = explained(PYTHONIOENCODING="utf-8").decode()
    assert "─" in whole
    for environment in (
        {"PYTHONIOENCODING": "ascii"},
        {"PYTHONIOENCODING": "ascii:strict", "LC_ALL": "C.UTF-8"},
        {"PYTHONIOENCODING": "latin-1"},
        {"LC_ALL": "C"},
        {"LC_ALL": "C", "PYTHONUTF8": "0"},
        {"LC_ALL": "POSIX"},
    ):
        text = explained(**environment)
        assert text.isascii(), environment
        lines = text.decode().splitlines()
        assert [len(line) for line in lines] == [len(line) for line in whole.splitlines()]


def test_loading_it_draws_no_random_number():
    code = (
        "import random; state = random.getstate(); import fxremat.console; "
        "raise SystemExit(random.getstate() != state)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_showing_draws_no_random_number():
    state = random.getstate()
    show(table(), width=40)
    assert random.getstate() == state


def test_without_rich_the_remedy_is_named():
    code = "import sys; sys.modules['rich'] = None; import fxremat.console"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode and "ImportError" in done.stderr and "pip install rich" in done.stderr
