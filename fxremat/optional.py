"""Optional packages. Capturing, planning and running a step require torch, numpy and numba only."""

from __future__ import annotations

import functools
import importlib
import logging
from types import ModuleType

_CONSEQUENCES = {
    "ortools": (
        logging.WARNING,
        "plans have no lower bound on their time, and a heuristic chooses which tensors large "
        "stages keep",
    ),
    "rich": (logging.INFO, "progress is logged, and tables cannot be printed"),
}
"""For each package, the log level and the text of the message that it is missing."""


@functools.cache
def find(module: str) -> ModuleType | None:
    """Import and return a module of an optional package; ``None`` where it cannot be imported.

    A failure is logged once per package.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        _log(module.partition(".")[0], str(error))
        return None


_logged: set[str] = set()


def _log(package: str, reason: str) -> None:
    if package in _logged:
        return
    _logged.add(package)
    level, consequence = _CONSEQUENCES[package]
    logging.getLogger("fxremat").log(
        level,
        "%s cannot be imported (%s): %s; pip install %s",
        package,
        reason,
        consequence,
        package,
    )
