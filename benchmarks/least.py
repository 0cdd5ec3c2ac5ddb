"""The least feasible budget against the peak of a checkpoint around each block.

For each model with blocks, and once more with the loss outside for those that compute theirs
themselves and can do without: a step with ``torch.utils.checkpoint`` around each block is run
and its peak measured; the least budget must be at most that, and a step planned for it must
keep to it.
Run: python -m benchmarks.least [model …]
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch

from benchmarks.common import save, show
from benchmarks.frontier import BLOCKS, checkpointed
from benchmarks.steps import entry_of, planned
from fxremat.units import format_bytes
from tests.models.hf import logits_loss
from tests.models.zoo import Args, Kwargs, ZooModel

LABELLED = ("llama8", "llama16", "vit")
"""Models that compute their loss where they are given labels."""


def unlabelled(entry: ZooModel) -> ZooModel:
    """The same model without labels: its loss is outside."""

    def sample(seed: int) -> tuple[Args, Kwargs]:
        args, kwargs = entry.sample(seed)
        return args, {name: value for name, value in kwargs.items() if name != "labels"}

    return replace(entry, sample=sample, loss=logits_loss, loss_inside=False)


def entries(name: str) -> Iterator[tuple[str, ZooModel]]:
    """The model as it is, and with its loss outside where that is another step."""
    entry = entry_of(name)
    yield name, entry
    if name in LABELLED:
        yield f"{name}, loss outside", unlabelled(entry)


def compare(name: str, label: str, entry: ZooModel) -> dict[str, Any]:
    """One row: bytes of both, and the measured peak of a step at the least budget.

    Args:
        name: under which ``BLOCKS`` has the blocks.
        label: of the row.
        entry: the model.
    """
    theirs = checkpointed(name, 1, "checkpoint, per block").make(entry)
    found: dict[str, Any] = {"model": label}
    try:
        theirs.run()
        found["checkpointed_bytes"] = theirs.peak_bytes()
    except RuntimeError as error:  # checkpoints refuse what is written to in place later
        found["peer_fails"] = str(error)
    torch._dynamo.reset()
    step, compiled = planned(entry, "min")
    step.run()
    plan = compiled.plan
    found["least_budget_bytes"] = plan.least_budget_bytes
    found["measured_bytes"] = step.peak_bytes()
    found["everything_kept_bytes"] = plan.baseline_peak_bytes
    found["time_ratio"] = plan.predicted_s / plan.baseline_s
    return found


def holds(found: dict[str, Any]) -> bool:
    """Whether the least budget is at most the peer's peak, and the step keeps to it."""
    peer = found.get("checkpointed_bytes", found["least_budget_bytes"])
    return bool(found["measured_bytes"] <= found["least_budget_bytes"] <= peer)


def row(found: dict[str, Any]) -> list[str]:
    """A line of the table."""
    peer = found.get("checkpointed_bytes")
    return [
        found["model"],
        format_bytes(found["everything_kept_bytes"]),
        "cannot run" if peer is None else format_bytes(peer),
        format_bytes(found["least_budget_bytes"]),
        format_bytes(found["measured_bytes"]),
        "" if peer is None else f"{found['least_budget_bytes'] / peer:.3f}",
        f"{found['time_ratio']:.3f}",
        "yes" if holds(found) else "no",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="*", default=list(BLOCKS))
    options = parser.parse_args()
    torch.set_num_threads(1)
    results = []
    for name in options.models:
        for label, entry in entries(name):
            results.append(compare(name, label, entry))
            print(*row(results[-1]), flush=True)
    show(
        "Least budget against a checkpoint around each block (time: predicted ÷ everything kept)",
        ["model", "all kept", "checkpointed", "least", "measured", "÷", "time", "at most"],
        [row(found) for found in results],
    )
    save("least", {"threads": 1, "rows": results})


if __name__ == "__main__":
    main()
