"""The docstrings that the pages of the reference show."""

from __future__ import annotations

import ast
import importlib
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from docs.prose.text import Block, blocks_of_docstring

_Documented = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def public_docstrings(root: Path) -> list[tuple[str, list[Block]]]:
    """Return, by file, the docstrings of what a page of the reference names."""
    found: dict[str, list[Block]] = defaultdict(list)
    for page in sorted((root / "docs/reference").glob("*.md")):
        for name in re.findall(r"^::: ([\w.]+)", page.read_text(), flags=re.M):
            documented = _resolve(name)
            file = f"{documented.__module__.replace('.', '/')}.py"
            if not (root / file).exists():
                file = f"{documented.__module__.replace('.', '/')}/__init__.py"
            for line, text in _docstrings(root / file, documented.__qualname__):
                found[file] += blocks_of_docstring(text, line)
    return sorted(found.items())


def _resolve(name: str) -> Any:
    module, *attributes = name, *()
    while True:
        try:
            found = importlib.import_module(module)
            break
        except ModuleNotFoundError:
            module, _, last = module.rpartition(".")
            attributes.insert(0, last)
    for attribute in attributes:
        found = getattr(found, attribute)
    return found


def _docstrings(path: Path, qualname: str) -> Iterator[tuple[int, str]]:
    """Yield the docstring of a function, or of a class and its public methods, with its line."""
    node: Any = ast.parse(path.read_text())
    for name in qualname.split("."):
        node = next(n for n in node.body if isinstance(n, _Documented) and n.name == name)
    members = node.body if isinstance(node, ast.ClassDef) else ()
    for documented in (node, *(n for n in members if isinstance(n, _Documented))):
        text = ast.get_docstring(documented, clean=False)
        if text and (documented is node or not documented.name.startswith("_")):
            yield documented.body[0].lineno, text
