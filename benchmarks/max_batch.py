"""The largest batch that is said to fit, held against compiling at that size and at one more.

For each model within twice what its sample takes with everything kept: the answer; the measured
peak of a step of that size, compiled for it alone, or its least budget where that is more; the
least budget of one more, compiled for that alone; and the seconds of CPU that all but the capture
takes.
Run: python -m benchmarks.max_batch [model …]
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import torch
from torch import Tensor

import fxremat
from benchmarks.common import save, show
from benchmarks.rows import Row
from fxremat.sizing import max_batch as batches
from fxremat.units import format_bytes
from tests.models import ZOO, ZooModel
from tests.sized import fresh, tensors_in

MODELS = ("gpt", "hf_llama", "hf_gpt2", "resnet50", "unet", "hf_vit")

ROOM = 2
"""Times what the sample takes."""


def measure(name: str) -> Row:
    """One model."""
    entry, model = ZOO[name], ZOO[name].build()
    args, kwargs = entry.sample(0)
    sample = fxremat.Sample(args, kwargs)
    loss = None if entry.loss_inside else entry.loss
    plan = fxremat.plan(model, sample, 1.0, loss=loss)
    budget = ROOM * plan.baseline_peak_bytes
    torch._dynamo.reset()
    seconds = _Clock()
    with seconds:
        found = fxremat.max_batch(model, sample, budget, loss=loss)
    torch._dynamo.reset()
    largest = found.largest.size
    try:
        call = fxremat.compile(model, _of_size(sample, largest), budget, dynamic=False, loss=loss)
        peak = _peak_bytes(entry, model, call, _of_size(sample, largest))
    except fxremat.BudgetError as error:  # one too many
        assert error.least_budget_bytes is not None
        peak = error.least_budget_bytes
    torch._dynamo.reset()
    more = fxremat.plan(model, _of_size(sample, largest + 1), "min", dynamic=False, loss=loss)
    torch._dynamo.reset()
    return {
        "model": name,
        "budget_bytes": budget,
        "largest": largest,
        "fastest": found.fastest.size,
        "peak_bytes": peak,
        "one_more_least_bytes": more.least_budget_bytes,
        "after_capture_cpu_s": seconds.taken_s,
    }


class _Clock:
    """Seconds of CPU that finding sizes takes, once the step is captured."""

    taken_s = 0.0

    def __enter__(self) -> None:
        self._over = batches.Batching.over

        def over(found: batches.Batching, asked: Any) -> Any:
            begin = time.process_time()
            result = self._over(found, asked)
            self.taken_s = time.process_time() - begin
            return result

        batches.Batching.over = over  # type: ignore[method-assign]

    def __exit__(self, *_raised: object) -> None:
        batches.Batching.over = self._over  # type: ignore[method-assign]


def _of_size(sample: fxremat.Sample, size: int) -> fxremat.Sample:
    """``sample`` repeated, or cut."""
    batch = tensors_in((sample.args, sample.kwargs))[0].shape[0]

    def repeated(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        return fresh(torch.cat([leaf] * -(-size // batch))[:size])

    return sample.map(repeated)


def _peak_bytes(entry: ZooModel, model: torch.nn.Module, call: Any, sample: fxremat.Sample) -> int:
    def step() -> None:
        model.zero_grad()
        entry.loss(call(*sample.args, **sample.kwargs)).backward()

    model.zero_grad()
    return fxremat.measure_step(model, step).peak_bytes


def main() -> None:
    """Print a table, and write it down."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="*", default=MODELS)
    rows = []
    for name in parser.parse_args().models:
        rows.append(measure(name))
        save("max_batch", {"models": rows}, quiet=True)
    show(
        "max_batch",
        ("model", "budget", "largest", "fastest", "peak / budget", "one more / budget", "s"),
        [
            (
                row["model"],
                format_bytes(row["budget_bytes"]),
                str(row["largest"]),
                str(row["fastest"]),
                f"{row['peak_bytes'] / row['budget_bytes']:.4f}",
                f"{row['one_more_least_bytes'] / row['budget_bytes']:.4f}",
                f"{row['after_capture_cpu_s']:.1f}",
            )
            for row in rows
        ],
    )


if __name__ == "__main__":
    main()
