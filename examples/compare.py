"""What the examples share: a training is measured, and set beside the one without a budget."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import nn

import fxremat
from fxremat.units import format_bytes, format_seconds


@dataclass(frozen=True)
class Run:
    """A training, measured.

    Attributes:
        name: for people.
        losses: one a step.
        peak_bytes: the most that a step allocates.
        step_s: seconds of a step.
        plan: what was followed; ``None`` without a budget.
    """

    name: str
    losses: tuple[float, ...]
    peak_bytes: int
    step_s: float
    plan: fxremat.Plan | None = None


Example = Callable[[int, str], tuple[Run, Run]]
"""Trains for some steps, without a budget and within one."""


def measure(
    name: str, losses: Sequence[float], model: nn.Module, step: Callable[[], object]
) -> Run:
    """A training that is over, by a few more forwards and backwards.

    Args:
        name: for people.
        losses: one a step.
        model: what was trained.
        step: a forward and a backward, after which gradients are cleared.
    """
    step()  # it may call the model in another way than the trainer did, and be planned first
    found = fxremat.measure_step(model, step, repeat=3)
    plan = model.plan if isinstance(model, fxremat.CompiledModule) else None
    return Run(name, tuple(losses), found.peak_bytes, found.seconds, plan)


def tell(plain: Run, planned: Run) -> int:
    """Print both side by side.

    Returns the exit status: 1 if a loss differs in any bit, or the peak exceeds the budget.
    """
    plan = planned.plan
    assert plan is not None
    same, fits = planned.losses == plain.losses, planned.peak_bytes <= plan.budget_bytes
    rows = [
        ("", plain.name, planned.name),
        ("budget", "none", format_bytes(plan.budget_bytes)),
        ("predicted peak", "", format_bytes(plan.predicted_peak_bytes)),
        ("measured peak", format_bytes(plain.peak_bytes), format_bytes(planned.peak_bytes)),
        ("step", format_seconds(plain.step_s), format_seconds(planned.step_s)),
        ("first loss", f"{plain.losses[0]:.9g}", f"{planned.losses[0]:.9g}"),
        (f"loss {len(plain.losses)}", f"{plain.losses[-1]:.9g}", f"{planned.losses[-1]:.9g}"),
        ("same losses", "", "yes, to the last bit" if same else "NO"),
        ("within budget", "", "yes" if fits else "NO"),
    ]
    _print(rows)
    return 0 if same and fits else 1


def _print(rows: Sequence[tuple[str, str, str]]) -> None:
    try:
        from rich.console import Console  # noqa: PLC0415
        from rich.table import Table  # noqa: PLC0415
    except ImportError:
        for row in rows:
            print("".join(f"{cell:<24}" for cell in row))
        return
    table = Table(*rows[0])
    for row in rows[1:]:
        table.add_row(*row)
    Console().print(table)


def main(example: Example, description: str | None, *, steps: int, budget: str) -> None:
    """Run an example from a shell, and exit."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=steps, help="steps to train (%(default)s)")
    parser.add_argument("--budget", default=budget, help="such as 64MiB (%(default)s)")
    asked = parser.parse_args()
    sys.exit(tell(*example(asked.steps, asked.budget)))
