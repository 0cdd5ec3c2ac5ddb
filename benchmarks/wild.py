"""Models of other libraries, captured whole and in pieces: peaks against budgets, bits, seconds.

Each model is run as it is, for its peak and the number of graphs it is captured in; then within
1.5, 0.8 and 0.6 times that peak and the least budget. No loss is told. Of 8 steps the last 4 are
measured by torch's profiler; gradients and buffers after each are compared with ``aot_eager``'s.
Each row is a process of its own, and rows that ``results/wild.json`` has are kept.
Run: python -m benchmarks.wild [--install] [--list] [--only PATTERN] [--whole | --pieces] [--again]
"""

from __future__ import annotations

import argparse
import fnmatch
import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks.common import RESULTS, Spread, show
from benchmarks.rows import Row, Rows, append, failure, run_part
from fxremat.units import format_bytes

BUDGETS = ("1.5", "0.8", "0.6", "min")

SECONDS = 900
"""That one row may take."""


def install() -> None:
    """Install all libraries, at the torch that is pinned."""
    from benchmarks.wild_models import PACKAGES

    constraints = Path(__file__).parent.parent / "constraints.txt"
    wanted = sorted({package for packages in PACKAGES.values() for package in packages})
    command = [sys.executable, "-m", "pip", "install", "-c", str(constraints), *wanted]
    raise SystemExit(subprocess.call(command))


def row_in_this_process(name: str, budget: str, eager_bytes: int, *, varied: bool) -> Row:
    """A row; an error is one, too."""
    from benchmarks.wild_models import WILD, prepare
    from benchmarks.wild_row import measure

    entry = WILD[name]
    prepare()
    if importlib.util.find_spec(entry.library) is None:
        return {"missing": entry.library}
    try:
        return measure(entry, budget, eager_bytes, varied=varied)
    except Exception as error:
        return failure(error)


def row_of(name: str, budget: str, eager_bytes: int, options: argparse.Namespace) -> Row:
    """A row, of a fresh process."""
    found: list[Row] = []
    command = ["-m", "benchmarks.wild", "--row", name, budget, "--bytes", str(eager_bytes)]
    command += ["--seeds", options.seeds]
    settings = {"FXREMAT_CACHE": "0", "OMP_NUM_THREADS": "1", "WANDB_DISABLED": "true"}
    settings |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    ended = run_part(command, settings=settings, seconds=SECONDS, add=found.append)
    row: Row = {"model": name, "share": budget}
    if found:
        return {**row, **found[-1]}
    return {**row, "failed": ended or "ended without a row"}


def finish(row: Row) -> Row:
    """A row with what is wrong with it."""
    from benchmarks.wild_row import faults_of

    if "missing" in row:
        return row
    if row["share"] == "eager":
        return {**row, "faults": [row["failed"]] if "failed" in row else []}
    return {**row, "faults": faults_of(row)}


def run(names: Sequence[str], options: argparse.Namespace) -> list[Row]:
    """All rows that are not there yet."""
    rows = Rows(options.save, {"seeds": options.seeds}, rows=kept_rows(options))
    there = {(row["model"], row["share"]): row for row in rows.rows}

    def wanted(name: str, share: str, eager: Row) -> Row:
        if (name, share) not in there:
            row = row_of(name, share, eager.get("peak_bytes", 0), options)
            row = finish({"repeats": eager.get("repeats", True), **row})
            if "missing" in row:
                return row
            there[name, share] = row
            rows.add(row)
            print(*line_of(row), sep="  ", flush=True)
        return there[name, share]

    missing: dict[str, list[str]] = {}
    shown: list[str] = []
    for name in names:
        eager = wanted(name, "eager", {})
        if "missing" in eager:
            missing.setdefault(eager["missing"], []).append(name)
            continue
        if options.kind not in (None, eager.get("kind")):
            continue
        shown.append(name)
        if "peak_bytes" in eager:
            for share in options.budgets:
                wanted(name, share, eager)
    if missing:
        print(f"not installed: {missing}; python -m benchmarks.wild --install installs all")
    return [row for row in there.values() if row["model"] in shown]


def kept_rows(options: argparse.Namespace) -> list[Row]:
    """Rows of an earlier run with the same seeds, less those that are to be run again."""
    path = RESULTS / f"{options.save}.json"
    if not path.exists():
        return []
    results = json.loads(path.read_text())["results"]
    if results["seeds"] != options.seeds:
        raise SystemExit(f"{path} is of --seeds {results['seeds']}: give another --save")
    known = set(selected(None))
    rows: list[Row] = [row for row in results["rows"] if row["model"] in known]
    if not options.again:
        return rows
    again = set(selected(options.only)) if options.kind is None else set()
    for row in rows:
        if row.get("kind") == options.kind is not None and row["model"] in selected(options.only):
            again.add(row["model"])
    shares = {*options.budgets, *(() if options.keep_eager else ("eager",))}
    return [r for r in rows if r["model"] not in again or r["share"] not in shares]


def selected(patterns: Sequence[str] | None) -> list[str]:
    """Names of models that match one of the patterns, or are of a library that does."""
    from benchmarks.wild_models import WILD

    def matches(name: str, pattern: str) -> bool:
        known = (name, WILD[name].library)
        return any(fnmatch.fnmatch(k, pattern) or pattern in k for k in known)

    if patterns is None:
        return list(WILD)
    return [name for name in WILD if any(matches(name, pattern) for pattern in patterns)]


