"""The user's code on the stack: where it calls, and warnings that point to it."""

from __future__ import annotations

import functools
import os
import re
import sys
import warnings
from pathlib import Path
from types import FrameType
from typing import NamedTuple

import torch
from torch import fx

_NOT_THE_USERS = (
    str(Path(torch.__file__).parent) + os.sep,
    str(Path(__file__).parents[1]) + os.sep,
    "<",
)

_FRAME = re.compile(r'^ *File "([^"]+)", line (\d+)(?:, in .*(?:\n(?! *File ")(.*))?)?$', re.M)
"""A frame in the text of a traceback: a file, a line, and its code if it is included."""

_PYTHONS = str(Path(os.__file__).parent) + os.sep

_INSTALLED = frozenset({"site-packages", "dist-packages"})


def user_line() -> str:
    """Return the innermost line outside this package and installed ones, as ``"train.py:12"``.

    If there is none, return the innermost line outside this package and torch, or ``""``.
    """
    frame, _depth = _user_frame()
    return "" if frame is None else f"{frame.f_code.co_filename}:{frame.f_lineno}"


class SourceLine(NamedTuple):
    """A line of source code in a traceback."""

    file: str
    number: int
    code: str

    def __str__(self) -> str:
        """Format it as Python does, followed by the code."""
        return f'  File "{self.file}", line {self.number}' + f": {self.code}" * bool(self.code)


def user_lines(trace: str) -> list[SourceLine]:
    """Return the lines in the text of a traceback that are outside this package and torch.

    Each is listed once, the innermost last.
    """
    lines = [
        SourceLine(file, int(number), code.strip())
        for file, number, code in _FRAME.findall(trace)
        if not file.startswith(_NOT_THE_USERS)
    ]
    return [*dict.fromkeys(reversed(lines))][::-1]


def described_lines(node: fx.Node) -> str:
    """Return the user's lines that an operation comes from, as text; a line break precedes each."""
    return "".join(f"\n{line}" for line in user_lines(node.stack_trace or ""))


def warn(warning: Warning) -> None:
    """Issue ``warning`` so that it points to the line that :func:`user_line` returns.

    In a thread without user code, such as that of a device's backward, it points to the outermost
    line.
    """
    _frame, depth = _user_frame()
    warnings.warn(warning, stacklevel=depth)


def _user_frame() -> tuple[FrameType | None, int]:
    """Return the frame of the user's innermost line, and its number of frames from the caller."""
    frame: FrameType | None = sys._getframe(1)
    installed: tuple[FrameType | None, int] = None, 1
    depth = 0
    while frame is not None:
        depth += 1
        origin = _origin(frame.f_code.co_filename)
        if origin == "user":
            return frame, depth
        if origin == "installed" and installed[0] is None:
            installed = frame, depth
        frame = frame.f_back
    return installed if installed[0] is not None else (None, depth)


@functools.cache
def _origin(file: str) -> str:
    if file.startswith(_NOT_THE_USERS):
        return "ours"
    if _INSTALLED.intersection(Path(file).parts):
        return "installed"
    return "ours" if file.startswith(_PYTHONS) else "user"
