"""How long planning takes, and what of it; how long importing takes.

Seconds of CPU of one thread, with nothing known of any model, from the captured graph to the
emitted ones, for half of the peak of keeping everything; and once more where only the cache folder
knows it. Models of other libraries whose library is missing are left out, which is said.
Run: python -m benchmarks.planning [model …]
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from tempfile import TemporaryDirectory
from typing import Any
from unittest import mock

import torch

from benchmarks.common import RESULTS, pyplot, rows_but, save, show
from benchmarks.steps import entry_of, planned
from fxremat.compiler import compiler
from fxremat.costs.measured.cache import COSTS
from fxremat.effort import Effort
from fxremat.graph import graph
from fxremat.planner.replay.extract import EVALUATIONS
from fxremat.planner.search.evaluator import Evaluator
from fxremat.planner.search.search import Search, generators_of
from fxremat.planning import planner

MODELS = (
    "gpt16",
    "llama8",
    *(f"llama_narrow{layers}" for layers in (8, 16, 32, 64)),
    "densenet121",
    "gru48",
    "gru500",
    "encoder_twice",
    *(f"gpt{blocks}_narrow" for blocks in (48, 96, 384)),
    "rwkv",
    "mamba",
    "unet2d",
)


def import_seconds() -> float:
    """Seconds that ``import fxremat.api`` adds to ``import torch``: median of five processes."""
    code = (
        "import time, torch; t = time.perf_counter(); import fxremat; fxremat.compile; "
        "print(time.perf_counter() - t)"
    )
    runs = [
        float(
            subprocess.run(
                [sys.executable, "-c", code], capture_output=True, text=True, check=True
            ).stdout
        )
        for _ in range(5)
    ]
    return statistics.median(runs)


class Clock:
    """CPU seconds of what is timed, by name."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self.evaluations = self.operations = 0

    def timed(self, name: str, run: Callable[..., Any]) -> Callable[..., Any]:
        """``run``, timed."""

        def call(*args: Any, **kwargs: Any) -> Any:
            begin = time.process_time()
            try:
                return run(*args, **kwargs)
            finally:
                self.seconds[name] += time.process_time() - begin

        return call

    def steps(self, name: str, generate: Callable[..., Iterator[Any]]) -> Callable[..., Any]:
        """A generator function, its own time alone."""

        def call(*args: Any) -> Iterator[Any]:
            found = generate(*args)
            following = self.timed(name, lambda: next(found, None))
            while (item := following()) is not None:
                yield item

        return call

    def searched(self, over: Callable[..., Search]) -> Callable[..., Search]:
        """``over``, its generators and evaluations timed."""

        def call(*args: Any, effort: Effort, **kwargs: Any) -> Search:
            generators = [self.steps("tables", own) for own in generators_of(effort.generators)]
            kwargs |= {"effort": effort}
            found = self.timed("search", over)(*args, generators=generators, **kwargs)
            joint = found.measured.line.joint
            self.operations = max(self.operations, len(joint.forward) + len(joint.backward))
            arrays = found.evaluator.arrays
            self.evaluations += int(arrays.data[arrays.at.counts + EVALUATIONS])
            return found

        return call


def planning_seconds(name: str) -> dict[str, Any]:
    """One row."""
    entry = entry_of(name)
    torch._dynamo.reset()
    COSTS.clear()
    clock = Clock()
    patches = (
        (compiler, "_planned_graph", "planning"),
        (graph, "measure_line", "measuring"),
        (planner, "emit", "emission"),
        (Evaluator, "candidate", "evaluating"),
        (Evaluator, "climb", "climbing"),
    )
    with ExitStack() as stack:
        for owner, attribute, what in patches:
            run = clock.timed(what, getattr(owner, attribute))
            stack.enter_context(mock.patch.object(owner, attribute, run))
        stack.enter_context(mock.patch.object(Search, "over", clock.searched(Search.over)))
        begin = time.process_time()
        _, compiled = planned(entry, 0.5)
        total_s = time.process_time() - begin
    seconds = clock.seconds
    with TemporaryDirectory() as folder, mock.patch.dict(os.environ, FXREMAT_CACHE=folder):
        known_s = [one_more(name) for _ in range(2)][1]
    evaluated_s = seconds["evaluating"] + seconds["climbing"]
    return {
        "model": name,
        "operations": clock.operations,
        "stages": len(compiled.plan.chain),
        "capture_s": total_s - seconds["planning"],
        "planning_s": seconds["planning"],
        "measuring_s": seconds["measuring"],
        "tables_s": seconds["tables"],
        "evaluations": clock.evaluations,
        "evaluation_us": 1e6 * evaluated_s / max(clock.evaluations, 1),
        "search_s": seconds["search"] - seconds["tables"],
        "emission_s": seconds["emission"],
        "known_s": known_s,
    }


def one_more(name: str) -> float:
    """Seconds of planning, with what the cache folder knows and this process does not."""
    torch._dynamo.reset()
    COSTS.clear()
    clock = Clock()
    run = clock.timed("planning", compiler._planned_graph)
    with mock.patch.object(compiler, "_planned_graph", run):
        planned(entry_of(name), 0.5)
    return clock.seconds["planning"]


def draw(rows: list[dict[str, Any]]) -> None:
    """Seconds over operations, into ``results/planning.png``."""
    plot = pyplot()
    if plot is None:
        return
    figure, axes = plot.subplots(figsize=(7, 4))
    for found in (row for row in rows if "operations" in row):
        axes.plot(found["operations"], found["planning_s"], "o", color="tab:blue")
        axes.annotate(found["model"], (found["operations"], found["planning_s"]), fontsize=7)
    axes.set(xscale="log", yscale="log", xlabel="operations", ylabel="seconds of CPU to plan")
    axes.margins(x=0.15)  # room for names
    figure.tight_layout()
    figure.savefig(RESULTS / "planning.png", dpi=120)


def row(found: dict[str, Any]) -> list[str]:
    """As it is printed."""
    names = ("capture", "planning", "measuring", "tables", "search", "emission", "known")
    return [
        found["model"],
        str(found["operations"]),
        str(found["stages"]),
        *(f"{found[f'{name}_s']:.2f}" for name in names),
        f"{found['evaluations']} x {found['evaluation_us']:.0f}",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="*", default=MODELS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    for name in ("tied", "inception"):  # kernels are loaded, or compiled
        planned(entry_of(name), "min")
    before = rows_but("planning", lambda row: row["model"] in options.models)
    results = []
    for name in options.models:
        try:
            results.append(planning_seconds(name))
        except ImportError as missing:
            print(f"{name} is left out: {missing}")
            continue
        print(results[-1], flush=True)
        save("planning", {"rows": [*before, *results]}, quiet=True)
    columns = ("capture s", "planning s", "measuring", "tables", "search", "emission", "known")
    show(
        "Planning, seconds of CPU",
        ["model", "operations", "stages", *columns, "evaluations x us"],
        [row(found) for found in results],
    )
    seconds = import_seconds()
    print(f"importing fxremat beyond torch: {seconds:.3f} s")
    save("planning", {"rows": [*before, *results], "import_s": seconds})
    draw([*before, *results])


if __name__ == "__main__":
    main()
