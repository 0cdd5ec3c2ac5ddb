"""Notebooks as programs, without Jupyter: cells run in one namespace, as a kernel runs them.

    python -m tests.notebook examples/lora.ipynb

writes the outputs into the file.
"""

from __future__ import annotations

import ast
import base64
import contextlib
import io
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import CodeType
from typing import Any


def code_cells(path: Path) -> list[dict[str, Any]]:
    """Return the code cells of a notebook, in order."""
    return [cell for cell in json.loads(path.read_text())["cells"] if cell["cell_type"] == "code"]


def run_cells(cells: list[dict[str, Any]], folder: Path) -> Iterator[list[dict[str, Any]]]:
    """Run cells in one namespace, and yield the outputs of each.

    They run from files in ``folder``, because Dynamo reads the lines that it captures.
    """
    names: dict[str, Any] = {}
    for number, cell in enumerate(cells, 1):
        source = "".join(cell["source"])
        file = folder / f"cell{number}.py"
        file.write_text(source)
        tree = ast.parse(source)
        last = tree.body.pop() if isinstance(tree.body[-1], ast.Expr) else None
        assert last is None or isinstance(last, ast.Expr)
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile(tree, str(file), "exec"), names)
            value = None if last is None else eval(_code(last, file), names)
        value = None if source.rstrip().endswith(";") else value
        yield list(_outputs(printed.getvalue(), value, number))


def _code(last: ast.Expr, file: Path) -> CodeType:
    return compile(ast.Expression(last.value), str(file), "eval")


def _outputs(printed: str, value: object, number: int) -> Iterator[dict[str, Any]]:
    if printed:
        text = "\n".join(line.rstrip() for line in printed.splitlines())
        yield {"output_type": "stream", "name": "stdout", "text": _lines(text + "\n")}
    if value is not None:
        data = {"text/plain": _lines(repr(value))}
        if hasattr(value, "_repr_html_"):
            data["text/html"] = _lines(value._repr_html_())
        yield {
            "output_type": "execute_result", "execution_count": number, "data": data,
            "metadata": {},
        }  # fmt: skip
    for picture in _pictures():
        data = {"image/png": picture, "text/plain": ["<Figure>"]}
        yield {"output_type": "display_data", "data": data, "metadata": {}}


def _pictures() -> Iterator[str]:
    """Yield the open figures of matplotlib, and close them, as a notebook does after each cell."""
    from matplotlib import pyplot

    for number in pyplot.get_fignums():
        written = io.BytesIO()
        pyplot.figure(number).savefig(written, format="png", dpi=72, bbox_inches="tight")
        yield base64.b64encode(written.getvalue()).decode()
    pyplot.close("all")


def _lines(text: str) -> list[str]:
    return text.splitlines(keepends=True)


def main(path: Path) -> None:
    """Run a notebook, and write its outputs into the file."""
    notebook, folder = json.loads(path.read_text()), path.parent / ".cells"
    folder.mkdir(exist_ok=True)
    cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    for number, outputs in enumerate(run_cells(cells, folder), 1):
        cells[number - 1] |= {"outputs": outputs, "execution_count": number}
    path.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n")
    for file in folder.iterdir():
        file.unlink()
    folder.rmdir()


if __name__ == "__main__":
    os.environ |= {"MPLBACKEND": "Agg", "FXREMAT_CACHE": "0", "FXREMAT_PROGRESS": "0"}
    main(Path(sys.argv[1]))
