"""A step at sizes it was not captured at: how long a plan takes there, and how good it is.

Each model is captured once with batch and length as symbols, and measured there. For each of some
other sizes: the time until its emitted graphs can be called, by part; the seconds that the plan
predicts against those that its graphs take; its seconds against those of a plan that was searched
for at that size alone.
Run: python -m benchmarks.sizes [model …] [--sizes 8]
"""

from __future__ import annotations

import argparse
import random
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from benchmarks.common import Spread, save, show
from benchmarks.steps import entry_of
from fxremat.costs.cache import COSTS, cost_cache
from fxremat.costs.library import with_convolutions
from fxremat.costs.scaled import Anchor, ScaledCosts
from fxremat.passes.emit.rewrite import BlockModules, rewrite
from fxremat.passes.joint.sizes import Size, Values
from fxremat.passes.stages.blocks import BlockCache
from fxremat.passes.stages.resize import resize
from fxremat.planner.resized import least_bytes_at, search_at
from fxremat.planner.search import Search
from fxremat.planner.surroundings import Caller, surroundings_of
from tests.harness import Captured, silent
from tests.sized import capture_sized, tensors_in

MODELS = ("gpt16", "gpt16_dropout", "llama16")

SHARE = 0.5
"""The budget, between the least and what keeping everything takes, both at the capture."""

CALLER = Caller(loss_bytes=0)
RUNS = 5


@dataclass(slots=True)
class Clock:
    """Milliseconds by part."""

    parts: dict[str, float] = field(default_factory=lambda: defaultdict(float))

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """What is done inside is that part."""
        begin = time.perf_counter()
        yield
        self.parts[name] += 1e3 * (time.perf_counter() - begin)


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
        sizes, line = step.joint.sizes, step.line
        measured = step.measured
        search = Search.over(
            measured,
            step.blocks,
            surroundings_of(measured.line.joint, {}, CALLER),
            progress=silent,
        )
        low, high = search.least_bytes, search.baseline.peak_bytes
        return Family(
            step,
            ScaledCosts.of(line, step.blocks, [Anchor(sizes.hints, measured.costs)]),
            search,
            BlockModules(),
            int(low + SHARE * (high - low)),
        )

    def planned(self, values: Values, clock: Clock) -> tuple[Search, tuple[Any, Any], float] | None:
        """A search, callable graphs and predicted seconds at a size; ``None``: nothing fits."""
        step = self.step
        with clock.part("costs"):
            costs = with_convolutions(self.costs.at(values), step.line, values, cost_cache())
        with clock.part("numbers"):
            measured = self.search.measured.at(costs)
            around = surroundings_of(measured.line.joint, {}, CALLER, values=values)
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
        return search, (forward, backward), candidate.total_s

    def alone(self, values: Values) -> float:
        """Seconds of the best that a search finds with what is measured at that size."""
        line = resize(self.step.line, values)
        blocks = BlockCache(line)
        from fxremat.costs.cost import measure_line

        measured = measure_line(line, blocks, real={}, cache=cost_cache(), progress=silent)
        around = surroundings_of(measured.line.joint, {}, CALLER, values=values)
        search = Search.over(measured, blocks, around, progress=silent)
        return search.fastest_within(max(self.budget_bytes, search.least_bytes)).total_s


def run_s(family: Family, values: Values, graphs: tuple[Any, Any]) -> float:
    """Seconds of a step of emitted graphs on made-up values."""
    line = resize(family.step.line, values)
    real = dict(zip(line.joint.primals, family.step.primals, strict=True))
    primals: list[Any] = []
    for node, known in real.items():
        traced = node.meta["val"]
        if isinstance(traced, Size):
            primals.append(int(traced))
        elif traced.shape == known.shape:
            primals.append(known)
        else:
            primals.append(torch.zeros(traced.shape, dtype=traced.dtype))
    tangents = [torch.ones(n.meta["val"].shape) for n in line.joint.tangents]
    forward, backward = graphs
    seconds = []
    with torch.no_grad():
        for _ in range(RUNS):
            begin = time.perf_counter()
            saved = list(forward([*primals]))
            del saved[: family.step.output_count]
            backward([*saved, *tangents])
            seconds.append(time.perf_counter() - begin)
    return min(seconds)


def sizes_of(hints: Values, count: int, draw: random.Random) -> Iterator[Values]:
    """Symbols that were equal stay equal: each is between a quarter and what it was, or twice."""
    for _ in range(count):
        new = {n: max(2, round(n * draw.choice((0.25, 0.5, 0.75, 1, 1, 1)))) for n in {*hints}}
        yield tuple(new[n] for n in hints)


def rows_of(name: str, count: int) -> list[dict[str, Any]]:
    """One for each size."""
    COSTS.clear()
    family = Family.of(name)
    draw = random.Random(0)
    rows = []
    batch = family.step.joint.sizes.hints[0]
    wanted = [*sizes_of(family.step.joint.sizes.hints, count, draw)]
    hints = family.step.joint.sizes.hints
    wanted += [tuple(factor * n if n == batch else n for n in hints) for factor in (2, 3)]
    for values in wanted:
        clock = Clock()
        found = family.planned(values, clock)
        with Clock().part("least"):
            pass
        if found is None:
            rows.append({"values": values, "parts": clock.parts, "fits": False})
            continue
        _search, graphs, predicted_s = found
        took_s = run_s(family, values, graphs)
        rows.append(
            {
                "values": values,
                "parts": clock.parts,
                "fits": True,
                "predicted_s": predicted_s,
                "took_s": took_s,
                "alone_s": family.alone(values),
            }
        )
    return rows


def main(models: Sequence[str], count: int) -> None:
    results: dict[str, Any] = {}
    for name in models:
        rows = rows_of(name, count)
        results[name] = rows
        table = []
        for row in rows:
            parts = row["parts"]
            cells = [str(row["values"]), f"{sum(parts.values()):.1f}"]
            cells += [f"{parts.get(part, 0.0):.1f}" for part in PARTS]
            if row["fits"]:
                took = row["took_s"]
                cells += [
                    f"{1e3 * took:.1f}",
                    f"{row['predicted_s'] / took - 1:+.0%}",
                    f"{row['alone_s'] / took - 1:+.0%}",
                ]
            else:
                cells += ["does not fit", "", ""]
            table.append(cells)
        columns = ["sizes", "plan, ms", *PARTS, "step, ms", "predicted", "searched alone"]
        show(f"{name}: new sizes", columns, table)
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
