"""Compiled loops where numba can keep none: each process compiles them, and that is said once."""

from __future__ import annotations

import gc
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numba
import pytest

import fxremat

LOOP = """
import logging
from fxremat.jit import entry
import fxremat.solvers.kernels

@entry
def total(count):
    found = 0
    for number in range(count):
        found += number
    return found

print(total(10))
"""

STEP = """
import logging, torch, fxremat
from torch import nn
logging.basicConfig()
x = torch.randn(64, 16)
model = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16))
call = fxremat.compile(model, x, "min")
call(x).sum().backward()
print(call.plan.budget_bytes > 0)
"""


@pytest.fixture
def nowhere_to_write(tmp_path: Path) -> dict[str, str]:
    """The environment of a package, and of a home, in which nothing can be written.

    Whoever runs this, root as well: files are where folders would have to be.
    """
    source = Path(fxremat.__file__).parent
    package = tmp_path / "installed" / "fxremat"
    shutil.copytree(source, package, ignore=shutil.ignore_patterns("__pycache__"))
    for folder in {file.parent for file in package.rglob("*.py")}:
        (folder / "__pycache__").touch()
    kept = {name: value for name, value in os.environ.items() if "CACHE" not in name}
    return {**kept, "PYTHONPATH": str(package.parent), "HOME": os.devnull}


LOOPS = """
import torch, fxremat
from numba.core import event
from torch import nn

blocks = [nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16)) for _ in range(4)]
model, x = nn.Sequential(*blocks), torch.randn(64, 16)
with event.install_recorder("numba:compile") as recorder:
    fxremat.compile(model, x, "min", optimizer=torch.optim.AdamW, loss=torch.sum)
begun = [each.data["dispatcher"].py_func for _, each in recorder.buffer if each.is_start]
ours = [f"{f.__module__}.{f.__qualname__}" for f in begun if f.__module__.startswith("fxremat.")]
print(len(begun) - len(ours), *ours)
"""


def run(code: str, folder: Path, environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    file = folder / "script.py"
    (folder / "__pycache__").touch()
    file.write_text(code)
    command = [sys.executable, str(file)]
    return subprocess.run(
        command, env=environment, cwd=folder, capture_output=True, text=True, check=False
    )


def test_loops_are_compiled_where_none_can_be_kept(
    tmp_path: Path, nowhere_to_write: dict[str, str]
):
    done = run(LOOP, tmp_path, nowhere_to_write)
    assert done.stdout == "45\n", done.stderr
    assert done.stderr.count("NUMBA_CACHE_DIR") == 1


def test_with_a_folder_of_numbas_they_are_kept(tmp_path: Path, nowhere_to_write: dict[str, str]):
    kept = tmp_path / "kept"
    done = run(LOOP, tmp_path, {**nowhere_to_write, "NUMBA_CACHE_DIR": str(kept)})
    assert done.stdout == "45\n", done.stderr
    assert "NUMBA_CACHE_DIR" not in done.stderr
    assert any(kept.rglob("*.nbi"))


@pytest.mark.slow
@pytest.mark.parametrize("cache", [None, "0"])
def test_a_model_is_compiled_where_nothing_can_be_written(
    tmp_path: Path, nowhere_to_write: dict[str, str], cache: str | None
):
    more = {} if cache is None else {"FXREMAT_CACHE": cache}
    done = run(STEP, tmp_path, {**nowhere_to_write, **more})
    assert done.stdout == "True\n", done.stderr
    assert done.stderr.count("NUMBA_CACHE_DIR") == 1
    assert ("FXREMAT_CACHE" in done.stderr) == (cache is None)


def test_each_loop_is_compiled_once(tmp_path: Path):
    """A loop compiled for further types, or more of numba's library, would take longer."""
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path / "loops"), "FXREMAT_CACHE": "0"}
    environment["PYTHONPATH"] = str(Path(fxremat.__file__).parents[1])
    done = run(LOOPS, tmp_path, environment)
    assert done.returncode == 0, done.stderr
    library, *ours = done.stdout.split()
    assert sorted(set(ours)) == sorted(ours)
    assert 20 < len(ours) <= 56
    assert int(library) <= 6  # min, max and int of numba's library

    again = run(LOOPS, tmp_path, environment)
    assert again.stdout.split() == ["0"], again.stderr


def test_python_cannot_call_a_helper():
    from fxremat.solvers.kernels import row_of

    with pytest.raises(TypeError, match="row_of is a helper"):
        row_of(0, 1, 2)


def test_garbage_is_collected_again_after_compiling():
    from fxremat.jit import entry

    # Without a file, so that numba keeps nothing of it for a later run.
    names: dict[str, Any] = {"__name__": "fxremat.tests"}
    exec("def total(count): return count + 1", names)
    total = names["total"]
    assert gc.isenabled()
    assert entry(total)(3) == 4
    assert gc.isenabled()
    with pytest.raises(numba.TypingError):
        entry(total)("text")
    assert gc.isenabled()
