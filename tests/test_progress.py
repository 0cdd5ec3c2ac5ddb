"""How far planning has come: on a terminal, elsewhere, and not at all."""

from __future__ import annotations

import io
import itertools
import logging
import os
import pty
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import fxremat
from fxremat.effort import DEFAULT_GENERATORS
from fxremat.progress import CAPTURE, MEASURE, PLAN, WRITE, shown, silent

SECONDS = re.compile(r"^(.+): \d+\.\d s$")


class Terminal(io.StringIO):
    """A terminal that keeps what it is given."""

    def isatty(self) -> bool:
        return True


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Callable[[], Terminal]:
    """Makes the standard error output one; pytest's own is there only once a test runs."""
    monkeypatch.delenv("FXREMAT_PROGRESS", raising=False)
    monkeypatch.setenv("TERM", "xterm")

    def made() -> Terminal:
        monkeypatch.setattr(sys, "stderr", found := Terminal())
        return found

    return made


@pytest.fixture
def elsewhere(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> Callable[[], list[str]]:
    """No terminal; gives the phases that were logged."""
    monkeypatch.delenv("FXREMAT_PROGRESS", raising=False)
    caplog.set_level(logging.INFO, logger="fxremat")

    def phases() -> list[str]:
        found = [SECONDS.match(record.getMessage()) for record in caplog.records]
        return [match[1] for match in found if match]

    return phases


def small() -> tuple[nn.Module, torch.Tensor]:
    layers = [nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8)) for _ in range(3)]
    return nn.Sequential(*layers), torch.ones(16, 8)


def ended(text: str) -> list[str]:
    """Phases whose lines stay on a terminal."""
    plain = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", text)
    found = [SECONDS.match(line.strip().split("\r")[-1]) for line in plain.split("\n")]
    return [match[1].removeprefix("fxremat: ") for match in found if match]


def test_a_terminal_has_bars_and_a_line_a_phase(terminal: Callable[[], Terminal]):
    out = terminal()
    with shown() as progress:
        progress(CAPTURE)
        progress(MEASURE, 0, 7)
        assert "0/7" in out.getvalue()
        progress(MEASURE, 7, 7)
    assert ended(out.getvalue()) == [CAPTURE, MEASURE]
    assert out.getvalue().endswith("s\n")


def test_what_others_write_meanwhile_stays(terminal: Callable[[], Terminal]):
    out = terminal()
    with shown() as progress:
        progress(CAPTURE)
        out.write("a warning\n")
        progress(MEASURE, 0, 7)
    after = out.getvalue().partition("a warning\n")[2]
    moves = [1 if move == "\n" else -1 for move in re.findall(r"\n|\x1b\[1A", after)]
    assert all(row >= 0 for row in itertools.accumulate(moves))  # never above what follows it
    assert ended(out.getvalue()) == [CAPTURE, MEASURE]


def test_elsewhere_phases_are_logged(
    elsewhere: Callable[[], list[str]], capsys: pytest.CaptureFixture[str]
):
    with shown() as progress:
        progress(CAPTURE)
        progress(MEASURE, 0, 2)
        progress(MEASURE, 1, 2)
        assert elsewhere() == [CAPTURE]
    assert elsewhere() == [CAPTURE, MEASURE]
    assert capsys.readouterr().err == ""


def test_without_rich_a_terminal_is_elsewhere(
    terminal: Callable[[], Terminal],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
):
    out = terminal()
    monkeypatch.setattr("fxremat.optional.find", lambda _name: None)
    caplog.set_level(logging.INFO, logger="fxremat")
    with shown() as progress:
        progress(CAPTURE)
    assert CAPTURE in caplog.text
    assert not ended(out.getvalue())


