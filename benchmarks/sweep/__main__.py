"""Every operator and module of torch's test databases at the least budget: who has other bits.

Each of them is called with up to three of torch's samples, and trained under ``aot_eager`` and
within fxremat's least budget: ``--form embedded`` puts it between elementwise operations, ``plain``
calls it on parameters and returns its results as they are, ``scaled`` calls it on arguments that
require gradients. Losses, results, gradients and buffers are compared bit by bit, and the peak of a
step with the budget. What fxremat refuses is a failure as well: all that ``aot_eager`` trains must
run, and where a sample was given and refused, it is tried without one. A worker does one after the
other; it is started again where it dies or hangs.
Run: python -m benchmarks.sweep [--form FORM] [--kinds op train eval] [--dtypes float32 bfloat16]
[--ops NAME …] [--samples N] [--limit SECONDS] [--save NAME] [--resume]
(torch's databases need expecttest)
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.common import RESULTS, show
from benchmarks.rows import Row, Rows
from benchmarks.sweep.cases import FORMS, Case, cases
from benchmarks.sweep.train import OUTCOMES, SKIPPED
from benchmarks.sweep.worker import Worker

KINDS = ("op", "train", "eval")

UNINITIALIZED = "*empty*"
"""Operators whose results are no numbers."""


@dataclass(frozen=True, slots=True)
class Sweep:
    """What is run.

    Attributes:
        selected: cases, in their order.
        samples: of each, at most.
        limit_s: that one model may take.
        rows: where they go.
    """

    selected: Sequence[Case]
    samples: int
    limit_s: float
    rows: Rows = field(default_factory=lambda: Rows("sweep", {}))

    def run(self) -> list[Row]:
        """All rows, with those that were there."""
        there = Counter(key_of(row) for row in self.rows.rows)
        worker = Worker(self.limit_s)
        try:
            for case in self.selected:
                first = there[key_of(case.row)]
                if first >= self.samples:
                    continue
                found = list(worker.rows(case, self.samples, first))
                self.rows.rows += found
                self.rows.save(quiet=True)
                for row in found:
                    if row["outcome"] in OUTCOMES[1:]:
                        print(*line_of(row), sep="  ", flush=True)
        finally:
            worker.stop()
        return self.rows.rows


def key_of(row: Row) -> tuple[str, ...]:
    """The case that a row is of."""
    return row["kind"], row["name"], row["dtype"], row.get("form", "embedded")


def line_of(row: Row) -> list[str]:
    """A failure."""
    words = row.get("differs") or row.get("failed", "")
    whole = row.get("whole", {}).get("outcome")
    in_parts = [f"(whole: {whole})"] if whole else []
    where = [f"{row['kind']} {row['dtype']}", f"{row['name']} [{row['sample']}]"]
    return [*where, row["outcome"], *in_parts, " ".join(words.split())[:200]]


def kind_of(row: Row) -> str:
    """Its outcome; ``split``: it has other bits that are the same where nothing is in parts."""
    parts = row["outcome"] == "bits" and row.get("whole", {}).get("outcome") == "same"
    return "split" if parts else row["outcome"]


def table(rows: Sequence[Row]) -> None:
    """Print how many of what became what."""
    outcomes = ("same", "bits", "split", *OUTCOMES[2:], *SKIPPED)
    counts: dict[tuple[str, str], Counter[str]] = {}
    for row in rows:
        counts.setdefault((row["kind"], row["dtype"]), Counter()).update(kinds_of(row))
    lines, planned = [], []
    for (kind, dtype), count in counts.items():
        tried = sum(count[name] for name in ("same", "bits", "split", *OUTCOMES[2:]))
        name = f"{kind} {dtype}"
        lines.append([name, str(tried), *(str(count[each]) for each in outcomes)])
        planned.append([name, *(str(count[each]) for each in (*PLANNED, *BUDGETS))])
    show("torch's operators and modules at the least budget", ["", "tried", *outcomes], lines)
    if any("planned" in row for row in rows):
        show("how those that train were planned", ["", *PLANNED, *BUDGETS], planned)


PLANNED = ("whole", "regions", "unplanned")

BUDGETS = ("within", "above, warned", "above")
"""Of those whose budget is known: whether the last step kept to it."""


def kinds_of(row: Row) -> list[str]:
    """The columns in which a row counts."""
    found = [kind_of(row)]
    if "planned" in row:
        found.append(row["planned"])
    if "budget_bytes" in row:
        warned = any(each.startswith("BudgetWarning") for each in row.get("warnings", ()))
        above = "above, warned" if warned else "above"
        found.append("within" if row["peak_bytes"] <= row["budget_bytes"] else above)
    return found


def matches(name: str, patterns: Sequence[str]) -> bool:
    """Whether a name is one of some, or matches one."""
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


def parsed(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=[*KINDS])
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--ops", nargs="+", default=["*"], metavar="NAME", help="or patterns")
    parser.add_argument("--form", choices=[*FORMS], default="embedded")
    parser.add_argument("--samples", type=int, default=3)
    parser.add_argument("--limit", type=float, default=600, help="seconds of one model")
    parser.add_argument("--resume", action="store_true", help="keep rows, but of what died")
    parser.add_argument("--save", default="sweep", help="name of the file of results")
    parser.add_argument("--folder", type=Path, default=RESULTS)
    return parser.parse_args(arguments)


def main() -> None:
    options = parsed()
    os.environ |= {"FXREMAT_CACHE": "0", "FXREMAT_PROGRESS": "0"}
    selected = [
        case
        for case in cases(options.kinds, options.dtypes, options.form)
        if matches(case.name, options.ops) and not matches(case.name, [UNINITIALIZED])
    ]
    rows = Rows(options.save, {}, folder=options.folder)
    path = options.folder / f"{options.save}.json"
    if options.resume and path.exists():
        kept = json.loads(path.read_text())["results"]["rows"]
        died = {key_of(row) for row in kept if row["outcome"] == "died"}
        rows.rows = [row for row in kept if key_of(row) not in died]
    found = Sweep(selected, options.samples, options.limit, rows).run()
    table(found)
    failed = sum(row["outcome"] in OUTCOMES[1:] for row in found)
    print(f"{len(found)} rows, {failed} with faults")
    raise SystemExit(bool(failed))


if __name__ == "__main__":
    main()
