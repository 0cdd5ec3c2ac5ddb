"""What the benchmark scripts share: the machine's name, tables and JSON files."""

from __future__ import annotations

import ctypes
import gc
import json
import os
import platform
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

import fxremat

RESULTS = Path(__file__).parent / "results"

SPLITS: dict[str, dict[str, Any]] = {
    "as traced": {"effort": fxremat.Effort(forms=("norms",))},
    "same bits": {},
    "to rounding": {"bits": "rounding", "effort": fxremat.Effort(forms=("parts",))},
}
"""Options of ``fxremat.compile`` by what may be computed in parts."""


def budgeted(budget: object, kind: str) -> str:
    """Return a budget, of whatever form, as one of ``"allocated"`` or ``"reserved"`` bytes."""
    amount = f"{100 * budget:.6g}%" if isinstance(budget, float) else budget
    return f"{amount} {kind}"


def machine() -> dict[str, Any]:
    """What figures depend on: processor, cores in use, Python and library versions."""
    found: dict[str, Any] = {
        "cpu": _processor(),
        "cores": len(os.sched_getaffinity(0))
        if hasattr(os, "sched_getaffinity")
        else os.cpu_count(),
        "python": platform.python_version(),
    }
    for library in ("torch", "numba", "ortools"):
        try:
            found[library] = __import__(library).__version__
        except ImportError:
            continue
    return found


def _processor() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


@dataclass(frozen=True, slots=True)
class Spread:
    """Repeated measurements of one quantity."""

    median: float
    low: float
    high: float

    @staticmethod
    def of(values: Sequence[float]) -> Spread:
        """Median, least and greatest of ``values``."""
        return Spread(statistics.median(values), min(values), max(values))

    def text(self, scale: float = 1.0, digits: int = 1) -> str:
        """``median [low … high]``, each times ``scale``."""
        low, high = self.low * scale, self.high * scale
        return f"{self.median * scale:.{digits}f} [{low:.{digits}f} … {high:.{digits}f}]"


def keep_freed_memory() -> None:
    """Have glibc keep what is freed, for all that runs from here on; elsewhere nothing is done.

    Else it is chance, as the heap happens to lie, whether a step gives its memory back to the
    system and pays for new pages in the next one: up to 4 % of its time, on either side.
    """
    libc = ctypes.CDLL(None)
    if hasattr(libc, "gnu_get_libc_version"):
        libc.mallopt(_MMAP_MAX, 0)
        libc.mallopt(_TRIM_THRESHOLD, 2**31 - 1)
        libc.mallopt(_TOP_PAD, 2**26)


_TRIM_THRESHOLD, _TOP_PAD, _MMAP_MAX = -1, -2, -4
"""Of ``mallopt``, from ``malloc.h``."""


def interleave(runs: dict[str, Callable[[], float]], *, rounds: int) -> dict[str, list[float]]:
    """Measure each of ``runs`` once a round, in turn, so that drift hits all alike.

    Every other round goes backwards: nobody always runs after the same neighbour.
    """
    values: dict[str, list[float]] = {name: [] for name in runs}
    for loss_point in range(rounds):
        names = list(runs) if loss_point % 2 == 0 else list(reversed(runs))
        for name in names:
            values[name].append(runs[name]())
    return values


def ratios(values: dict[str, list[float]], name: str, base: str) -> Spread:
    """``name`` over ``base``, round by round."""
    return Spread.of([a / b for a, b in zip(values[name], values[base], strict=True)])


def peak_of(step: Callable[[], object]) -> int:
    """Most bytes that ``step`` has allocated at any instant, as torch's profiler tells.

    What was there before it is not counted where it is given back.
    """
    from torch._C._profiler import _EventType
    from torch.profiler import ProfilerActivity, profile

    gc.collect()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as watched:
        step()
    changes: list[tuple[int, int]] = []
    events: list[Any] = list(watched.profiler.kineto_results.experimental_event_tree())
    while events:
        event = events.pop()
        if event.tag == _EventType.Allocation:
            changes.append((event.start_time_ns, event.extra_fields.alloc_size))
        events.extend(event.children)
    changes.sort(key=lambda change: change[0])
    now = most = 0
    for _when, change in changes:
        now += change
        most = max(most, now)
    return most


def show(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table, numbers right-aligned."""
    table = Table(title=title)
    for index, column in enumerate(columns):
        table.add_column(column, justify="left" if index == 0 else "right", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    Console(width=160).print(table)


class Stated:
    """What a paper states, and whether it is found."""

    def __init__(self) -> None:
        self.lines: list[dict[str, str | bool]] = []

    def note(self, text: str, found: str, holds: bool) -> None:
        """Add a statement."""
        self.lines.append({"stated": text, "found": found, "holds": holds})

    def shown(self) -> list[dict[str, str | bool]]:
        """All of them, which are printed as a table."""
        rows = [
            [str(x["stated"]), str(x["found"]), "yes" if x["holds"] else "NO"] for x in self.lines
        ]
        show("What the paper states", ["stated", "found", ""], rows)
        return self.lines


def pyplot() -> Any:
    """Matplotlib's, to draw into files; ``None``: it is missing, which is said."""
    try:
        import matplotlib
    except ImportError:
        print("no plot: matplotlib is not installed (pip install fxremat[plot])")
        return None
    matplotlib.use("Agg")
    from matplotlib import pyplot as found

    return found


def rows_but(name: str, anew: Callable[[dict[str, Any]], bool]) -> list[dict[str, Any]]:
    """Rows that a file of results has of such a machine, but for those measured ``anew``."""
    file = RESULTS / f"{name}.json"
    if not file.exists():
        return []
    found, here = json.loads(file.read_text()), machine()
    if any(found["machine"].get(key) != here[key] for key in ("cpu", "torch")):
        print(f"rows of {found['machine']} are not kept in {file}")
        return []
    return [row for row in found["results"]["rows"] if not anew(row)]


def save(name: str, results: Any, *, folder: Path = RESULTS, quiet: bool = False) -> Path:
    """Write ``results`` and the machine to ``name.json``, in ``benchmarks/results``.

    The file is replaced at once: whoever is interrupted leaves the old one, or the new one.
    """
    path = folder / f"{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    written = path.with_suffix(".json.new")
    written.write_text(json.dumps({"machine": machine(), "results": results}, indent=1) + "\n")
    written.replace(path)
    if not quiet:
        print(f"wrote {path}")
    return path
