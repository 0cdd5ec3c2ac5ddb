"""The package's imports go one way."""

from __future__ import annotations

import ast
import graphlib
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

import fxremat

PACKAGE = Path(fxremat.__file__).parent

FLOORS: tuple[tuple[str, ...], ...] = (
    ("errors", "units", "console", "optional", "jit", "ir"),
    ("diagnostics", "effort", "progress", "torch_versions"),
    ("torch_compat", "report", "solvers"),
    ("runtime", "solvers/join"),
    ("solvers/papers",),
    ("passes/joint",),
    ("passes/parts", "passes/stages"),
    ("passes/emit", "passes/fuse", "passes/split"),
    ("passes",),
    ("costs/measured",),
    ("costs/estimated", "costs/link"),
    ("planner/context", "planner/decision"),
    ("planner/allocator", "planner/replay"),
    ("planner/search",),
    ("planner/transfers",),
    ("cache", "capture"),
    ("ranks",),
    ("options",),
    ("graph",),
    ("loop", "planning"),
    ("regions",),
    ("calls",),
    ("training",),
    ("compiler", "sizing"),
    ("module",),
    ("api",),
    ("command", "integrations"),
    ("__main__",),
)
"""Rooms, lowest floor first. A file may import what is on floors below; neighbours never each
other. Within a room, too, imports go one way."""

MOST_LEVELS = 6
"""Maximum number of files of a room of which each imports the next one."""

FLOOR = {room: floor for floor, rooms in enumerate(FLOORS) for room in rooms}
TORCH_FREE = (
    "errors",
    "units",
    "console",
    "optional",
    "jit",
    "ir",
    "diagnostics",
    "effort",
    "progress",
    "torch_versions",
    "report",
    "solvers",
    "solvers/join",
    "solvers/papers",
)
FILES = sorted(path.relative_to(PACKAGE) for path in PACKAGE.rglob("*.py"))


def room_of(parts: Sequence[str]) -> str | None:
    """The room of a dotted name without the package's own, or of a path."""
    for length in (2, 1):
        room = "/".join(parts[:length])
        if room in FLOOR:
            return room
    return None


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
    own = room_of(parts[1:])
    assert own is not None
    wrong = []
    for name in imported(source, ".".join(parts[:-1])):
        top, *rest = name.split(".")
        if top == "torch" and own in TORCH_FREE:
            wrong.append(f"{file} imports {name}")
        if top != "fxremat":
            continue
        other = room_of(rest)
        if other != own and (other is None or FLOOR[other] >= FLOOR[own]):
            wrong.append(f"{file} imports {name}")
    return wrong


@pytest.mark.parametrize("file", FILES, ids=str)
def test_imports_go_down(file: Path) -> None:
    if file.name == "__init__.py" and len(file.parts) < 3:
        return  # the package loads names when they are first used, from any room
    assert room_of(file.with_suffix("").parts), f"{file} is in no room: add it to FLOORS"
    assert not wrong_arrows(file, (PACKAGE / file).read_text())


DRAWN_BY = {
    f"fxremat.report.{name}" for name in ("brief", "consistent", "page", "peak", "text", "trace")
}
"""A plan's methods import what checks and draws plans when they are called, and only then."""


def arrows() -> dict[str, set[str]]:
    """For each file what it imports, be it late or for types alone."""
    names = {".".join(("fxremat", *file.with_suffix("").parts)): file for file in FILES}
    names = {name.removesuffix(".__init__"): file for name, file in names.items()}
    graph = {}
    for name, file in names.items():
        package = name if file.name == "__init__.py" else name.rpartition(".")[0]
        found = imported((PACKAGE / file).read_text(), package)
        known = {n if n in names else n.rpartition(".")[0] for n in found}
        graph[name] = known & names.keys() - {name, "fxremat"} if name != "fxremat" else set()
    graph["fxremat.report.plan"] -= DRAWN_BY
    return graph


KNOWN_PRIVATE = ("torch._ops.OpOverload", "torch.utils._pytree")
"""What everybody who writes passes uses, and no release has moved."""


