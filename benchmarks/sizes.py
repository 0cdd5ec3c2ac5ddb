"""A step at sizes it was not captured at: how long a plan takes there, and how good it is.

Each model is captured once with batch and length as symbols, and measured there. For each of some
other sizes: the time until its emitted graphs can be called, by part; the seconds that the plan
predicts against those that its graphs take, and against how far the prediction at the capture is
off in the same minute; and how much slower it is than what a whole search for that size finds.
Run: python -m benchmarks.sizes [model …] [--sizes 8]
"""

from __future__ import annotations

import argparse
import random
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from benchmarks.common import Spread, interleave, save, show
from benchmarks.steps import entry_of
from fxremat.costs.estimated.scaled import ScaledCosts, with_workspaces
from fxremat.costs.measured.cache import COSTS, cost_cache
from fxremat.costs.measured.cost import Measured
from fxremat.passes.emit.code import Emitted
from fxremat.passes.emit.rewrite import BlockModules, rewrite
from fxremat.passes.joint.sizes import Size, Values
from fxremat.passes.stages.block import BlockCache
from fxremat.passes.stages.resize import resize
from fxremat.planner.context.context_bytes import Caller, context_bytes_of
from fxremat.planner.search.resized import search_at
from fxremat.planner.search.search import Search
from fxremat.progress import silent
from tests.harness import Captured
from tests.sized import capture_sized, tensors_in

MODELS = ("gpt16", "gpt16_dropout", "llama16")

SHARE = 0.5
"""The budget, between the least and what keeping everything takes, both at the capture."""

CALLER = Caller(loss_bytes=0)
ROUNDS = 5

Graphs = tuple[Emitted, Emitted]
"""Of a step at one size."""


@dataclass(slots=True)
class Clock:
    """Milliseconds of CPU by part."""

    parts: dict[str, float] = field(default_factory=lambda: defaultdict(float))

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """What is done inside is that part."""
        begin = time.process_time()
        yield
        self.parts[name] += 1e3 * (time.process_time() - begin)


@dataclass(slots=True)
class Family:
    """A model captured once, and what serves all its sizes."""

    step: Captured
    costs: ScaledCosts
    search: Search
    modules: BlockModules
    budget_bytes: int

    @staticmethod
    def of(name: str) -> Family:
        """Capture, measure, search."""
        entry = entry_of(name)
        args, kwargs = entry.sample(0)
        dims = [range(min(t.dim(), 2)) for t in tensors_in((args, kwargs))]
        step = capture_sized(entry.build(), args, kwargs, dims=dims)
        measured = step.measured
        search = Search.over(
            measured,
            step.blocks,
            context_bytes_of(measured.line.joint, {}, CALLER),
            progress=silent,
        )
        low, high = search.least_bytes, search.baseline.peak_bytes
        return Family(
            step,
            ScaledCosts(step.line, step.blocks, measured.costs),
            search,
            BlockModules(),
            int(low + SHARE * (high - low)),
        )

    def planned(self, values: Values, clock: Clock) -> tuple[Graphs, float] | None:
        """Graphs that can be called and predicted seconds at a size; ``None``: nothing fits."""
        step = self.step
        with clock.part("costs"):
            costs = with_workspaces(self.costs.at(values), step.line, values, cost_cache())
        with clock.part("numbers"):
            measured = self.search.measured.at(costs)
            around = context_bytes_of(measured.line.joint, {}, CALLER, values=values)
        with clock.part("search"):
            search = search_at(self.search, measured, around, budget_bytes=self.budget_bytes)
        if search.least_bytes > self.budget_bytes:
            return None
        with clock.part("decision"):
            candidate = search.fastest_within(self.budget_bytes)
            program = search.evaluator.program(candidate)
            peaks = search.evaluator.evaluation(candidate).peaks_bytes
        with clock.part("code"):
            graphs = rewrite(program, peaks, self.modules)
        with clock.part("bind"):
            names = step.joint.sizes.named(values)
            forward, backward = (graph.at(names) for graph in graphs)
        return (forward, backward), candidate.total_s

    def searched_s(self, values: Values) -> float:
        """Seconds of the best that a search for that size alone finds with the same costs."""
        line = resize(self.step.line, values)
        blocks = BlockCache(line)
        costs = with_workspaces(self.costs.at(values), self.step.line, values, cost_cache())
        measured = Measured.of(line, costs)
        around = context_bytes_of(measured.line.joint, {}, CALLER, values=values)
        search = Search.over(measured, blocks, around, progress=silent)
        return search.fastest_within(max(self.budget_bytes, search.least_bytes)).total_s

    def runner(self, values: Values, graphs: Graphs) -> Callable[[], float]:
        """Seconds of a step of emitted graphs on made-up values."""
        line = resize(self.step.line, values)
        primals = [
            _like(n.meta["val"], known)
            for n, known in zip(line.joint.primals, self.step.primals, strict=True)
        ]
        tangents = [torch.ones(n.meta["val"].shape) for n in line.joint.tangents]
        forward, backward = graphs

        def run() -> float:
            with torch.no_grad():
                begin = time.perf_counter()
                saved = list(forward([*primals]))
                del saved[: self.step.output_count]
                backward([*saved, *tangents])
                return time.perf_counter() - begin

        return run


