"""Networks of branches: planned as a line, as the equivalent chain, and as a join.

For ten budgets between the least and that which leaves half of the activations: the predicted
time of each (as a share of nothing recomputed) and its least budget, the curves, and for a few
budgets the measured time, interleaved. Then the unit-cost joins of Beaumont et al. 2019
(Figure 7), carried out: calls of each stage counted in the emitted graphs.
Run: python -m benchmarks.joins [model …] [--rounds N]
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from benchmarks.common import RESULTS, interleave, ratios, save, show
from benchmarks.steps import entry_of
from benchmarks.unit_joins import figure_7
from fxremat.costs.measured.measure import seconds_of
from fxremat.effort import DEFAULT_GENERATORS
from fxremat.passes.emit.rewrite import BlockModules, rewrite
from fxremat.planner.decision.candidates import Candidate
from fxremat.planner.search.generators import Generator, chain_schedules
from fxremat.planner.search.join import equivalent_schedules
from fxremat.planner.search.search import Search, generators_of
from fxremat.progress import silent
from fxremat.units import format_bytes
from tests.harness import Captured, capture

MODELS = (
    "bench_siamese_resnet",
    "bench_triplet",
    "bench_triplet_resnet",
    "bench_image_recipe",
    "bench_composed",
    "bench_coca",
    "bench_two_texts",
    "bench_clip",
    "hf_t5",
)

WAYS: dict[str, tuple[Generator, ...]] = {
    "line": (chain_schedules,),
    "equivalent chain": (equivalent_schedules,),
    "join": generators_of(DEFAULT_GENERATORS),
}
"""``join`` is what a plan of the package chooses from."""

BUDGETS = 10
MEASURED = (2, 5, 8)
"""Which of the budgets are measured."""

WORTH = 1.001
"""A gain below this factor is none."""


@dataclass(frozen=True)
class Compared:
    """One model, planned in each way."""

    name: str
    step: Captured
    found: dict[str, Search]

    @property
    def budgets(self) -> list[int]:
        """From the least of the join to fixed bytes and half of the activations."""
        join = self.found["join"]
        fixed, full = join.costs.fixed_bytes, join.baseline.peak_bytes
        low, high = join.least.peak_bytes, fixed + (full - fixed) // 2
        high = max(high, low + (full - low) // 4)
        return [low + (high - low) * i // (BUDGETS - 1) for i in range(BUDGETS)]

    def chosen(self, way: str, budget_bytes: int) -> Candidate | None:
        """The fastest within a budget."""
        search = self.found[way]
        fits = search.least.peak_bytes <= budget_bytes
        return search.fastest_within(budget_bytes) if fits else None

    def ratio(self, way: str, budget_bytes: int) -> float | None:
        """Its time over that of nothing recomputed."""
        chosen = self.chosen(way, budget_bytes)
        return chosen.total_s / self.found[way].baseline.total_s if chosen else None


def compare(name: str) -> Compared:
    """Capture a model's step and plan it in each way, from the same measurements."""
    entry = entry_of(name)
    args, kwargs = entry.sample(0)
    step = capture(entry.build(), args, kwargs)
    found = {
        way: Search.over(
            step.measured,
            step.blocks,
            step.context_bytes,
            progress=silent,
            generators=generators,
        )
        for way, generators in WAYS.items()
    }
    return Compared(name, step, found)


def why_no_gain(compared: Compared) -> str:
    """Where the join is no faster than the line: what the order of branches cannot change."""
    search = compared.found["join"]
    line, stages = search.measured.line, search.chain
    if not line.branch_ends:
        return "no branches: every part of the forward reads what another computed"
    ends_bytes = stages.nbytes(stages.boundaries[line.branch_ends[-1]])
    kinds = {
        tuple(stage.kind for stage in stages.stages[first:end])
        for first, end in pairwise((0, *line.branch_ends))
    }
    ends = f"the ends of the branches take {format_bytes(ends_bytes)}"
    least = f"the least budget is that of {search.describe_least()}"
    if len(kinds) == 1:
        return (
            f"{ends} and their stages are alike: a byte gains as much in one as in another, "
            f"and the line holds little beside the branch that goes back; {least}"
        )
    return f"{ends}; the line already goes back first where most memory is freed; {least}"


