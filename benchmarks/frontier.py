"""Peak and step time against torch's own means of recomputation, point by point.

Each policy of a peer is run and its peak measured; fxremat gets that peak as its budget and
must be at or under it and no slower. Interleaved rounds, with a step that keeps everything,
ratio round by round. With ``--executor inductor`` kernels are Inductor's on both sides, and the
peer is ``torch.compile`` without a budget and with each; fxremat is also given half and a quarter
of the activations that it keeps without one.
Run: python -m benchmarks.frontier [model …] [--executor E] [--rounds N] [--threads N] [--shares]
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch._functorch import config
from torch.utils.checkpoint import checkpoint

import fxremat
from benchmarks.common import RESULTS, interleave, keep_freed_memory, ratios, save, show
from benchmarks.steps import Step, entry_of, fused, make_step, planned, reference, static_bytes
from fxremat import torch_compat
from fxremat.errors import BudgetError
from fxremat.units import format_bytes
from tests.models.zoo import ZooModel

SHARES = (0.5, 0.25)
"""Of the activations that Inductor keeps: budgets at which nobody else can be."""

FUSED = ("gpt16", "llama16", "vit", "resnet50", "densenet121", "unet", "convnext")
"""Models for ``--executor inductor``."""

MEMORY_BUDGETS = (0.9, 0.7, 0.5, 0.3, 0.2, 0.1, 0.05, 0.0)

BLOCKS = {
    "gpt16": ("blocks",),
    "llama8": ("model.layers",),
    "llama16": ("model.layers",),
    "qwen8": ("model.layers",),
    "resnet50": ("groups.0", "groups.1", "groups.2", "groups.3"),
    "densenet121": ("body",),
    "unet": ("down", "merge"),
    "vit": ("vit.layers",),
    "bench_coca": ("blocks", "image_blocks"),
    "bench_two_texts": ("blocks",),
}
"""Where each model has the blocks that a user would wrap."""

CHAINS = ("gpt16", "llama8", "llama16", "qwen8", "resnet50", "densenet121", "vit")
"""Models whose blocks run one after the other, as ``checkpoint_sequential`` needs it."""


class Recomputed(nn.Module):
    """Runs modules one after the other under one checkpoint."""

    def __init__(self, parts: list[nn.Module]) -> None:
        super().__init__()
        self.parts = nn.ModuleList(parts)

    def forward(self, x: Any, *args: Any, **kwargs: Any) -> Any:
        """What the last one returns."""

        def run(x: Any, *args: Any, **kwargs: Any) -> Any:
            for part in self.parts:
                x = part(x, *args, **kwargs)
            return x

        return checkpoint(run, x, *args, use_reentrant=False, **kwargs)


def grouped(name: str, model: nn.Module, length: int) -> None:
    """Put runs of ``length`` blocks under a checkpoint each."""
    for path in BLOCKS[name]:
        blocks = attrgetter(path)(model)
        parts = list(blocks)
        groups = [Recomputed(parts[i : i + length]) for i in range(0, len(parts), length)]
        parent, _, leaf = path.rpartition(".")
        setattr(
            attrgetter(parent)(model) if parent else model,
            leaf,
            type(blocks)(*groups) if isinstance(blocks, nn.Sequential) else nn.ModuleList(groups),
        )


@dataclass(frozen=True)
class Policy:
    """A peer's way of saving memory."""

    name: str
    make: Callable[[ZooModel], Step]
    share: float = 1.0


def memory_budget(ratio: float, executor: str = "eager") -> Policy:
    """``activation_memory_budget`` through the partitioner that obeys it."""
    backend = "inductor" if executor == "inductor" else "aot_eager_decomp_partition"

    def make(entry: ZooModel) -> Step:
        model = entry.build()
        own = torch_compat.with_code_of_its_own(model)  # copies would share what was compiled
        compiled = torch.compile(own, backend=backend, fullgraph=True)
        step = make_step(entry, model, compiled)

        def run() -> None:
            with config.patch(activation_memory_budget=ratio):  # should it be compiled again
                step.run()

        return Step(model, run)

    return Policy(f"activation_memory_budget={ratio}", make)


def checkpointed(name: str, length: int, label: str) -> Policy:
    """``torch.utils.checkpoint`` around runs of blocks."""

    def make(entry: ZooModel) -> Step:
        model = entry.build()
        grouped(name, model, length)
        return make_step(entry, model, model)

    return Policy(label, make)


