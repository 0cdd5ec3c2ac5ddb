"""``fxremat env``: versions, devices, compilers and caches, as an issue report needs them."""

from __future__ import annotations

import argparse
import json
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fxremat.command.probes import PROBES, Fact, shortly

READY, INCOMPLETE = 0, 1
"""Exit codes: ``compile`` has what it needs, and something is missing."""

VARIABLES = re.compile(
    r"(?:FXREMAT|NUMBA|TORCHINDUCTOR)_\w+|OMP_NUM_THREADS|PYTORCH_\w*ALLOC_CONF"
    r"|TORCH_COMPILE_DISABLE|CUDA_VISIBLE_DEVICES"
)
"""Names of the environment variables that are listed."""

_SECRET = re.compile(r"://|\w@|PASSWORD|TOKEN|SECRET|REDIS|_KEY", re.IGNORECASE)
"""Text in the name or value of a variable whose value is not printed."""


@dataclass(frozen=True, slots=True)
class Environment:
    """What an issue report needs to know about a process and its machine.

    Attributes:
        facts: the lines of the report, in order.
    """

    facts: tuple[Fact, ...]

    @staticmethod
    def of_process() -> Environment:
        """Return the environment of this process. No probe raises."""
        variables = _probed("variables", _variables)  # first: importing torch sets some
        facts = [fact for name, probe in PROBES for fact in _probed(name, probe)]
        return Environment(tuple(map(_without_home, [*facts, *variables])))

    @property
    def problems(self) -> tuple[str, ...]:
        """What ``compile`` needs and does not have."""
        return tuple(fact.problem for fact in self.facts if fact.problem)

    def data(self) -> dict[str, object]:
        """Return the environment as a dict that ``json`` can write."""
        return {
            **{fact.name: fact.value for fact in self.facts},
            "problems": list(self.problems),
        }

    def lines(self) -> list[str]:
        """Return the lines of text that the command prints."""
        rows = [(fact.name, fact.text) for fact in self.facts]
        rows += [("problem", problem) for problem in self.problems]
        width = max(len(name) for name, _ in rows)
        return [f"{name:<{width}}  {text}" for name, text in rows]


def env(asked: argparse.Namespace) -> int:
    """Run ``fxremat env`` and return its exit code."""
    environment = Environment.of_process()
    if asked.json:
        print(json.dumps(environment.data(), indent=1))
    else:
        print("\n".join(environment.lines()))
    return INCOMPLETE if environment.problems else READY


def _probed(name: str, probe: Callable[[], Iterator[Fact]]) -> list[Fact]:
    """Return the facts of a probe, or one that says how the probe failed."""
    facts = []
    try:
        for fact in probe():
            facts.append(fact)  # those before a failure are kept
    except Exception as error:
        text = f"unknown ({shortly(error)})"
        facts.append(Fact(name, text, {"error": shortly(error)}))
    return facts


def _without_home(fact: Fact) -> Fact:
    """Return ``fact`` with ``~`` in place of the user's home folder."""

    def shortened(value: Any) -> Any:
        if isinstance(value, str):
            return home_shortened(value)
        if isinstance(value, dict):
            return {key: shortened(item) for key, item in value.items()}
        return [shortened(item) for item in value] if isinstance(value, list) else value

    return Fact(
        fact.name, shortened(fact.text), shortened(fact.data), problem=shortened(fact.problem)
    )


def home_shortened(text: str) -> str:
    """Return ``text`` with ``~`` in place of the user's home folder."""
    home = str(_home() or "").rstrip(os.sep)
    return re.sub(rf"{re.escape(home)}(?=$|[^\w.-])", "~", text) if home else text


def _home() -> Path | None:
    """Return the user's home folder, or ``None`` if there is none."""
    try:
        return Path.home()
    except RuntimeError:
        return None


def _variables() -> Iterator[Fact]:
    for name, value in sorted(os.environ.items()):
        if VARIABLES.fullmatch(name):
            hidden = _SECRET.search(name) or _SECRET.search(value)
            yield Fact(f"${name}", "(set, not shown)" if hidden else value)