def private_names(source: str) -> set[str]:
    """Dotted names of torch with a part that begins with an underscore."""
    dotted = {ast.unparse(n) for n in ast.walk(ast.parse(source)) if isinstance(n, ast.Attribute)}
    found = dotted | imported(source, "fxremat")
    names = {name for name in found if re.fullmatch(r"torch(\.\w+)+", name)}
    return {
        name
        for name in names
        if any(part.startswith("_") and not part.startswith("__") for part in name.split("."))
        and not name.startswith(KNOWN_PRIVATE)
        and not any(known.startswith(name) for known in KNOWN_PRIVATE)
    }


@pytest.mark.parametrize("file", FILES, ids=str)
def test_private_names_of_torch_have_one_room(file: Path) -> None:
    if file.parts[0] != "torch_compat":
        assert not private_names((PACKAGE / file).read_text())


@pytest.mark.parametrize(
    "source",
    ["import torch\ntorch._dynamo.reset()", "from torch._dynamo import config", "x = torch.a._b()"],
)
def test_a_private_name_is_found(source: str) -> None:
    assert private_names(source)


def test_no_two_files_import_each_other() -> None:
    """Not by way of others either."""
    graph = arrows()
    assert len(graph) > 100
    list(graphlib.TopologicalSorter(graph).static_order())


def levels_of(graph: dict[str, set[str]]) -> dict[str, int]:
    """Return for each room how many of its files are in its longest chain of imports."""
    rooms = {name: room_of(name.split(".")[1:]) for name in graph}
    level: dict[str, int] = {}
    for name in graphlib.TopologicalSorter(graph).static_order():
        below = [level[other] for other in graph[name] if rooms[other] == rooms[name]]
        level[name] = 1 + max(below, default=0)
    most: dict[str, int] = {}
    for name, room in rooms.items():
        if room is not None:
            most[room] = max(most.get(room, 0), level[name])
    return most


def test_a_room_has_few_levels() -> None:
    """A room with more has a lower floor, which is a room of its own."""
    most = levels_of(arrows())
    assert most.keys() == FLOOR.keys()
    assert {room: count for room, count in most.items() if count > MOST_LEVELS} == {}


def test_levels_are_counted_within_a_room() -> None:
    graph: dict[str, set[str]] = {
        "fxremat.ir.chain": set(),
        "fxremat.ir.join": {"fxremat.ir.chain"},
        "fxremat.solvers.rotor": {"fxremat.ir.join"},
    }
    assert levels_of(graph) == {"ir": 2, "solvers": 1}


def test_a_plan_is_loaded_without_what_draws_it() -> None:
    code = f"import sys, fxremat.report.plan; sys.exit(bool({DRAWN_BY!r} & {{*sys.modules}}))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_compiling_never_loads_what_only_cross_checks() -> None:
    graph = arrows()
    waiting, reached = ["fxremat.api"], set[str]()
    while waiting:
        name = waiting.pop()
        if name in graph and name not in reached:
            reached.add(name)
            waiting += [*graph[name], name.rpartition(".")[0]]
    assert "fxremat.solvers.rotor" in reached
    assert not any(name.startswith("fxremat.solvers.papers") for name in reached)


def test_a_circle_is_found() -> None:
    with pytest.raises(graphlib.CycleError):
        list(graphlib.TopologicalSorter({"a": {"b"}, "b": {"c"}, "c": {"a"}}).static_order())


@pytest.mark.parametrize(
    ("file", "source"),
    [
        ("solvers/rotor.py", "from fxremat.report import plan"),
        ("solvers/rotor.py", "from fxremat.solvers.papers import revolve"),
        ("report/plan.py", "def late():\n    from fxremat import solvers"),
        ("ir/chain.py", "import fxremat.passes.joint.graph"),
        ("ir/chain.py", "from ..solvers import rotor"),
        ("passes/joint/build.py", "from fxremat import pipeline"),
        ("passes/joint/build.py", "from fxremat import compile"),
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
        ("planning/choose.py", "import torch\nfrom fxremat import torch_compat"),
    ],
)
def test_a_right_arrow_is_let_through(file: str, source: str) -> None:
    assert not wrong_arrows(Path(file), source)


@pytest.mark.parametrize("module", ["fxremat", "fxremat.solvers"])
def test_torch_is_not_loaded(module: str) -> None:
    code = f"import sys, {module}; sys.exit('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