def _like(traced: Any, known: Any) -> Any:
    """A value for a primal at another size."""
    if isinstance(traced, Size):
        return int(traced)
    if traced.shape == known.shape:
        return known
    if traced.is_floating_point():
        return torch.randn(traced.shape, dtype=traced.dtype)
    return torch.zeros(traced.shape, dtype=traced.dtype)


def sizes_of(hints: Values, count: int, draw: random.Random) -> Iterator[Values]:
    """Symbols that were equal stay equal: each is between a quarter and what it was, or twice."""
    for _ in range(count):
        new = {n: max(2, round(n * draw.choice((0.25, 0.5, 0.75, 1, 1, 1)))) for n in {*hints}}
        yield tuple(new[n] for n in hints)


def rows_of(name: str, count: int) -> list[dict[str, Any]]:
    """One for each size."""
    COSTS.clear()
    family = Family.of(name)
    hints = family.step.joint.sizes.hints
    wanted = [*sizes_of(hints, count, random.Random(0))]
    wanted += [tuple(factor * n if n == hints[0] else n for n in hints) for factor in (2, 3)]
    first = family.planned(hints, Clock())
    assert first is not None
    run_first = family.runner(hints, first[0])
    rows = []
    for values in wanted:
        clock = Clock()
        found = family.planned(values, clock)
        row: dict[str, Any] = {"values": values, "parts": dict(clock.parts)}
        if found is not None:
            graphs, predicted_s = found
            runs = {"there": family.runner(values, graphs), "capture": run_first}
            took = {key: min(each) for key, each in interleave(runs, rounds=ROUNDS).items()}
            row |= {
                "predicted_s": predicted_s,
                "took_s": took["there"],
                "capture_predicted_s": first[1],
                "capture_took_s": took["capture"],
                "searched_s": family.searched_s(values),
            }
        rows.append(row)
    return rows


def cells_of(row: dict[str, Any]) -> list[str]:
    """A row of the table."""
    parts = row["parts"]
    cells = [str(row["values"]), f"{sum(parts.values()):.1f}"]
    cells += [f"{parts.get(part, 0.0):.1f}" for part in PARTS]
    if "took_s" not in row:
        return [*cells, "does not fit", "", "", ""]
    error = row["predicted_s"] / row["took_s"]
    drift = row["capture_predicted_s"] / row["capture_took_s"]
    return [
        *cells,
        f"{1e3 * row['took_s']:.1f}",
        f"{error - 1:+.0%}",
        f"{error / drift - 1:+.0%}",
        f"{row['predicted_s'] / row['searched_s'] - 1:+.1%}",
    ]


def main(models: Sequence[str], count: int) -> None:
    results: dict[str, Any] = {}
    for name in models:
        rows = results[name] = rows_of(name, count)
        columns = ["sizes", "plan, ms", *PARTS, "step, ms", "predicted", "beside capture", "slower"]
        show(f"{name}: new sizes", columns, list(map(cells_of, rows)))
        whole = [sum(row["parts"].values()) for row in rows]
        print(f"{name}: a new size takes {Spread.of(whole).text()} ms")
    save("sizes", results)


PARTS = ("costs", "numbers", "search", "decision", "code", "bind")

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="*", default=MODELS)
    parser.add_argument("--sizes", type=int, default=8)
    asked = parser.parse_args()
    main(asked.models, asked.sizes)