def policies(name: str, executor: str) -> Iterator[Policy]:
    """All peers' points for one model."""
    if executor == "inductor":
        yield Policy("no budget", fused)
        for share in SHARES:
            yield Policy(f"no budget, {share} of its activations", fused, share)
        yield from (memory_budget(ratio, executor) for ratio in MEMORY_BUDGETS)
        return
    yield from map(memory_budget, MEMORY_BUDGETS)
    yield checkpointed(name, 1, "checkpoint, per block")
    if name in CHAINS:
        model = entry_of(name).build()
        count = sum(len(attrgetter(path)(model)) for path in BLOCKS[name])
        most = 2 * math.isqrt(count)
        for segments in sorted({2, math.isqrt(count), most}):
            length = -(-count // segments)
            yield checkpointed(name, length, f"checkpoint_sequential, {segments} segments")


def compare(name: str, policy: Policy, rounds: int, executor: str) -> dict[str, Any]:
    """One point of a peer, and fxremat given its peak, or a share of its activations."""
    entry = entry_of(name)
    found: dict[str, Any] = {"model": name, "policy": policy.name}
    torch._dynamo.reset()
    kept = fused(entry) if executor == "inductor" else reference(entry)
    kept.run()
    try:
        theirs = policy.make(entry)
        theirs.run()
    except RuntimeError as error:  # checkpoints refuse what is written to in place later
        return {**found, "peer_fails": str(error)}
    peak_bytes = found["peer_peak_bytes"] = theirs.peak_bytes()
    static = static_bytes(theirs.model)
    budget = peak_bytes - int((1 - policy.share) * (peak_bytes - static))
    found["budget_bytes"] = budget
    try:
        ours, compiled = planned(entry, budget, executor=executor)
    except BudgetError as error:
        return {**found, "least_budget_bytes": error.least_budget_bytes}
    ours.run()
    found["peak_bytes"] = ours.peak_bytes()
    found["predicted_ratio"] = compiled.plan.predicted_s / compiled.plan.baseline_s
    steps = {"ours": ours.seconds, "theirs": theirs.seconds, "kept": kept.seconds}
    values = interleave(steps, rounds=rounds)
    spread = ratios(values, "ours", "theirs")
    found["time_ratio"] = (spread.median, spread.low, spread.high)
    found["kept_ratio"] = ratios(values, "ours", "kept").median
    found["seconds"] = values
    return found


def row(found: dict[str, Any]) -> list[str]:
    """A line of the table."""
    if "peer_fails" in found:
        return [found["model"], found["policy"], "cannot run", "", "", "", ""]
    begin = [found["model"], found["policy"], format_bytes(found["peer_peak_bytes"])]
    if "peak_bytes" not in found:
        return [*begin, f"least {format_bytes(found['least_budget_bytes'])}", "", "", "no"]
    median, low, high = found["time_ratio"]
    under = found["peak_bytes"] <= found["budget_bytes"]
    verdict = "yes" if under and median <= 1 else "within noise" if under and low <= 1 else "no"
    ratio = f"{median:.3f} [{low:.3f} … {high:.3f}]"
    kept = f"{found['kept_ratio']:.3f}"
    return [*begin, format_bytes(found["peak_bytes"]), ratio, kept, verdict]


def draw(name: str, results: list[dict[str, Any]], path: Path) -> None:
    """The model's frontier and the peers' points."""
    from matplotlib.figure import Figure

    entry = entry_of(name)
    args, kwargs = entry.sample(0)
    torch._dynamo.reset()
    with entry.context("cpu"):
        sample = fxremat.Sample(args, kwargs)
        curve = fxremat.frontier(
            entry.build(), sample, loss=fxremat.Loss(entry.loss, drop_unused=True)
        )
    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.add_subplot()
    base_s = curve.baseline.predicted_s
    axes.step(
        [p.peak_bytes / 2**20 for p in curve.points],
        [p.predicted_s / base_s for p in curve.points],
        where="post",
        label="fxremat, predicted",
    )
    measured = [r for r in results if "time_ratio" in r]
    for label, who, peak, marker in (
        ("fxremat", "ours", "peak_bytes", "o"),
        ("activation_memory_budget", "theirs", "peer_peak_bytes", "^"),
        ("checkpoint", "theirs", "peer_peak_bytes", "s"),
    ):
        points = [r for r in measured if who == "ours" or r["policy"].startswith(label)]
        axes.plot(
            [r[peak] / 2**20 for r in points],
            [ratios(r["seconds"], who, "kept").median for r in points],
            marker,
            label=label,
        )
    axes.set_xlabel("measured peak of a step (MiB)")
    axes.set_ylabel("step time ÷ aot_eager, which keeps everything")
    axes.set_title(name)
    figure.legend(loc="outside lower center", ncols=2)
    axes.grid(alpha=0.3)
    figure.savefig(path)


def _is_share(policy: str) -> bool:
    return policy.startswith("no budget")


def _others(file: Path) -> list[dict[str, Any]]:
    """Points of a file that are not of ``torch.compile`` alone."""
    found = json.loads(file.read_text())["results"]["points"] if file.exists() else []
    return [point for point in found if not _is_share(point["policy"])]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="*")
    parser.add_argument("--executor", choices=("eager", "inductor"), default="eager")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--shares", action="store_true", help="of torch.compile alone; others stay")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    keep_freed_memory()
    results = []
    executor = options.executor
    folder = "frontier" if executor == "eager" else "frontier-inductor"
    for name in options.models or (BLOCKS if executor == "eager" else FUSED):
        points = [p for p in policies(name, executor) if not options.shares or _is_share(p.name)]
        file = name if options.threads == 1 else f"{name}-{options.threads}threads"
        others = _others(RESULTS / f"{folder}/{file}.json") if options.shares else []
        own: list[dict[str, Any]] = []
        for policy in points:
            print(f"{name}: point {len(own) + 1} of {len(points)}", flush=True)
            own.append(compare(name, policy, options.rounds, executor))
            save(f"{folder}/{file}", {"threads": options.threads, "points": [*own, *others]})
        if executor == "eager":
            draw(name, own, RESULTS / f"{folder}/{name}.png")
        results += own
    show(
        "fxremat given each peer's measured peak (time: fxremat ÷ peer)",
        ["model", "peer", "its peak", "ours", "time", "÷ all kept", "dominates"],
        [row(found) for found in results],
    )


if __name__ == "__main__":
    main()
