"""Tables on the standard output, in ASCII where it cannot show Unicode. Requires rich."""

from __future__ import annotations

import io
import locale
import random
import sys
from typing import TextIO, cast

_state = random.getstate()  # importing rich draws a random number
try:
    from rich.box import SIMPLE_HEAD
    from rich.console import Console, Group, RenderableType
    from rich.table import Table
    from rich.text import Text
except ImportError as error:
    raise ImportError("tables are printed by rich: pip install rich") from error
finally:
    random.setstate(_state)

__all__ = ["SIMPLE_HEAD", "Group", "RenderableType", "Table", "Text", "show"]

_ASCII = dict.fromkeys(range(0x2500, 0x2580), "+")  # box drawing
_ASCII |= dict.fromkeys(map(ord, "─━═"), "-") | dict.fromkeys(map(ord, "│┃║"), "|")
_ASCII |= {ord("×"): "x", ord("µ"): "u", ord("…"): "~", ord("–"): "-"}


def show(what: RenderableType, *, width: int) -> str:
    """Print ``what`` to the standard output, in ASCII where the output cannot show Unicode.

    Args:
        what: anything that rich can render.
        width: number of columns where the output is not a terminal. A terminal has its own width.

    Returns:
        The printed text, without colors.
    """
    if not _is_ascii(sys.stdout):
        return _print(Console(record=True, markup=False), what, width)
    # Render the table in Unicode, then replace its characters.
    terminal = sys.stdout.isatty()
    console = Console(record=True, file=io.StringIO(), force_terminal=terminal, markup=False)
    text = _print(console, what, width)
    sys.stdout.write(_in_ascii(cast(io.StringIO, console.file).getvalue()))
    return _in_ascii(text)


def _print(console: Console, what: RenderableType, width: int) -> str:
    if not console.is_terminal:
        console.width = width
    console.print(what)
    return console.export_text()


def _is_ascii(out: TextIO) -> bool:
    """Return whether ``out`` can show ASCII only.

    In an ASCII locale Python writes UTF-8 nevertheless, but its reader may not understand that.
    """
    encoding: str | None = getattr(out, "encoding", None)
    if encoding is None:  # an in-memory stream, or no output at all
        return False
    if not encoding.lower().startswith("utf"):
        return True
    return out is sys.__stdout__ and _codeset() in ("ANSI_X3.4-1968", "US-ASCII", "646")


def _codeset() -> str:
    if sys.platform == "win32":
        return ""
    return locale.nl_langinfo(locale.CODESET)


def _in_ascii(text: str) -> str:
    return text.translate(_ASCII).encode("ascii", "backslashreplace").decode("ascii")
