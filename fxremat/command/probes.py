"""The probes of ``fxremat env``: versions, devices, compilers and caches of a process.

Each probe imports what it needs when it runs, so that a broken package is a line of the report.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import platform
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fxremat import torch_versions
from fxremat.units import format_bytes

REQUIRED = ("torch", "numpy", "numba", "networkx")
"""Packages that ``compile`` needs."""

OPTIONAL = ("triton", "ortools", "rich")
"""Packages without which plans are made, but with less."""

LIBRARIES = (
    "transformers",
    "lightning",
    "accelerate",
    "peft",
    "trl",
    "torchao",
    "bitsandbytes",
    "timm",
)
"""Packages that are listed if they are installed."""

TIMEOUT_S = 60.0
"""Seconds after which a program that a probe runs is stopped."""

_PROGRAM = """#include <cmath>
#include <vector>
extern "C" double largest(double x) { return std::vector<double>(1, std::fmax(x, 0.0))[0]; }
"""
"""The program that is compiled to see if the C++ compiler works."""


@dataclass(frozen=True, slots=True)
class Fact:
    """A line of the report.

    Attributes:
        name: its name.
        text: its value as text.
        data: its value as JSON data, or ``None`` if that is ``text``.
        problem: what ``compile`` needs and does not have; empty if nothing.
    """

    name: str
    text: str
    data: object = None
    problem: str = ""

    @property
    def value(self) -> object:
        """The value as JSON data."""
        return self.text if self.data is None else self.data


def shortly(error: BaseException) -> str:
    """Return the type and the first line of an error."""
    first = (str(error).splitlines() or [""])[0]
    return f"{type(error).__name__}: {first}" if first else type(error).__name__


def _package() -> Iterator[Fact]:
    package: Any = importlib.import_module("fxremat")
    folder = str(Path(package.__file__).parent)
    data = {"version": package.__version__, "folder": folder}
    yield Fact("fxremat", f"{package.__version__}, imported from {folder}", data)


def _python() -> Iterator[Fact]:
    kind = platform.python_implementation()
    yield Fact("python", f"{platform.python_version()} ({kind}, {sys.executable})")


def _system() -> Iterator[Fact]:
    yield Fact("os", platform.platform())


def _processor() -> Iterator[Fact]:
    cores, usable = os.cpu_count() or 1, os.cpu_count() or 1
    if hasattr(os, "sched_getaffinity"):
        usable = len(os.sched_getaffinity(0))
    model, info = platform.processor() or platform.machine(), Path("/proc/cpuinfo")
    if info.exists():
        names = re.findall(r"^model name\s*:\s*(.+)$", info.read_text(errors="replace"), re.M)
        model = names[0] if names else model
    data = {"model": model, "cores": cores, "usable": usable}
    yield Fact("cpu", f"{model}, {cores} cores, {usable} usable by this process", data)


def _memory() -> Iterator[Fact]:
    nbytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    yield Fact("ram", format_bytes(nbytes), nbytes)


def _packages() -> Iterator[Fact]:
    for name in REQUIRED[1:]:
        yield _imported(name)
    for name in OPTIONAL:
        version = _installed(name)
        yield Fact(name, version or "not installed", version or False)
    for name in LIBRARIES:
        version = _installed(name)
        if version:
            yield Fact(name, version)


def _imported(name: str) -> Fact:
    """Return the version of a package that ``compile`` needs, after importing it."""
    try:
        module = importlib.import_module(name)
    except Exception as error:  # a broken package may raise anything
        text = f"{_installed(name) or 'not installed'}, cannot be imported ({shortly(error)})"
        problem = f"{name} cannot be imported ({shortly(error)}): pip install {name}"
        return Fact(name, text, {"error": shortly(error)}, problem=problem)
    return Fact(name, str(getattr(module, "__version__", _installed(name))))


def _installed(name: str) -> str | None:
    """Return the version of an installed package, which is not imported, or ``None``."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _torch() -> Iterator[Fact]:
    fact = _imported("torch")
    if fact.problem:
        yield fact
        return
    torch: Any = importlib.import_module("torch")
    build = "cpu"
    if torch.version.cuda:
        build = f"CUDA {torch.version.cuda}"
    elif torch.version.hip:
        build = f"ROCm {torch.version.hip}"
    git = str(torch.version.git_version or "unknown")
    data = {"version": torch.__version__, "build": build, "git": git}
    yield Fact("torch", f"{torch.__version__}, built for {build}, git {git[:12]}", data)
    yield _supported(torch.__version__)
    threads = torch.get_num_threads()
    yield Fact("torch threads", str(threads), threads)


def _supported(version: str) -> Fact:
    """Return whether fxremat was tried with this version of torch."""
    holds, range_ = torch_versions.problem(version) is None, torch_versions.supported()
    text = f"{'yes' if holds else 'not tried'} ({range_})"
    return Fact("torch supported", text, {"supported": holds, "range": range_})


