"""The package's imports go one way."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import fxremat

PACKAGE = Path(fxremat.__file__).parent

LAYERS: tuple[tuple[str, ...], ...] = (
    ("errors", "optional", "console"),
    ("units",),
    ("ir", "budget"),
    ("solvers", "simulate"),
    ("torch_compat",),
    ("runtime", "measure", "overhead", "untouched", "outputs"),
    ("passes", "sample"),
    ("surplus", "report", "joining", "trace"),
    ("search",),
    ("bases",),
    ("transfers",),
    ("pipeline",),
    ("capture",),
    ("compiled", "arguments"),
    ("api",),
)
"""Lowest first. A module may import what is below its layer; neighbours never each other."""

RANK = {name: rank for rank, layer in enumerate(LAYERS) for name in layer}
TORCH_FREE = ("errors", "optional", "console", "units", "ir", "budget", "solvers", "simulate")
FILES = sorted(path.relative_to(PACKAGE) for path in PACKAGE.rglob("*.py"))


def imported(source: str, package: str) -> set[str]:
    """Dotted names that ``source``, a module in ``package``, imports anywhere."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            parents = package.split(".")[: len(package.split(".")) - node.level + 1]
            base = ".".join([*(parents if node.level else []), *filter(None, [node.module])])
            names |= {f"{base}.{alias.name}" for alias in node.names}
    return names


def wrong_arrows(file: Path, source: str) -> list[str]:
    """What ``source``, the module at ``file`` in the package, imports but may not."""
    parts = ("fxremat", *file.with_suffix("").parts)
    own = parts[1]
    wrong = []
    for name in imported(source, ".".join(parts[:-1])):
        top, *rest = name.split(".")
        if top == "torch" and own in TORCH_FREE:
            wrong.append(f"{file} imports {name}")
        if top != "fxremat":
            continue
        other = rest[0] if rest and rest[0] in RANK else "the package itself"
        if other != own and RANK.get(other, len(LAYERS)) >= RANK[own]:
            wrong.append(f"{file} imports {name}")
    return wrong


@pytest.mark.parametrize("file", FILES, ids=str)
def test_imports_go_down(file: Path) -> None:
    own = file.with_suffix("").parts[0]
    if own == "__init__":
        return  # loads names when they are first used, from any layer
    assert own in RANK, f"{file} is in no layer: add it to LAYERS"
    assert not wrong_arrows(file, (PACKAGE / file).read_text())


@pytest.mark.parametrize(
    ("file", "source"),
    [
        ("solvers/rotor.py", "from fxremat.simulate import simulate"),
        ("simulate/chain.py", "from fxremat.solvers import rotor"),
        ("simulate/chain.py", "def late():\n    from fxremat import solvers"),
        ("ir/chain.py", "import fxremat.passes.joint"),
        ("ir/chain.py", "from ..solvers import rotor"),
        ("passes/joint.py", "from fxremat import pipeline"),
        ("passes/joint.py", "from fxremat import compile"),
        ("report/plan.py", "import fxremat"),
        ("solvers/rotor.py", "from torch import nn"),
        ("solvers/rotor.py", "import torch.nn"),
    ],
)
def test_a_wrong_arrow_is_found(file: str, source: str) -> None:
    assert wrong_arrows(Path(file), source)


@pytest.mark.parametrize(
    ("file", "source"),
    [
        ("solvers/rotor.py", "from fxremat.ir import Chain\nfrom fxremat.solvers import kernels"),
        ("solvers/rotor.py", "from . import kernels\nfrom ..errors import FxrematError"),
        ("pipeline.py", "import torch\nfrom fxremat import torch_compat"),
    ],
)
def test_a_right_arrow_is_let_through(file: str, source: str) -> None:
    assert not wrong_arrows(Path(file), source)


@pytest.mark.parametrize("module", ["fxremat", "fxremat.solvers", "fxremat.simulate"])
def test_torch_is_not_loaded(module: str) -> None:
    code = f"import sys, {module}; sys.exit('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