def line_of(row: Row) -> list[str]:
    """A row as it comes."""
    if row["share"] == "eager" and "peak_bytes" in row:
        peak, resident = format_bytes(row["peak_bytes"]), format_bytes(row["resident_bytes"])
        sizes = f"{peak}, of it resident {resident}"
        return [row["model"], "eager", f"{row['kind']} {row['graphs']}", sizes]
    words = " | ".join(row["faults"]) or cell_of(row)
    return [row["model"], row["share"], " ".join(words.split())[:200]]


def cell_of(row: Row | None) -> str:
    """Of one budget: the share of it that is used."""
    if row is None:
        return ""
    if "failed" in row:
        return row["failed"].split(":")[0]
    if "refused" in row:
        least = row.get("least", {})
        if "used" not in least:
            return "refused, " + cell_of(least) if least else "refused"
        return f"{least['used']:.3f} at its least"
    mark = "" if row["used"] <= 1 else " OVER"
    return f"{row['used']:.3f}{mark}"


def bits_of(rows: dict[str, Row]) -> str:
    """Budgets at which gradients or buffers were others."""
    several = {share: row.get("least", row) for share, row in rows.items()}
    compared = {share: row["same_bits"] for share, row in several.items() if "same_bits" in row}
    if not all(row.get("repeats", True) for row in rows.values()):
        return "eager's vary"
    other = [share for share, same in compared.items() if not same]
    return ", ".join(other) or ("same" if compared else "")


def table(rows: Sequence[Row]) -> None:
    """Print a line a model, and what is wrong below."""
    models: dict[str, dict[str, Row]] = {}
    for row in rows:
        models.setdefault(row["model"], {})[row["share"]] = row
    lines = []
    for name, found in models.items():
        eager = found.pop("eager", {})
        warned = sum(len(r.get("budget_warnings", ())) for r in found.values())
        time = found.get("1.5", {}).get("beside_aot_eager")
        lines.append(
            [
                name,
                eager.get("kind", "failed"),
                str(eager.get("graphs", "")),
                format_bytes(eager["peak_bytes"]) if "peak_bytes" in eager else "",
                *(cell_of(found.get(share)) for share in BUDGETS),
                bits_of(found),
                str(warned),
                Spread(*time).text(digits=2) if time else "",
            ]
        )
    columns = ["model", "kind", "graphs", "eager peak", *BUDGETS, "bits", "warnings", "÷ aot_eager"]
    show("Models of other libraries: peak / budget", columns, lines)
    for row in rows:
        for fault in row["faults"]:
            print(f"{row['model']} {row['share']}: {' '.join(fault.split())[:300]}")


def listed(names: Sequence[str]) -> None:
    """Print names, and what is known of them."""
    from benchmarks.wild_models import WILD

    path = RESULTS / "wild.json"
    rows: list[Row] = json.loads(path.read_text())["results"]["rows"] if path.exists() else []
    known = {row["model"]: row for row in rows if row["share"] == "eager"}
    lines = []
    for name in names:
        row = known.get(name, {})
        peak = format_bytes(row["peak_bytes"]) if "peak_bytes" in row else ""
        kind, graphs = row.get("kind", ""), str(row.get("graphs", ""))
        lines.append([name, WILD[name].library, kind, graphs, peak])
    show("Models", ["model", "library", "kind", "graphs", "eager peak"], lines)


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    flag: Callable[..., object] = parser.add_argument
    flag("--install", action="store_true", help="pip-install all libraries")
    flag("--list", action="store_true", help="names of models")
    flag("--only", nargs="+", metavar="PATTERN", help="of names or libraries")
    flag("--whole", dest="kind", action="store_const", const="whole", help="in one graph")
    flag("--pieces", dest="kind", action="store_const", const="pieces", help="in several")
    flag(
        "--budgets",
        nargs="*",
        default=BUDGETS,
        help="shares of the eager peak, or min; none: only what they take as they are",
    )
    flag("--seeds", choices=("same", "each"), default="same", help="of all steps, or of each")
    flag("--again", action="store_true", help="rows that are there, too")
    flag("--keep-eager", action="store_true", help="with --again: not what takes no budget")
    flag("--table", action="store_true", help="of what is there; nothing is run")
    flag("--save", default="wild", help="name of the results file")
    flag("--row", nargs=2, metavar=("NAME", "BUDGET"), help=argparse.SUPPRESS)
    flag("--bytes", type=int, default=0, help=argparse.SUPPRESS)
    flag("--rows", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> None:
    options = parsed()
    if options.install:
        install()
    if options.row:
        varied = options.seeds == "each"
        row = row_in_this_process(*options.row, options.bytes, varied=varied)
        if options.rows:
            append(options.rows, row)
        else:
            print(json.dumps(row, indent=1))
        return
    if options.list:
        listed(selected(options.only))
        return
    if options.table:
        names = set(selected(options.only))
        table([row for row in kept_rows(options) if row["model"] in names])
        return
    os.environ["FXREMAT_CACHE"] = "0"
    rows = run(selected(options.only), options)
    table(rows)
    broken = sum(bool(row["faults"]) for row in rows)
    print(f"{len(rows)} rows, {broken} with faults")
    raise SystemExit(bool(broken))


if __name__ == "__main__":
    main()