def _devices() -> Iterator[Fact]:
    torch: Any = importlib.import_module("torch")
    if not torch.cuda.is_available():
        yield Fact("devices", "cpu only", [])
        return
    found, driver = [], _driver()
    for index in range(torch.cuda.device_count()):
        own = torch.cuda.get_device_properties(index)
        capability = f"{own.major}.{own.minor}"
        found.append(
            {
                "name": own.name,
                "memory_bytes": own.total_memory,
                "capability": capability,
                "driver": driver,
            }
        )
        text = (
            f"{own.name}, {format_bytes(own.total_memory)}, compute capability {capability}, "
            f"driver {driver}"
        )
        yield Fact(f"cuda:{index}", text, found[-1])


def _driver() -> str:
    """Return the version of the GPU's driver, or why it is unknown."""
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        ran = subprocess.run(query, capture_output=True, text=True, timeout=TIMEOUT_S, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        return f"unknown ({type(error).__name__})"
    return (ran.stdout.split() or ["unknown"])[0]


def _compilers() -> Iterator[Fact]:
    yield from _cpp()
    torch: Any = importlib.import_module("torch")
    compat: Any = importlib.import_module("fxremat.torch_compat")
    missing = compat.missing_compiler(torch.device("cuda"))
    if missing and not torch.cuda.is_available():
        missing = "no GPU that it supports"
    yield Fact("triton works", f"no: {missing}" if missing else "yes", missing is None)


def _cpp() -> Iterator[Fact]:
    """Yield the C++ compiler that Inductor uses, and whether it compiles a program with OpenMP."""
    compat: Any = importlib.import_module("fxremat.torch_compat")
    name = "c++ compiler"
    compiler = compat.cpp_compiler()
    if compiler is None:
        yield Fact(name, "none (set CXX); executor='inductor' needs one", {"works": False})
        return
    failure = _failure_of(compiler)
    text = f"{compiler}, does not work: {failure}" if failure else f"{compiler}, works"
    yield Fact(name, text, {"path": compiler, "works": not failure})


def _failure_of(compiler: str) -> str:
    """Return why a C++ compiler cannot compile a small program; empty if it can."""
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "probe.cpp"
        source.write_text(_PROGRAM)
        command = [compiler, "-shared", "-fPIC", "-std=c++17", str(source)]
        command += ["-o", str(source.with_suffix(".so"))]
        if sys.platform == "linux":
            command.append("-fopenmp")
        try:
            ran = subprocess.run(
                command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
            )
        except (OSError, subprocess.SubprocessError) as error:
            return shortly(error)
    said = ran.stderr.strip().splitlines() or [f"exit code {ran.returncode}"]
    return "" if ran.returncode == 0 else said[-1]


def _caches() -> Iterator[Fact]:
    folder: Any = importlib.import_module("fxremat.cache.folder")
    own = folder.Store.of_environment().folder
    if own is None:
        yield Fact("cache", f"none ({folder.VARIABLE}=0, or no home folder)", {"path": None})
    else:
        yield _folder("cache", own, own.glob("fxremat-*.json.gz"))
    yield from _numba_cache()


def _numba_cache() -> Iterator[Fact]:
    """Yield where numba keeps the compiled loops of the planner, and whether it can write there."""
    kernels: Any = importlib.import_module("fxremat.solvers.kernels")
    paths = [
        path
        for value in vars(kernels).values()
        if (path := getattr(getattr(value, "stats", None), "cache_path", None))
    ]
    if paths:
        place = Path(paths[0])
        yield _folder("numba cache", place, place.glob("*.nb[ci]"))
    else:
        text = "none: each process compiles the planner (set NUMBA_CACHE_DIR)"
        yield Fact("numba cache", text, {"path": None, "writable": False})


def _folder(name: str, folder: Path, entries: Iterator[Path]) -> Fact:
    """Return the path of a folder, whether it is writable, and the count and bytes of entries."""
    nearest = next((p for p in (folder, *folder.parents) if p.exists()), folder)
    writable = os.access(nearest, os.W_OK | os.X_OK) and nearest.is_dir()
    sizes = [entry.stat().st_size for entry in entries] if folder.is_dir() else []
    data = {
        "path": str(folder),
        "writable": writable,
        "entries": len(sizes),
        "bytes": sum(sizes),
    }
    can = "writable" if writable else "not writable"
    text = f"{folder}, {can}, {len(sizes)} entries, {format_bytes(sum(sizes))}"
    return Fact(name, text, data)


PROBES: tuple[tuple[str, Callable[[], Iterator[Fact]]], ...] = (
    ("fxremat", _package),
    ("python", _python),
    ("os", _system),
    ("cpu", _processor),
    ("ram", _memory),
    ("torch", _torch),
    ("packages", _packages),
    ("devices", _devices),
    ("compilers", _compilers),
    ("caches", _caches),
)
"""The probes in the order of the report, each with the name of the line if it fails."""
