"""Loops as people write them: measured peak against budget, bits against ``aot_eager``.

Each model in each loop, at shares of what the loop takes as it is and at the least budget that
errors ask for; after two iterations that may teach, three are measured.
Run: python -m benchmarks.loops [model …] [--loop NAME …] [--quick] [--processes N]
"""

from __future__ import annotations

import argparse
import os
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import distributed, multiprocessing

from benchmarks.common import show
from benchmarks.rows import Row, Rows, failure
from fxremat.units import format_bytes
from tests.loops.cell import LOOPS, Cell, at_least, within
from tests.loops.subjects import SUBJECTS

MODELS = ("gpt", "llama", "resnet", "unet")

SHARES = (1.0, 0.6, 0.4, None)
"""``None``: the least."""

ROOMY = 2.0
"""A share at which nothing is recomputed."""

COMPARED = ("plain", "tutorial", "zero_in_place", "accumulate", "optimizer_in_backward")
"""Loops whose peaks are compared where nothing is recomputed."""


def measure(name: str, model: str, share: float | None) -> Row:
    """One cell."""
    row: Row = {"model": model, "loop": name, "share": "least" if share is None else share}
    try:
        cell = at_least(name, model) if share is None else within(name, model, share)
    except Exception as error:
        return {**row, "faults": [failure(error)["failed"]], **failure(error)}
    return {**row, **_described(cell)}


def _described(cell: Cell) -> Row:
    row: Row = {
        "budget_bytes": cell.budget_bytes,
        "reference_bytes": cell.reference.peak_bytes,
        "gradient_bytes": cell.reference.gradient_bytes,
        "refused_least_bytes": cell.least_bytes,
        "over_bytes": cell.over_bytes,
        "faults": cell.faults,
    }
    ran = cell.ran
    if ran is None:
        return row
    return {
        **row,
        "peak_bytes": ran.peak_bytes,
        "held_bytes": ran.held_bytes,
        "peak_in": ran.peak_in,
        "plans": ran.plans,
        "taught": ran.taught,
        "warned": ran.warned,
    }


def text_of(row: Row) -> list[str]:
    """A row for people."""
    peak = row.get("peak_bytes")
    budget = row.get("budget_bytes")
    outcome = "; ".join(row["faults"]) or ("kept" if peak else "refused")
    return [
        row["model"],
        row["loop"],
        str(row["share"]),
        format_bytes(budget) if budget else "",
        f"{peak / budget:.3f}" if peak and budget else "",
        str(len(row.get("taught", ()))),
        " ".join(outcome.split())[:90],
    ]


def compared(model: str) -> list[Row]:
    """How much more than the plain loop others take, in shares of the gradients' bytes."""
    found = {name: measure(name, model, ROOMY) for name in COMPARED}
    if any("peak_bytes" not in row for row in found.values()):
        return list(found.values())
    for row in found.values():
        for other in ("plain", "tutorial"):
            more = row["peak_bytes"] - found[other]["peak_bytes"]
            row[f"more_than_{other}"] = more / row["gradient_bytes"]
    return list(found.values())


def show_compared(rows: Sequence[Row]) -> None:
    """Print what :func:`compared` found."""

    def share(row: Row, key: str) -> str:
        return f"{100 * row[key]:+.1f} %" if key in row else ""

    show(
        "Peak with nothing recomputed, in shares of the gradients' bytes",
        ["model", "loop", "more than plain", "more than tutorial"],
        [
            [r["model"], r["loop"], share(r, "more_than_plain"), share(r, "more_than_tutorial")]
            for r in rows
        ],
    )


def cells(
    models: Iterable[str], loops: Iterable[str], shares: Sequence[float | None]
) -> Iterable[tuple[str, str, float | None]]:
    """Loop, model and share of all that are to be measured."""
    for model in models:
        for name in loops:
            if LOOPS[name].suits(SUBJECTS[model]):
                yield from ((name, model, share) for share in shares)


def run(options: argparse.Namespace) -> int:
    """Measure all cells, in this process; returns how many break the promise."""
    torch.set_num_threads(1)
    told = not distributed.is_initialized() or distributed.get_rank() == 0
    rows = Rows(options.save, {"processes": options.processes})
    shares = (0.6,) if options.quick else SHARES
    for cell in cells(options.models, options.loop, shares):
        row = measure(*cell)
        if told:
            rows.add(row)
            print(*text_of(row), sep="  ", flush=True)
    if told and not options.quick and options.processes == 1:
        several = [row for model in ("deep", *options.models) for row in compared(model)]
        rows.about["compared"] = several
        show_compared(several)
    columns = ["model", "loop", "share", "budget", "peak / budget", "warnings", "outcome"]
    broken = [row for row in rows.rows if row["faults"]]
    if told:
        show("Loops within a budget", columns, [text_of(row) for row in rows.rows])
        print(f"{len(rows.rows)} cells, {len(broken)} break the promise")
        rows.save()
    return len(broken)


def _rank(rank: int, options: argparse.Namespace, meeting: str) -> None:
    distributed.init_process_group(
        "gloo", init_method=f"file://{meeting}", rank=rank, world_size=options.processes
    )
    run(options)
    distributed.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="*", default=MODELS, metavar="model")
    parser.add_argument("--loop", nargs="+", choices=LOOPS, default=tuple(LOOPS))
    parser.add_argument("--quick", action="store_true", help="at a share of 0.6 alone")
    parser.add_argument("--processes", type=int, default=1, help="of one process group")
    parser.add_argument("--save", default="loops", help="name of the results file")
    options = parser.parse_args()
    os.environ["FXREMAT_CACHE"] = "0"  # what one loop teaches must not help another
    if options.processes == 1:
        raise SystemExit(bool(run(options)))
    with tempfile.TemporaryDirectory() as folder:
        arguments: tuple[Any, ...] = (options, str(Path(folder) / "meeting"))
        multiprocessing.spawn(_rank, arguments, nprocs=options.processes)


if __name__ == "__main__":
    main()
