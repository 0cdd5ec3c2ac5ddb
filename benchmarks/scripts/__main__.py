"""Thirty small training scripts within budgets: who dies, who is over, whose losses differ.

Each script runs as it is and under ``aot_eager``; then at the least budget that an error names, at
shares of the peak with everything kept, and, for its time, at 1.5 times eager's peak. Peaks are
counted below torch (``allocated.c``). Each run is a process of its own, one at a time. Rows that
``results/scripts.json`` has of others are kept.
Run: python -m benchmarks.scripts [--only NAME …] [--budgets least 0.6 1.0 time] [--steps N]
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path

from benchmarks.allocated import built
from benchmarks.common import Spread, rows_but, show
from benchmarks.rows import Row, Rows, append, failure, run_part
from benchmarks.scripts import NAMES

BUDGETS = ("least", "0.6", "1.0", "time")

SECONDS = 600
"""That one run may take."""


def run(arguments: Sequence[str], *, preloaded: Path | None) -> list[Row]:
    """The rows of a process of its own."""
    found: list[Row] = []
    settings = {"FXREMAT_CACHE": "0", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    if preloaded is not None:
        settings["LD_PRELOAD"] = str(preloaded)
    command = ["-m", "benchmarks.scripts", *arguments]
    ended = run_part(command, settings=settings, seconds=SECONDS, add=found.append)
    if ended:
        found.append({"failed": ended, "ended": True})
    return found


def in_this_process(options: argparse.Namespace) -> None:
    """Write the rows of one part."""
    from benchmarks.script_row import FAR_TOO_SMALL, measure, timed

    name, part, steps = options.only[0], options.part, options.steps
    budget: int | float | None = options.bytes or options.share
    if part == "reference":
        for each in ("eager", "aot_eager", FAR_TOO_SMALL):
            append(options.rows, measure(name, each, steps=steps))
    elif part == "timed":
        try:
            append(options.rows, timed(name, budget))
        except Exception as error:
            append(options.rows, failure(error))
    else:
        append(options.rows, measure(name, budget, steps=steps))


def rows_of(name: str, budgets: Sequence[str], steps: int, library: Path) -> list[Row]:
    """All rows of a script, with what is wrong with them."""
    from benchmarks.script_row import networks_of

    common = ["--only", name, "--steps", str(steps)]
    first = run([*common, "--part", "reference"], preloaded=library)
    if len(first) < 3 or any("failed" in row for row in first[:2]):
        return [{"script": name, "setting": "reference", "faults": ["no reference"], "runs": first}]
    eager, aot_eager, probe = first[:3]
    reference: Row = {
        "script": name,
        "setting": "reference",
        "eager_peak_bytes": max(eager["peaks_bytes"]),
        "aot_eager_peak_bytes": max(aot_eager["peaks_bytes"]),
        "eager_s": statistics.median(eager["seconds"]),
        "aot_eager_s": statistics.median(aot_eager["seconds"]),
        "eager_differs_at": first_difference(eager["losses"], aot_eager["losses"]),
        "losses": aot_eager["losses"],
        "probe": {key: probe.get(key) for key in ("failed", "died_at", "named_bytes")},
        "faults": [],
    }
    rows = [reference]
    for budget in budgets:
        if budget == "time":
            rows += time_rows(name, common, reference, networks_of(name))
            continue
        row: Row = {"script": name, "setting": budget}
        if budget == "least":
            least = probe.get("named_bytes")
            if least is None:
                unnamed = probe.get("failed", "no error")
                rows.append({**row, "faults": [f"no least is named: {unnamed}"]})
                continue
            asked = ["--bytes", str(least)]
        else:
            asked = share_of(float(budget), reference, networks_of(name))
        found = run([*common, "--part", "measured", *asked], preloaded=library)[-1]
        for _ in range(1, networks_of(name)):  # each names the least that it needs
            if budget == "least" and found.get("steps_ended") == 0 and "named_bytes" in found:
                asked = ["--bytes", str(found["named_bytes"])]
                found = run([*common, "--part", "measured", *asked], preloaded=library)[-1]
        rows.append(finish({**row, **found}, reference))
    return rows


def share_of(share: float, reference: Row, networks: int) -> list[str]:
    """A share as fxremat takes it; of several networks, bytes for all of them together."""
    if networks == 1:
        return ["--share", str(share)]
    return ["--bytes", str(int(share * reference["aot_eager_peak_bytes"]))]


def time_rows(name: str, common: list[str], reference: Row, networks: int) -> list[Row]:
    """Steps beside ``aot_eager``'s with room for all, and beside what is predicted at 0.6."""
    from benchmarks.script_row import TIMED_SHARE

    ample = int(TIMED_SHARE * reference["eager_peak_bytes"])
    rows = []
    settings = {"ample": ["--bytes", str(ample)], "0.6": share_of(0.6, reference, networks)}
    for setting, asked in settings.items():
        found = run([*common, "--part", "timed", *asked], preloaded=None)[-1]
        row = {"script": name, "setting": f"time {setting}", **found, "faults": []}
        if "failed" in row and (setting == "ample" or row.get("steps_ended")):
            row["faults"] = [f"died: {row['failed']}"]
        if "predicted_s" in row:
            row["measured_s"] = statistics.median(row["seconds"]["fxremat"])
            row["measured_by_predicted"] = row["measured_s"] / row["predicted_s"]
        rows.append(row)
    return rows


