"""A GPT captured in pieces: peak and seconds beside the same model captured whole.

Breaks before some blocks, and each block a region of its own, recomputing or with transfers, at
shares of the peak with everything kept; medians of interleaved rounds.
Run: python -m benchmarks.regions [--rounds N]
"""

from __future__ import annotations

import argparse
import types
import warnings
from typing import Any

import torch

import fxremat
from benchmarks.common import Spread, interleave, ratios, save, show
from benchmarks.steps import Step, entry_of, make_step
from fxremat.units import format_bytes

MODEL = "gpt16"

SHARES = (1.0, 0.6, 0.4)

BREAKS = {"1 break": (8,), "4 breaks": (2, 6, 10, 14), "12 breaks": tuple(range(2, 14))}

TAUGHT = 5
"""Steps until plans are chosen together, and were watched."""


def broken(places: tuple[int, ...], blocks: int) -> Any:
    """The forward of the GPT, which breaks the graph before some blocks."""
    lines = [
        "def forward(self, idx, targets):",
        "    where = torch.arange(idx.shape[1], device=idx.device)",
        "    x = self.dropout(self.tokens(idx) + self.positions(where))",
    ]
    for block in range(blocks):
        lines += ["    torch._dynamo.graph_break()"] if block in places else []
        lines.append(f"    x = self.blocks[{block}](x)")
    lines += [
        "    logits = self.head(self.norm(x)).view(-1, self.head.out_features)",
        "    return torch.nn.functional.cross_entropy(logits, targets.view(-1))",
    ]
    names: dict[str, Any] = {"torch": torch}
    exec("\n".join(lines), names)
    return names["forward"]


OFFLOADS = {"each block, transfers too": "auto", "each block, transfers alone": "only"}


def stepping(way: str, budget: Any) -> tuple[Step, fxremat.CompiledModule]:
    """The model captured in one way, taught."""
    entry = entry_of(MODEL)
    model: Any = entry.build()
    args, kwargs = entry.sample(0)
    options: dict[str, Any] = {}
    if way in BREAKS:
        forward = broken(BREAKS[way], len(model.blocks))
        model.forward = types.MethodType(forward, model)
    elif way.startswith("each block"):
        options["regions"] = [f"blocks.{place}" for place in range(len(model.blocks))]
    if way in OFFLOADS:
        options["offload"] = OFFLOADS[way]
    compiled = fxremat.compile(
        model, fxremat.Sample(args, kwargs), budget, loss=entry.loss, **options
    )
    step = make_step(entry, model, compiled)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(TAUGHT):
            step.run()
    return step, compiled


def main() -> None:
    """Measure all."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    rounds = parser.parse_args().rounds
    torch.set_num_threads(1)
    full_bytes = stepping("whole", 1.0)[1].plan.baseline_peak_bytes
    rows, points = [], []
    for share in SHARES:
        budget = int(share * full_bytes)
        ways = ("whole", *BREAKS, "each block", *OFFLOADS)
        steps = {way: stepping(way, budget)[0] for way in ways}
        peaks = {way: step.peak_bytes() for way, step in steps.items()}
        seconds = interleave({way: step.seconds for way, step in steps.items()}, rounds=rounds)
        for way in steps:
            ratio = ratios(seconds, way, "whole")
            median = Spread.of(seconds[way]).median
            points.append(
                {
                    "way": way,
                    "share": share,
                    "budget_bytes": budget,
                    "peak_bytes": peaks[way],
                    "seconds": median,
                    "ratio": [ratio.median, ratio.low, ratio.high],
                }
            )
            sizes = format_bytes(budget), format_bytes(peaks[way])
            rows.append([way, f"{share}", *sizes, f"{median:.3f} s", ratio.text(digits=3)])
    save("regions", {"model": MODEL, "rounds": rounds, "points": points})
    show(MODEL, ["captured", "share", "budget", "peak", "median", "÷ whole"], rows)


if __name__ == "__main__":
    main()
