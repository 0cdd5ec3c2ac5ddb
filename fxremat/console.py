"""Tables on the console, whatever characters it can show. Needs rich."""

from __future__ import annotations

import io
import locale
import random
import sys
from typing import TextIO, cast

_state = random.getstate()  # rich draws a number when it is imported
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
    """Print ``what`` to the standard output, in ASCII where that is all it can show.

    Args:
        what: for rich.
        width: columns where the output is no terminal, which has a width of its own.

    Returns what was printed, without colours.
    """
    if not _is_ascii(sys.stdout):
        return _print(Console(record=True, markup=False), what, width)
    # The same table as in Unicode, written in ASCII.
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
    """Whether ``out`` takes less than Unicode.

    In a locale of ASCII Python writes UTF-8 all the same, but who reads it may not.
    """
    encoding: str | None = getattr(out, "encoding", None)
    if encoding is None:  # text in memory, or no output at all
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
