"""Steps at many sizes in random order: promise, bits, and what a new size takes.

Each model is compiled once, at a sample of a batch of 8. Then come steps of 12 batches times 6
lengths. For each: what the first step there takes beyond those that follow, in seconds of CPU; its
measured peak against the budget; its gradients against those of ``aot_eager``; and the seconds that
its plan predicts against those that a step takes.
Run: python -m benchmarks.many_sizes [model …] [--batches 12] [--lengths 6]
"""

from __future__ import annotations

import argparse
import itertools
import random
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_map

import fxremat
from benchmarks.common import Spread, show
from benchmarks.rows import Row, Rows
from benchmarks.steps import Step, entry_of
from fxremat.units import format_bytes
from tests.models.bits import bitwise_equal
from tests.models.zoo import ZooModel

MODELS = ("gpt", "hf_llama", "gpt16_dropout", "llama16")

BATCH = 8
"""Of the sample."""

SHARE = 0.6
"""The budget, of the sample's peak with everything kept."""

REPEATED = 2
"""Steps of each size beyond the first, which are timed."""


def batch_of(entry: ZooModel, rows: int, part: float) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """A batch of ``rows``, of ``part`` of the length that the entry's sample has."""

    def cut(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        value = value.repeat(-(-rows // value.shape[0]), *[1] * (value.dim() - 1))[:rows]
        return value[:, : max(2, round(part * value.shape[1]))].clone()

    args, kwargs = tree_map(cut, entry.sample(0))
    return args, kwargs


def step_of(
    entry: ZooModel, model: torch.nn.Module, call: Callable[..., Any], rows: int, part: float
) -> Step:
    """A step of ``call``, which is ``model`` compiled, on such a batch."""
    args, kwargs = batch_of(entry, rows, part)

    def run() -> None:
        model.zero_grad(set_to_none=True)
        torch.manual_seed(1)
        entry.loss(call(*args, **kwargs)).backward()

    return Step(model, run)


def cpu_s(run: Callable[[], object]) -> float:
    """Seconds of CPU: what others do on the machine is not in them."""
    begin = time.process_time()
    run()
    return time.process_time() - begin


class Family:
    """A model compiled once, and its twin that is not planned."""

    def __init__(self, name: str) -> None:
        torch._dynamo.reset()
        self.entry = entry_of(name)
        self.twin = self.entry.build()
        self.plain = torch.compile(self.twin, backend="aot_eager", dynamic=True)
        self.model = self.entry.build()
        args, kwargs = batch_of(self.entry, BATCH, 1.0)
        sample = fxremat.Sample(args, kwargs)
        self.call = fxremat.compile(self.model, sample, SHARE, loss=self.entry.loss)
        self.budget_bytes = self.call.plan.budget_bytes

    @property
    def captures(self) -> int:
        """How often the model was captured."""
        return len(self.call._training.graphs)

    def row(self, rows: int, part: float) -> Row:
        """All that is asked of one size."""
        plain = step_of(self.entry, self.twin, self.plain, rows, part)
        step = step_of(self.entry, self.model, self.call, rows, part)
        plain.run()
        found: Row = {"batch": rows, "part": part}
        try:
            first_s = cpu_s(step.run)
        except fxremat.BudgetError as error:
            return {**found, "refused": error.least_budget_bytes, "largest": error.largest}
        pairs = zip(self.model.parameters(), self.twin.parameters(), strict=True)
        bits = all(bitwise_equal(a.grad, b.grad) for a, b in pairs)
        self.twin.zero_grad(set_to_none=True)
        took_s = statistics.median(cpu_s(step.run) for _ in range(REPEATED))
        predicted_s = self.call.plan.predicted_s
        return {
            **found,
            "new_s": first_s - took_s,
            "peak_bytes": step.peak_bytes(),
            "bits": bits,
            "predicted_s": predicted_s,
            "took_s": took_s,
        }


def rows_of(name: str, batches: int, lengths: int) -> list[Row]:
    """One for each size, in random order."""
    family = Family(name)
    parts = [(i + 1) / lengths for i in range(lengths)]
    wanted = list(itertools.product(range(2, 2 + batches), parts))
    random.Random(0).shuffle(wanted)
    rows = []
    for count, part in wanted:
        row = family.row(count, part)
        rows.append({"model": name, "budget_bytes": family.budget_bytes, **row})
        print(*text_of(rows[-1]), sep="  ", flush=True)
    return [{**row, "captures": family.captures} for row in rows]


def text_of(row: Row) -> list[str]:
    """A row for people."""
    size = f"{row['batch']} x {row['part']:.2f}"
    if "refused" in row:
        return [row["model"], size, "refused", format_bytes(row["refused"]), "", "", ""]
    return [
        row["model"],
        size,
        f"{1e3 * row['new_s']:.0f}",
        f"{row['peak_bytes'] / row['budget_bytes']:.3f}",
        "equal" if row["bits"] else "DIFFERENT",
        f"{1e3 * row['took_s']:.1f}",
        f"{_predicted(row) - 1:+.0%}",
    ]


def _predicted(row: Row) -> float:
    return float(row["predicted_s"] / row["took_s"])


def summary_of(rows: Sequence[Row]) -> list[str]:
    """A line about one model."""
    ran = [row for row in rows if "refused" not in row]
    off = [abs(_predicted(row) - 1) for row in ran]
    return [
        rows[0]["model"],
        str(rows[0]["captures"]),
        f"{len(ran)} of {len(rows)}",
        str(sum(not row["bits"] for row in ran)),
        f"{max(row['peak_bytes'] / row['budget_bytes'] for row in ran):.3f}",
        Spread.of([row["new_s"] for row in ran]).text(1e3, 0),
        Spread.of(off).text(100, 0),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="*", default=MODELS)
    parser.add_argument("--batches", type=int, default=12)
    parser.add_argument("--lengths", type=int, default=6)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    kept = Rows("many_sizes", {"share": SHARE, "sample_batch": BATCH})
    told = []
    for name in asked.models:
        rows = rows_of(name, asked.batches, asked.lengths)
        for row in rows:
            kept.add(row)
        told.append(summary_of(rows))
    columns = ["model", "captures", "ran", "other bits", "peak / budget", "new size, ms"]
    show("Many sizes", [*columns, "predicted off by %"], told)
    kept.save()


if __name__ == "__main__":
    main()
