"""The page of all options of ``fxremat.compile``, made from their table and its docstring."""

from __future__ import annotations

import ast
import importlib
import re
import sys
from pathlib import Path
from textwrap import dedent
from typing import Any

FUNCTIONS = ("plan", "frontier", "max_batch", "estimate", "torch.compile")
"""Functions that take options, in addition to ``compile``."""

HEAD = """\
# Options

Keyword arguments of `fxremat.compile`. `plan`, `frontier`, `max_batch` and `estimate` take most of
them too, and so does `torch.compile(model, backend="fxremat", options={...})`.

| option | purpose | values | default |
|---|---|---|---|
"""

PLAIN = """
## Plain values

Configuration files, `fxremat.Options`, options of `torch.compile` and flags of
[the command](command.md) have the same options as plain values, except those marked above.

| name | type | sets | flag | meaning |
|---|---|---|---|---|
"""


def options_page(root: Path) -> str:
    """Return the options as a page: as ``compile`` takes them, and as plain values."""
    sys.path.insert(0, str(root))
    table: Any = importlib.import_module("fxremat.options.table")  # which needs no other package
    described = argument_docs((root / "fxremat/api.py").read_text(), "compile")
    rows = [_row(option) for option in table.OPTIONS]
    sections = [_section(option, described[option.name]) for option in table.OPTIONS]
    plain = [_plain(table.BUDGET, "budget")]
    for option in table.OPTIONS:
        plain += [_plain(field, option.name) for field in option.fields]
    return "".join([HEAD, *rows, *sections, PLAIN, *plain])


def argument_docs(source: str, function: str) -> dict[str, str]:
    """Return what the docstring of a function says of each argument, as Markdown."""
    body = ast.parse(source).body
    node = next(n for n in body if isinstance(n, ast.FunctionDef) and n.name == function)
    text = (ast.get_docstring(node) or "").split("Args:\n")[1].split("\n\nReturns:")[0]
    parts = re.split(r"^ {4}(\w+): ", text, flags=re.M)[1:]
    markdown = [re.sub(r":\w+:`([^`]*)`", r"`\1`", part).replace("``", "`") for part in parts[1::2]]
    return {name: _paragraph(part) for name, part in zip(parts[::2], markdown, strict=True)}


def _paragraph(text: str) -> str:
    first, _, rest = text.strip().partition("\n")
    return f"{first}\n{dedent(rest)}".strip()


def _row(option: Any) -> str:
    cells = (f"[`{option.name}=`](#{option.name})", option.doc, option.values, _default(option))
    return f"| {' | '.join(cells)} |\n"


def _section(option: Any, described: str) -> str:
    missing = [f"`{name}`" for name in FUNCTIONS if not option.taken_by(name)]
    lines = [f"\n## `{option.name}`\n", described[0].upper() + described[1:]]
    if missing:
        lines.append(f"\nNot an option of {', '.join(missing)}.")
    return "\n".join(lines) + "\n"


def _default(option: Any) -> str:
    return f"`{option.default!r}`".replace("'", '"')


def _plain(field: Any, option: str) -> str:
    flag = f"`--{field.name.replace('_', '-')}`" if field.flag else ""
    kind = getattr(field.kind, "__name__", str(field.kind))
    part = f"`{field.part}` of `{option}`" if field.part else f"`{option}`"
    cells = (f"`{field.name}`", f"`{kind}`".replace("|", "or"), part, flag, field.doc)
    return f"| {' | '.join(cells)} |\n"