@pytest.mark.parametrize("on_terminal", [True, False])
def test_it_can_be_turned_off(
    on_terminal: bool, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    out = Terminal() if on_terminal else io.StringIO()
    monkeypatch.setattr(sys, "stderr", out)
    monkeypatch.setenv("FXREMAT_PROGRESS", "0")
    caplog.set_level(logging.DEBUG, logger="fxremat")
    with shown() as progress:
        assert progress is silent
        progress(CAPTURE)
    assert not caplog.records and not out.getvalue()


def test_a_phase_that_fails_has_no_line(terminal: Callable[[], Terminal]):
    out = terminal()
    with pytest.raises(ZeroDivisionError), shown() as progress:
        progress(CAPTURE)
        progress(MEASURE)
        raise ZeroDivisionError
    assert ended(out.getvalue()) == [CAPTURE]
    hidden, visible = "\x1b[?25l", "\x1b[?25h"
    assert out.getvalue().rfind(visible) > out.getvalue().rfind(hidden)


COMPILES = """
import logging, sys
logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stdout)
from fxremat.progress import PLAN, WRITE, shown
import numba
def loop(n):
    return n + 1
loop.__module__ = {module!r}
with shown() as progress:
    progress(PLAN)
    numba.njit(loop)(1)
    progress(WRITE)
    numba.njit(loop)(1.0)
numba.njit(loop)(1j)
"""


@pytest.mark.parametrize(("module", "told"), [("fxremat.planner.new", True), ("a_model", False)])
def test_what_numba_compiles_of_the_planner_is_a_phase_of_its_own(module: str, told: bool):
    env = {name: value for name, value in os.environ.items() if name != "FXREMAT_PROGRESS"}
    done = subprocess.run(
        [sys.executable, "-c", COMPILES.format(module=module)],
        capture_output=True,
        text=True,
        check=True,
        env=env,
    )
    lines = done.stdout.splitlines()
    compiled = [line.endswith(" s") for line in lines if "once" in line]
    assert compiled == [False, True, True] * told  # said once as it begins, too
    assert [line.partition(":")[0] for line in lines if "once" not in line] == [PLAN, WRITE]


def test_each_function_tells_its_phases(
    elsewhere: Callable[[], list[str]], fresh_dynamo: None, caplog: pytest.LogCaptureFixture
):
    def told() -> list[str]:
        found = [what for what in elsewhere() if "once" not in what]
        caplog.clear()
        return found

    fxremat.compile(*small(), 1.0)
    compiled = told()
    assert compiled[:1] == [CAPTURE] and {PLAN, WRITE} < set(compiled)
    fxremat.plan(*small(), 1.0)
    assert told() == compiled
    fxremat.estimate(*small(), device="A100")
    assert {CAPTURE, PLAN, WRITE} == set(told())
    fxremat.max_batch(*small(), "1 MiB")
    assert {*compiled, "find the largest batch"} < set(told())


def test_plans_of_later_steps_are_silent(elsewhere: Callable[[], list[str]], fresh_dynamo: None):
    model, x = small()
    compiled = fxremat.compile(model, x, "1 MiB")
    before = elsewhere()
    for _ in range(2):  # gradients exist at the second
        compiled(x).sum().backward()
    compiled(torch.ones(24, 8)).sum().backward()
    assert len(compiled.plans) > 1
    assert elsewhere() == before


def run_on_terminal(command: list[str]) -> tuple[str, str, int]:
    """What a command writes: results, and to a terminal as its standard error output."""
    outer, inner = pty.openpty()
    env = {**os.environ, "TERM": "xterm", "COLUMNS": "100"}
    env.pop("FXREMAT_PROGRESS", None)
    seen: list[bytes] = []

    def read() -> None:
        try:
            while data := os.read(outer, 4096):
                seen.append(data)
        except OSError:  # nobody has it open any more
            return

    root = Path(__file__).parents[1]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=inner, env=env, cwd=root) as done:
        os.close(inner)
        reader = threading.Thread(target=read)
        reader.start()
        out = done.stdout.read().decode()
    reader.join()
    os.close(outer)
    return out, b"".join(seen).decode(), done.returncode


SOURCE = "tests.command.test_command:small"
ESTIMATE = [sys.executable, "-m", "fxremat", "estimate", SOURCE, "--json"]


def test_the_command_shows_bars_beside_its_results():
    out, shown_there, code = run_on_terminal(ESTIMATE)
    assert code == 0, shown_there
    assert out.startswith("{") and out.rstrip().endswith("}")
    assert f"/{2 * len(DEFAULT_GENERATORS) + 1}" in shown_there  # a bar of the planner
    assert {CAPTURE, PLAN, WRITE} < set(ended(shown_there))


@pytest.mark.parametrize("off", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_the_command_tells_phases_without_a_terminal(off: bool):
    env = {**os.environ, "FXREMAT_PROGRESS": "0" if off else "1"}
    done = subprocess.run(
        ESTIMATE,
        capture_output=True,
        text=True,
        check=True,
        env=env,
        cwd=Path(__file__).parents[1],
    )
    assert done.stdout.startswith("{")
    assert ({CAPTURE, PLAN, WRITE} < set(ended(done.stderr))) == (not off)
    assert bool(done.stderr) == (not off)


def test_a_long_phase_is_logged_again_and_again(
    elsewhere: Callable[[], list[str]],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(fxremat.progress, "LOG_EVERY_S", 0.01)

    def lines() -> list[str]:
        return [r.getMessage() for r in caplog.records if "3/7" in r.getMessage()]

    with shown() as progress:
        progress(MEASURE, 3, 7)
        for _ in range(1000):
            if len(lines()) > 1:
                break
            time.sleep(0.01)
    assert len(lines()) > 1
    assert all(MEASURE in line for line in lines())
    count = len(caplog.records)
    time.sleep(0.05)
    assert len(caplog.records) == count  # nothing is left that logs
    assert elsewhere() == [MEASURE]
