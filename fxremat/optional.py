"""Packages that a plan can do without, and what it lacks then.

A step is captured, planned and run with torch, numpy and numba alone.
"""

from __future__ import annotations

import functools
import importlib
import logging
from types import ModuleType

_LACKS = {
    "ortools": (
        logging.WARNING,
        "plans have no bound on their time, and what large stages keep is found by a heuristic",
    ),
    "rich": (logging.INFO, "progress is logged, and tables cannot be printed"),
}
"""What is lost without a package, and how loudly that is said."""


@functools.cache
def find(module: str) -> ModuleType | None:
    """A module of a package that may be missing, or ``None``; that is logged once a package."""
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
    level, lack = _LACKS[package]
    logging.getLogger("fxremat").log(
        level, "%s cannot be imported (%s): %s; pip install %s", package, reason, lack, package
    )
