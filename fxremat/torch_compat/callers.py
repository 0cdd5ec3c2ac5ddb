"""The user's code on the stack: where it calls, and warnings that point at it."""

from __future__ import annotations

import functools
import os
import sys
import warnings
from pathlib import Path
from types import FrameType

import torch

_NOT_THE_USERS = (
    str(Path(torch.__file__).parent) + os.sep,
    str(Path(__file__).parents[1]) + os.sep,
    "<",
)

_PYTHONS = str(Path(os.__file__).parent) + os.sep

_INSTALLED = frozenset({"site-packages", "dist-packages"})


def user_line() -> str:
    """Return the innermost line outside this package and installed ones, as ``"train.py:12"``.

    Where there is none, that outside this package and torch; or ``""``.
    """
    frame, _depth = _user_frame()
    return "" if frame is None else f"{frame.f_code.co_filename}:{frame.f_lineno}"


def warn(message: str, category: type[Warning] = UserWarning) -> None:
    """Issue a warning that names the line :func:`user_line` does.

    In a thread that runs none of the user's code, as that of a device's backward, it names the
    outermost line.
    """
    _frame, depth = _user_frame()
    warnings.warn(message, category, stacklevel=depth)


def _user_frame() -> tuple[FrameType | None, int]:
    """The frame of the user's innermost line, and how many calls it is from the caller of this."""
    frame: FrameType | None = sys._getframe(1)
    found: tuple[FrameType | None, int] = None, 1
    depth = 0
    while frame is not None:
        depth += 1
        whose = _whose(frame.f_code.co_filename)
        if whose == "the user's":
            return frame, depth
        if whose == "installed" and found[0] is None:
            found = frame, depth
        frame = frame.f_back
    return found if found[0] is not None else (None, depth)


@functools.cache
def _whose(file: str) -> str:
    if file.startswith(_NOT_THE_USERS):
        return "ours"
    if _INSTALLED.intersection(Path(file).parts):
        return "installed"
    return "ours" if file.startswith(_PYTHONS) else "the user's"
