"""Steps of one contender of ``benchmarks.gpu_llama``: made, run, measured."""

from __future__ import annotations

import itertools
import logging
import os
import types
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu_llama_model import Call, Trained
from benchmarks.gpu_llama_order import Peer
from benchmarks.rows import Row
from fxremat.torch_compat import delay_device

_numbers = itertools.count()

_LONGEST_MESSAGE = 300

HOST_AHEAD_S = 0.01
"""So long the device is held up before a timed step."""


class Steps:
    """Training steps of one contender, and what they took.

    Attributes:
        seconds: of each timed step.
        update_s: what the optimizer took of it.
        peak_bytes: most allocated at any instant of each step that was watched or timed.
        promised_peak_bytes: most allocated in forward and backward of each of these.
        reserved_peak_bytes: most that the allocator had taken in each step that was watched.
    """

    def __init__(self, trained: Trained, call: Call) -> None:
        self._trained, self._call = trained, call
        self.seconds: list[float] = []
        self.update_s: list[float] = []
        self.peak_bytes: list[int] = []
        self.promised_peak_bytes: list[int] = []
        self.reserved_peak_bytes: list[int] = []

    def run(self) -> None:
        """One step."""
        self._forward_and_backward()
        self._update()

    def watch_reserved(self) -> None:
        """One step, after which it is read what the allocator had taken."""
        self._timed()
        self.reserved_peak_bytes.append(torch.cuda.max_memory_reserved())

    def timed(self) -> float:
        """One step; returns its seconds, as the device counts them."""
        taken_s, update_s = self._timed()
        self.seconds.append(taken_s)
        self.update_s.append(update_s)
        return taken_s

    def _timed(self) -> tuple[float, float]:
        """One step: its seconds, and those of the optimizer."""
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        start, middle, end = (_event() for _ in range(3))
        # In a loop the host is ahead of the device when a step begins there.
        delay_device(torch.device("cuda", torch.cuda.current_device()), HOST_AHEAD_S)
        start.record()
        self._forward_and_backward()
        middle.record()
        self.promised_peak_bytes.append(torch.cuda.max_memory_allocated())
        self._update()
        end.record()
        end.synchronize()
        self.peak_bytes.append(torch.cuda.max_memory_allocated())
        return start.elapsed_time(end) / 1e3, middle.elapsed_time(end) / 1e3

    def _forward_and_backward(self) -> None:
        self._call(*self._trained.inputs).backward()

    def _update(self) -> None:
        self._trained.optimizer.step()
        self._trained.optimizer.zero_grad(set_to_none=True)


def _event() -> Any:
    make: Any = torch.cuda.Event
    return make(enable_timing=True)


def call_of(peer: Peer, trained: Trained) -> Call:
    """The function by which a peer trains the module.

    Raises:
        NotHereError: what it needs is not installed.
    """
    call = trained.ways[peer.way](trained.model)
    if not peer.compiled:
        return call
    compiled: Call = torch.compile(_with_separate_code(call), fullgraph=True, dynamic=False)
    return compiled


def _with_separate_code(call: Call) -> Call:
    """``call`` with a code object that no other function has.

    Dynamo keeps what it compiles on code objects. So contenders stay compiled while others come
    and go, none is taken for another, and nothing has to be reset.
    """
    assert isinstance(call, types.FunctionType)
    name = f"{call.__name__}_{next(_numbers)}"
    code = call.__code__.replace(co_name=name)
    return types.FunctionType(code, call.__globals__, name, call.__defaults__, call.__closure__)


@contextmanager
def memory_budget(setting: float | None) -> Iterator[None]:
    """What is compiled within gets that ``activation_memory_budget``."""
    from torch._functorch import config

    if setting is None:
        yield
        return
    patch: Any = config.patch
    with patch(activation_memory_budget=setting):
        yield


class CacheFolder:
    """The caches of one kind of contender: were they empty, and did they have everything.

    Args:
        variable: of the environment, which names the folder; nothing if nothing is compiled.
    """

    def __init__(self, variable: str | None) -> None:
        self._folder = None if variable is None else Path(os.environ[variable])
        self._before = self._files()

    def state(self) -> str:
        """``"cold"``: nothing was there; ``"warm"``: nothing came; else ``"mixed"``."""
        if self._folder is None:
            return ""
        if not self._before:
            return "cold"
        return "warm" if self._files() == self._before else "mixed"

    def _files(self) -> int:
        if self._folder is None:
            return 0
        return sum(len(files) for _, _, files in os.walk(self._folder))


@contextmanager
def messages(row: Row) -> Iterator[None]:
    """Note in ``row`` how long phases of planning took, and what was warned of budgets."""
    found: list[str] = []

    class Noted(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            found.append(record.getMessage()[:_LONGEST_MESSAGE])

    log, handler = logging.getLogger("fxremat"), Noted(logging.INFO)
    level = log.level
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    try:
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            yield
    finally:
        log.removeHandler(handler)
        log.setLevel(level)
        budgets = [str(w.message) for w in warned if w.category.__name__ == "BudgetWarning"]
        if found:
            row["phases"] = found
        if budgets:
            row["warnings"] = [text[:_LONGEST_MESSAGE] for text in budgets]


def device_answers() -> bool:
    """Whether the device still works after an error; the first call may raise that same error."""
    for _ in range(2):
        try:
            torch.cuda.synchronize()
        except RuntimeError:
            continue
        return True
    return False
