"""The page of the numbers that control the search, and of all others that the code names."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path


def constants_page(root: Path) -> str:
    """Return the page of the fields of ``Effort``, and of all other numbers of the code."""
    lines = ["# Constants", "", "Every number that the code names, and its purpose.", ""]
    lines += ["## Numbers that control the search", ""]
    lines += ["These are attributes of `fxremat.Effort`, with their defaults.", ""]
    lines += ["| attribute | default | meaning |", "|---|---|---|"]
    for name, value, meaning in effort_fields((root / "fxremat" / "effort.py").read_text()):
        lines.append(f"| `{name}` | `{value}` | {meaning} |")
    lines += [
        "",
        "## Other numbers",
        "",
        "Constants by file. Each docstring says what the number is for, and why it has this value.",
    ]
    lines += ["", "| file | name | value | meaning |", "|---|---|---|---|"]
    for path in sorted((root / "fxremat").rglob("*.py")):
        name = path.relative_to(root / "fxremat").as_posix()
        for constant, value, meaning in constants_of(path.read_text()):
            lines.append(f"| {name} | `{constant}` | `{value}` | {meaning} |")
    return "\n".join(lines) + "\n"


def effort_fields(source: str) -> Iterator[tuple[str, str, str]]:
    """Yield the fields of ``Effort``: name, default as it is written, and its docstring line."""
    tree = ast.parse(source)
    owner = next(n for n in tree.body if isinstance(n, ast.ClassDef) and n.name == "Effort")
    attributes = (ast.get_docstring(owner) or "").split("Attributes:")[-1].split("\n\n")[0]
    parts = re.split(r"^    (\w+): ", attributes, flags=re.M)[1:]
    meanings = dict(zip(parts[::2], parts[1::2], strict=True))
    for node in owner.body:
        if isinstance(node, ast.AnnAssign) and node.value is not None:
            assert isinstance(node.target, ast.Name)
            name = node.target.id
            text = " ".join(meanings.get(name, "").split())
            yield name, ast.unparse(node.value), text.replace("|", "\\|")


def constants_of(source: str) -> Iterator[tuple[str, str, str]]:
    """Yield the numbers that a module names: name, value as it is written, and its docstring."""
    body = ast.parse(source).body
    for index, node in enumerate(body):
        if not isinstance(node, ast.Assign) or not isinstance(node.targets[0], ast.Name):
            continue
        name, value = node.targets[0].id, ast.unparse(node.value)
        if not name.isupper() or not re.fullmatch(r"[-+*/<>().,\d\s_e]+", value):
            continue
        after = body[index + 1] if index + 1 < len(body) else None
        meaning = ""
        if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant):
            meaning = " ".join(str(after.value.value).split()).replace("|", "\\|")
        yield name, value, meaning