def runner(step: Captured, search: Search, chosen: Candidate) -> Callable[[], float]:
    """Seconds of one run of a candidate's graphs."""
    evaluator = search.evaluator
    peaks_bytes = evaluator.evaluation(chosen).peaks_bytes
    forward, backward = rewrite(evaluator.program(chosen), peaks_bytes, BlockModules())

    def run() -> None:
        with torch.no_grad():
            saved = forward([*step.primals])
            del saved[: step.output_count]
            saved.extend(step.tangents)
            backward(saved)

    run()
    return lambda: seconds_of(run, device=torch.device("cpu"))


def measure(compared: Compared, budget_bytes: int, rounds: int) -> dict[str, Any]:
    """The join's time over the line's, as predicted and as measured."""
    pair = {way: compared.chosen(way, budget_bytes) for way in ("line", "join")}
    runs = {
        way: runner(compared.step, compared.found[way], chosen)
        for way, chosen in pair.items()
        if chosen is not None
    }
    if len(runs) < 2:
        return {}
    spread = ratios(interleave(runs, rounds=rounds), "join", "line")
    predicted = pair["join"].total_s / pair["line"].total_s  # type: ignore[union-attr]
    return {"predicted": predicted, "measured": (spread.median, spread.low, spread.high)}


def rows_of(compared: Compared, rounds: int) -> list[dict[str, Any]]:
    """One row a budget."""
    rows = []
    for index, budget_bytes in enumerate(compared.budgets):
        row: dict[str, Any] = {"model": compared.name, "budget_bytes": budget_bytes}
        row.update({way: compared.ratio(way, budget_bytes) for way in WAYS})
        if rounds and index in MEASURED:
            row.update(measure(compared, budget_bytes, rounds))
        rows.append(row)
    return rows


def draw(compared: Compared, path: Path) -> None:
    """All three curves."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.add_subplot()
    for way, search in compared.found.items():
        axes.step(
            [c.peak_bytes / 2**20 for c in search.pool.members],
            [c.total_s / search.baseline.total_s for c in search.pool.members],
            where="post",
            label=way,
        )
    axes.set_xlabel("peak (MiB)")
    axes.set_ylabel("predicted time / nothing recomputed")
    axes.set_title(compared.name)
    axes.legend()
    axes.grid(alpha=0.3)
    figure.savefig(path)


def report(compared: Compared, rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Print a model's table and say where nothing is gained."""
    join = compared.found["join"]

    def text(value: float | None) -> str:
        return "" if value is None else f"{value:.4f}"

    def measured(row: dict[str, Any]) -> str:
        if "measured" not in row:
            return ""
        return f"{row['predicted']:.3f}; {row['measured'][0]:.3f}"

    show(
        f"{compared.name}: {len(join.chain)} stages, branches end at "
        f"{join.measured.line.branch_ends}, all kept {format_bytes(join.baseline.peak_bytes)}",
        ["budget", *WAYS, "join / line: predicted; measured"],
        [
            [format_bytes(r["budget_bytes"]), *(text(r[way]) for way in WAYS), measured(r)]
            for r in rows
        ],
    )
    least = {way: search.least.peak_bytes for way, search in compared.found.items()}
    print("least:", ", ".join(f"{way} {format_bytes(n)}" for way, n in least.items()))
    gains = [r["line"] is None or r["line"] > WORTH * r["join"] for r in rows]
    print(f"the join is faster at {sum(gains)} of {len(rows)} budgets")
    reason = "" if all(gains) else why_no_gain(compared)
    if reason:
        print("elsewhere:", reason)
    return {"model": compared.name, "least_bytes": least, "gains": sum(gains), "reason": reason}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="*", default=MODELS)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--unit", action=argparse.BooleanOptionalAction, default=True)
    options = parser.parse_args()
    torch.set_num_threads(1)
    RESULTS.mkdir(exist_ok=True)
    results: dict[str, Any] = {"models": [], "points": [], "figure_7": []}
    if options.unit:
        results["figure_7"] = figure_7()
    for name in options.models:
        compared = compare(name)
        rows = rows_of(compared, options.rounds)
        results["models"].append(report(compared, rows))
        results["points"] += rows
        draw(compared, RESULTS / f"joins_{name}.png")
        save("joins", results)


if __name__ == "__main__":
    main()
