"""What is written about a code, as text for a terminal and as data."""

from __future__ import annotations

import dataclasses
import textwrap
from typing import Any

from fxremat.diagnostics.entry import SETUP, Diagnostic
from fxremat.diagnostics.table import BY_CODE
from fxremat.errors import PAGE, refuse

WIDTH = 80
"""Columns of a terminal that the text fits in."""


def diagnostic(code: str) -> Diagnostic:
    """Return the entry of a code, in upper or lower case.

    Raises:
        ArgumentError: there is no such code.
    """
    found = BY_CODE.get(code.upper())
    if found is None:
        refuse("CODE", code, f"a code that {PAGE} lists, such as {min(BY_CODE)}")
    return found


def as_data(entry: Diagnostic) -> dict[str, Any]:
    """Return an entry as data that JSON can represent; programs include :data:`SETUP`."""
    data = dataclasses.asdict(entry)
    data["kind"] = entry.kind.__name__
    data["docs"] = f"{PAGE}#{entry.code.lower()}"
    data["trouble"] = SETUP + entry.trouble if entry.trouble else ""
    data["remedies"] = list(entry.remedies)
    return data


def as_text(entry: Diagnostic) -> str:
    """Return an entry as text for a terminal."""
    parts = [f"{entry.code} ({entry.kind.__name__}): {entry.title}", _wrapped(entry.why)]
    parts += [_wrapped(f"What to do: {entry.remedy}")]
    if entry.trouble:
        trouble = textwrap.indent(f"{SETUP}\n\n{entry.trouble}", "    ")
        parts += [f"A program that raises it:\n\n{trouble.rstrip()}"]
        remedy = textwrap.indent("\n\n".join(entry.remedies), "    ")
        parts += [f"After it, this follows the advice:\n\n{remedy.rstrip()}"]
    else:
        parts += [_wrapped(f"It takes {entry.needs} to raise it.")]
    return "\n\n".join(parts) + "\n"


def _wrapped(text: str) -> str:
    return textwrap.fill(text, WIDTH, break_long_words=False, break_on_hyphens=False)
