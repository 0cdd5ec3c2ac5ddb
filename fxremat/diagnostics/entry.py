"""What is written about one error or warning."""

from __future__ import annotations

import inspect
import re
from dataclasses import dataclass

from fxremat.errors import FxrematError, FxrematWarning

SETUP = """\
import torch
from torch import nn
import fxremat


def block():
    return nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))


x = torch.randn(512, 64)
model = nn.Sequential(block(), block(), block())
"""
"""With what every program of the table begins."""


@dataclass(frozen=True, slots=True)
class Diagnostic:
    """One cause of an error or a warning, and what to do about it.

    Attributes:
        code: the code, such as ``"FXR012"``, which never changes its meaning.
        kind: the class of the error or warning; for a fault of fxremat, the base of all.
        title: what is wrong, as a clause.
        why: why it comes, in one to four sentences.
        remedy: what to do, in sentences.
        trouble: a program that raises it, after :data:`SETUP`; empty with ``needs``.
        remedies: programs that follow the remedy, after ``trouble``, without error or warning.
        needs: what raising it takes beyond one process on a CPU, if anything.
        test: with ``needs``, the test that raises it, as ``"tests/file.py::test_name"``.
    """

    code: str
    kind: type[FxrematError] | type[FxrematWarning]
    title: str
    why: str
    remedy: str
    trouble: str = ""
    remedies: tuple[str, ...] = ()
    needs: str = ""
    test: str = ""

    def __post_init__(self) -> None:
        """Remove the indentation that programs have in the table."""
        object.__setattr__(self, "trouble", _program(self.trouble))
        object.__setattr__(self, "remedies", tuple(map(_program, self.remedies)))


def _program(text: str) -> str:
    clean = re.sub(r"\n{4,}", "\n\n\n", inspect.cleandoc(text))
    return clean + "\n" if text else ""
