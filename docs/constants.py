"""The page of all numbers that the code names."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path


def constants_page(root: Path) -> str:
    """All numbers that the code was given, by file, with what each is for."""
    lines = ["# Constants", "", "Numbers of the code, by file: what each is for, and why.", ""]
    lines += ["| file | name | value | |", "|---|---|---|---|"]
    for path in sorted((root / "fxremat").rglob("*.py")):
        name = path.relative_to(root / "fxremat").as_posix()
        for constant, value, told in constants_of(path.read_text()):
            lines.append(f"| {name} | `{constant}` | `{value}` | {told} |")
    return "\n".join(lines) + "\n"


def constants_of(source: str) -> Iterator[tuple[str, str, str]]:
    """Numbers that a module names: name, value as it is written, and its docstring."""
    body = ast.parse(source).body
    for index, node in enumerate(body):
        if not isinstance(node, ast.Assign) or not isinstance(node.targets[0], ast.Name):
            continue
        name, value = node.targets[0].id, ast.unparse(node.value)
        if not name.isupper() or not re.fullmatch(r"[-+*/<>().,\d\s_e]+", value):
            continue
        after = body[index + 1] if index + 1 < len(body) else None
        told = ""
        if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant):
            told = " ".join(str(after.value.value).split()).replace("|", "\\|")
        yield name, value, told
