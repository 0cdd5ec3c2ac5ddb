"""Pages of the docs as programs: their blocks run in order, and print what the page says."""

from __future__ import annotations

import ast
import contextlib
import io
import re
import textwrap
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import fxremat

DOCS = Path(__file__).parent.parent / "docs"

FENCE = re.compile(r"^( *)```(\w+)\n(.*?)^ *```$", flags=re.M | re.S)

NUMBER = r"[+-]?\d[\d,]*(?:\.\d+)?(?:e[+-]?\d+)?"

BYTES = {"B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}

AMOUNT = re.compile(rf"({NUMBER})(?: ?(?:({'|'.join(BYTES)})|(ns|µs|ms|s))(?!\w))?")

COMPARED_BYTES = 1 << 20
"""Smaller amounts are not compared: they are rounded too much."""

TOLERANCE = 0.25
"""The share by which a printed amount of bytes may differ from that of the page: measured seconds
choose among plans."""


@dataclass(frozen=True, slots=True)
class Block:
    """A code block of a page.

    Attributes:
        language: the language of its fence.
        text: its lines, without the page's indentation.
        line: its first line in the page.
    """

    language: str
    text: str
    line: int

    @property
    def code(self) -> str:
        """The Python code of the block; that of a diff is what the diff leads to."""
        if self.language != "diff":
            return self.text
        lines = (line for line in self.text.splitlines() if not line.startswith("-"))
        return textwrap.dedent("\n".join(line[1:] for line in lines))


def blocks_in(text: str) -> Iterator[Block]:
    """Yield the blocks of a page that have a language, in order."""
    for found in FENCE.finditer(text):
        line = text.count("\n", 0, found.start()) + 2
        yield Block(found[2], textwrap.dedent(found[3]), line)


def run_page(
    page: Path,
    names: dict[str, Any],
    folder: Path,
    others: dict[str, Callable[[str], object]] | None = None,
) -> set[str]:
    """Run the Python code of a page in one namespace, and compare what each block prints.

    A ``text`` block has what the block before it prints. A warning of fxremat is an error. A block
    that imports a library which is not installed does not run.

    Args:
        page: the page.
        names: what the code is given.
        folder: an empty folder for the files of the blocks.
        others: what checks the blocks of other languages.

    Returns:
        The libraries that are not installed.
    """
    missing: set[str] = set()
    printed: str | None = None
    for block in blocks_in(page.read_text()):
        place = f"{page.name}:{block.line}"
        if block.language in ("python", "diff"):
            lacking = {name for name in imported(block.code) if find_spec(name) is None}
            missing |= lacking
            if lacking:
                continue
            printed = run(block, names, folder, place)
        elif block.language == "text":
            assert printed is not None, f"{place}: no code printed this"
            compare(block.text, printed, place)
        else:
            check = (others or {}).get(block.language)
            assert check is not None, f"{place}: nothing checks {block.language}"
            check(block.text)
    return missing


def imported(code: str) -> set[str]:
    """Return the names of the packages that code imports."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found.add(node.module or "")
    return {name.partition(".")[0] for name in found}


def run(block: Block, names: dict[str, Any], folder: Path, place: str) -> str:
    """Run a block and return what it prints.

    It runs from a file of its own, because Dynamo reads the lines that it captures.
    """
    file = folder / f"{Path(place).stem}_{block.line}.py"
    file.write_text(block.code)
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), warnings.catch_warnings():
        for kind in (fxremat.BudgetWarning, fxremat.GraphBreakWarning):
            warnings.simplefilter("error", kind)
        try:
            exec(compile(block.code, str(file), "exec"), names)
        except Exception as error:
            raise AssertionError(f"{place} fails: {type(error).__name__}: {error}") from error
    return printed.getvalue()


def compare(expected: str, printed: str, place: str) -> None:
    """Assert that a page shows what was printed.

    Numbers, units and wrapping may differ, but amounts of memory only by ``TOLERANCE``. ``...``
    stands for any text.
    """
    expected, printed = (" ".join(text.split()) for text in (expected, printed))
    found = re.fullmatch(_pattern(expected), printed, flags=re.S)
    assert found, f"{place} shows\n{expected}\nbut the code printed\n{printed}"
    shown = list(AMOUNT.finditer(expected))
    for own, (number, unit) in zip(shown, _pairs(found.groups()), strict=True):
        if own[2] is None or unit is None:
            continue
        old, new = _bytes(own[1], own[2]), _bytes(number, unit)
        if min(old, new) >= COMPARED_BYTES:
            assert abs(new - old) <= TOLERANCE * old, f"{place} shows {own[0]}, not {number} {unit}"


def _pattern(expected: str) -> str:
    """Return a regular expression that accepts ``expected`` with other numbers and units."""
    parts, end = [], 0
    for own in AMOUNT.finditer(expected):
        parts.append(_literal(expected[end : own.start()]))
        unit = "|".join(BYTES) if own[2] else "ns|µs|ms|s"
        parts.append(f"({NUMBER})" + (f" ?({unit})" if own[2] or own[3] else "()"))
        end = own.end()
    return "".join((*parts, _literal(expected[end:])))


def _literal(text: str) -> str:
    text = re.sub(r"─+", "─", text)
    return re.sub(r"(?:\\ )*\\\.\\\.\\\.(?:\\ )*", ".*?", re.escape(text)).replace("─", "─+")


def _pairs(groups: tuple[str | None, ...]) -> Iterator[tuple[str, str | None]]:
    """Yield each number with its unit of bytes, ``None`` where it has none."""
    for number, unit in zip(groups[::2], groups[1::2], strict=True):
        assert number is not None
        yield number, unit if unit in BYTES else None


def _bytes(number: str, unit: str) -> float:
    return float(number.replace(",", "")) * BYTES[unit]
