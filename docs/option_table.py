"""The page of all options of ``fxremat.compile``, made from their table."""

import importlib
import sys
from pathlib import Path
from typing import Any


def options_page(root: Path) -> str:
    """Return the options as a page: as ``compile`` takes them, and as plain values."""
    sys.path.insert(0, str(root))
    table: Any = importlib.import_module("fxremat.options.table")  # which needs no other package
    functions = ("plan", "frontier", "max_batch", "estimate", "torch.compile")

    def row(option: Any) -> str:
        missing = [f"`{name}`" for name in functions if not option.taken_by(name)]
        default = f"`{option.default!r}`".replace("'", '"')
        cells = (f"`{option.name}=`", option.values, default, option.doc, ", ".join(missing))
        return f"| {' | '.join(cells)} |"

    def plain(field: Any, option: str) -> str:
        flag = f"`--{field.name.replace('_', '-')}`" if field.flag else ""
        kind = getattr(field.kind, "__name__", str(field.kind))
        part = f"{option}, {field.part}" if field.part else option
        cells = (f"`{field.name}`", kind.replace("|", "or"), part, flag, field.doc)
        return f"| {' | '.join(cells)} |"

    lines = [
        "# Options",
        "",
        "Keyword arguments of `fxremat.compile`; [Interface](interface.md#arguments) says more.",
        "",
        "| argument | values | default | | not for |",
        "|---|---|---|---|---|",
        *map(row, table.OPTIONS),
        "",
        "The same as plain values: attributes of `fxremat.Options`, options of `torch.compile`,",
        "flags of the command.",
        "",
        "| name | type | of | flag | |",
        "|---|---|---|---|---|",
        plain(table.BUDGET, "budget"),
    ]
    for option in table.OPTIONS:
        lines += [plain(field, option.name) for field in option.fields]
    return "\n".join(lines) + "\n"