def first_difference(losses: list[str], expected: list[str]) -> int | None:
    """The first step whose loss is another one."""
    pairs = zip(losses, expected, strict=False)
    return next((step for step, (a, b) in enumerate(pairs) if a != b), None)


def finish(row: Row, reference: Row) -> Row:
    """A row with what is wrong with it, and how far predictions are from what was measured."""
    from benchmarks.script_row import SETTLED, calls_of

    faults: list[str] = []
    if row.get("ended"):
        return {**row, "faults": [row["failed"]]}
    if "failed" in row:
        refused = row["steps_ended"] == 0 and "least_budget_bytes" in row
        row["outcome"] = "refused" if refused else f"died at step {row['died_at'] + 1}"
        if row["setting"] == "least" and refused:
            faults.append(f"the least named is refused: {row['failed']}")
        elif not refused:
            faults.append(f"{row['outcome']}: {row['failed']}")
    else:
        row["outcome"] = "trains"
    over = over_budget(row)
    row |= over
    if over["silent_steps"]:
        share = over["worst_over"]
        late = "warned late" if over["first_warning"] is not None else "silent"
        faults.append(f"{late}: {len(over['silent_steps'])} steps, up to {share:.4f} of budget")
    differs = first_difference(row["losses"], reference["losses"])
    row["differs_at"] = differs
    if differs is not None:
        faults.append(f"other losses from step {differs + 1} on")
    later = zip(row["predicted_bytes"][SETTLED:], row["peaks_bytes"][SETTLED:], strict=True)
    if row["whole"] and calls_of(row["script"]):
        quotients = [p / m for p, m in later if p and m]
        row["predicted_by_measured"] = [min(quotients), max(quotients)] if quotients else None
    row["faults"] = faults
    return row


def over_budget(row: Row) -> Row:
    """Steps over the budget, and those of which no warning had come by their end."""
    warned = [step for step, kind, _ in row["warnings"] if kind == "BudgetWarning"]
    over, silent, worst = [], [], 0.0
    for step, peak in enumerate(row["peaks_bytes"]):
        budget = row["budgets_bytes"][step]
        if not budget:
            continue
        worst = max(worst, peak / budget)
        if peak > budget:
            over.append(step)
            if not warned or min(warned) > step:
                silent.append(step)
    return {
        "over_steps": over,
        "silent_steps": silent,
        "worst_over": worst,
        "first_warning": min(warned, default=None),
    }


