"""How many threads the solvers start of their own."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable

import numba
import pytest

from fxremat.ir import Costs, Problem, StageCosts
from fxremat.solvers import rotor
from fxremat.solvers.papers import pofo
from fxremat.solvers.threads import thread_count
from tests.paper_terms import chain_from_sizes, symmetric_link

STAGES = 200
"""Enough for both solvers to share the work."""


def long_chain() -> Problem:
    costs = Costs((StageCosts(1.0, 1.0, 1.0, 1, 1, 1, 1, 1),) * STAGES)
    chain = chain_from_sizes([1] * (STAGES + 1), [2] * STAGES)
    return Problem(chain, costs, 40, symmetric_link(1.0))


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the threads that are started."""
    names: list[str] = []
    start = threading.Thread.start

    def counted(thread: threading.Thread) -> None:
        names.append(thread.name)
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", counted)
    return names


def cores(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(count)), raising=False)


SOLVES = [
    lambda: rotor.solve(long_chain(), slots=4),
    lambda: pofo.solve(long_chain(), slots=4, labels=2),
]


@pytest.mark.parametrize("solve", SOLVES, ids=["rotor", "pofo"])
def test_a_solver_starts_no_more_than_numba_may(
    solve: Callable[[], object], started: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    cores(monkeypatch, 4)
    monkeypatch.setattr(numba.config, "NUMBA_NUM_THREADS", 1)
    solve()
    assert not started
    monkeypatch.setattr(numba.config, "NUMBA_NUM_THREADS", 2)
    solve()
    assert started


def test_no_more_than_the_process_has_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    cores(monkeypatch, 3)
    monkeypatch.setattr(numba.config, "NUMBA_NUM_THREADS", 16)
    assert thread_count() == 3
    assert thread_count(most=2) == 2
    monkeypatch.setattr(numba.config, "NUMBA_NUM_THREADS", 2)
    assert thread_count() == 2


def test_the_environment_variable_is_read() -> None:
    code = "from fxremat.solvers.threads import thread_count; print(thread_count())"
    environment = {**os.environ, "NUMBA_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["1"]