def table(rows: Sequence[Row]) -> None:
    """Print what was found."""
    shown = []
    for row in rows:
        if row["setting"] == "reference" and "eager_peak_bytes" in row:
            peaks = f"{row['eager_peak_bytes'] / 2**20:.1f} MiB"
            differs = row["eager_differs_at"]
            note = "" if differs is None else f"aot_eager's losses differ from step {differs + 1}"
            shown.append(
                [row["script"], "eager", peaks, "", "", f"{row['eager_s'] * 1e3:.1f} ms", note]
            )
            continue
        predicted = row.get("predicted_by_measured")
        beside = row.get("beside")
        shown.append(
            [
                row["script"],
                row["setting"],
                f"{row['worst_over']:.4f}" if row.get("worst_over") else "",
                f"{predicted[0]:.2f} … {predicted[1]:.2f}" if predicted else "",
                Spread(*beside).text(digits=2) if beside else "",
                f"{row['measured_by_predicted']:.2f}" if "measured_by_predicted" in row else "",
                "; ".join(row["faults"])[:60] or row.get("outcome", ""),
            ]
        )
    columns = ["script", "at", "peak", "predicted", "÷ aot_eager", "s", "what happens"]
    show("Scripts: peak ÷ budget, predicted ÷ peak, measured ÷ predicted time", columns, shown)
    for line in summary(rows):
        print(line)


def summary(rows: Sequence[Row]) -> list[str]:
    """The figures that targets are for."""
    ran = [row for row in rows if row["setting"] in BUDGETS]
    died = [row for row in ran if row.get("steps_ended")]
    never = [row for row in ran if row.get("outcome", "").startswith("died") and row not in died]
    before = [row for row in ran if row["setting"] == "least" and row.get("outcome") == "refused"]
    over = [row for row in ran if row.get("silent_steps")]
    silent = [row for row in over if row["first_warning"] is None]
    late = [row for row in over if row["first_warning"] is not None]
    differs = [row for row in ran if row.get("differs_at") is not None]

    def scripts(found: Sequence[Row]) -> str:
        names = sorted({row["script"] for row in found})
        return f"{len(names)} {names}" if names else "0"

    lines = [
        f"died after a step: {scripts(died)}",
        f"failed in the first step: {scripts(never)}",
        f"refused at the least that an error named: {scripts(before)}",
        f"over budget without a warning: {scripts(silent)}",
        f"over budget before the first warning: {scripts(late)}",
        f"losses that differ: {scripts(differs)}",
    ]
    ample = [row["beside"][0] for row in rows if row["setting"] == "time ample" and "beside" in row]
    if ample:
        lines.append(
            f"ample: step ÷ aot_eager: median {statistics.median(ample):.3f}, "
            f"worst {max(ample):.3f}, of {len(ample)}"
        )
    tight = [
        row["measured_by_predicted"]
        for row in rows
        if "measured_by_predicted" in row and row["setting"] == "time 0.6"
    ]
    if tight:
        lines.append(f"at 0.6: measured ÷ predicted time: worst {max(tight):.3f}, of {len(tight)}")
    peaks = [q for row in ran for q in row.get("predicted_by_measured") or ()]
    if peaks:
        lines.append(f"predicted ÷ measured peak: {min(peaks):.3f} … {max(peaks):.3f}")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="+", default=list(NAMES), choices=NAMES, metavar="NAME")
    parser.add_argument("--budgets", nargs="+", default=list(BUDGETS), choices=BUDGETS)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--part", help=argparse.SUPPRESS)
    parser.add_argument("--bytes", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--share", type=float, help=argparse.SUPPRESS)
    parser.add_argument("--rows", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.part:
        in_this_process(options)
        return
    settings = {"reference", *options.budgets}
    settings |= {"time ample", "time 0.6"} if "time" in settings else set()
    names = set(options.only)
    kept = rows_but("scripts", lambda row: row["script"] in names and row["setting"] in settings)
    results = Rows("scripts", {"steps": options.steps}, rows=list(kept))
    with tempfile.TemporaryDirectory(prefix="fxremat-scripts-") as folder:
        library = built(Path(folder))
        for name in options.only:
            for row in rows_of(name, options.budgets, options.steps, library):
                results.rows.append(row)
                if row["faults"]:
                    print(f"{name} at {row['setting']}: {'; '.join(row['faults'])[:200]}")
            results.save(quiet=True)
    table(results.rows[len(kept) :])
    results.rows.sort(key=lambda row: NAMES.index(row["script"]))
    results.save()


if __name__ == "__main__":
    main()
