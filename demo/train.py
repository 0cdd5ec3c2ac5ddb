"""Train a GPT unbudgeted, then at half and at a quarter of its peak: is anything different?

Exit status 1 if a loss or a parameter differs in any bit, or a measured peak exceeds its
budget.
"""

from __future__ import annotations

import argparse
import functools
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

import fxremat
from demo.model import GPT, Config
from demo.text import ORIGIN, draw_batches, read_text
from fxremat.units import format_bytes, format_seconds

CONSOLE = Console()


@dataclass(frozen=True)
class Run:
    """One training run.

    Attributes:
        name: for people.
        budget_bytes: None without a budget.
        peak_bytes: measured peak of a step.
        losses: one a step.
        parameters: at the end.
        step_s: median seconds of further steps.
    """

    name: str
    budget_bytes: int | None
    peak_bytes: int
    losses: tuple[float, ...]
    parameters: tuple[Tensor, ...]
    step_s: float

    def fits(self) -> bool:
        """Whether the peak is within the budget."""
        return self.budget_bytes is None or self.peak_bytes <= self.budget_bytes

    def equals(self, other: Run) -> bool:
        """Whether all losses and all final parameters are equal, bit for bit."""
        pairs = zip(self.parameters, other.parameters, strict=True)
        return self.losses == other.losses and all(torch.equal(a, b) for a, b in pairs)


def train(
    name: str,
    batches: Sequence[tuple[Tensor, Tensor]],
    config: Config,
    budget_bytes: int | None,
    *,
    rounds: int,
) -> Run:
    """Train a new model on ``batches``, the same in every run but for the budget.

    No model outlives its run: a budget also counts other networks of the process. ``rounds`` more
    steps are timed.
    """
    torch.manual_seed(0)
    model: nn.Module = GPT(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    if budget_bytes is not None:
        began = time.perf_counter()
        model = fxremat.compile(model, batches[0], budget_bytes, optimizer=torch.optim.AdamW)
        planned_s = time.perf_counter() - began
        CONSOLE.print(f"{name}: captured and planned in {format_seconds(planned_s)}, training")
    else:
        CONSOLE.print(f"{name}: training")
    losses = tuple(step(model, optimizer, *batch) for batch in batches)
    parameters = tuple(p.detach().clone() for p in model.parameters())
    # One more step under the allocator's eye, once nothing is compared any more.
    again = functools.partial(step, model, optimizer, *batches[0])
    peak_bytes = fxremat.measure_step(model, again).peak_bytes
    step_s = statistics.median(timed(again) for _ in range(rounds))
    return Run(name, budget_bytes, peak_bytes, losses, parameters, step_s)


def step(
    model: nn.Module, optimizer: torch.optim.Optimizer, text: Tensor, following: Tensor
) -> float:
    """One training step; its loss."""
    loss = model(text, following)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return float(loss.detach())


def curves(runs: Sequence[Run]) -> Table:
    """Losses of all runs, with as many digits as tell any two float32 numbers apart."""
    table = Table("step", *(run.name for run in runs), title="loss")
    count = len(runs[0].losses)
    for index in sorted({0, *range(9, count, 10), count - 1}):
        table.add_row(str(index + 1), *(f"{run.losses[index]:.9g}" for run in runs))
    return table


def timed(run: Callable[[], object]) -> float:
    """Seconds that ``run`` takes."""
    began = time.perf_counter()
    run()
    return time.perf_counter() - began


def summary(runs: Sequence[Run]) -> Table:
    """What each run took, and whether it computed the same as the first."""
    table = Table("", "budget", "peak", "of budget", "step", "× plain", "same bits")
    first = runs[0]
    for run in runs:
        table.add_row(
            run.name,
            "none" if run.budget_bytes is None else format_bytes(run.budget_bytes),
            format_bytes(run.peak_bytes),
            "" if run.budget_bytes is None else f"{run.peak_bytes / run.budget_bytes:.1%}",
            format_seconds(run.step_s),
            f"{run.step_s / first.step_s:.2f}",
            "" if run is first else ("yes" if run.equals(first) else "NO"),
        )
    return table


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the demonstration; its exit status."""
    parser = argparse.ArgumentParser(prog="python -m demo.train", description=__doc__)
    parser.add_argument("--steps", type=int, default=30, help="training steps of each run")
    parser.add_argument("--batch", type=int, default=8, help="passages a step")
    parser.add_argument("--rounds", type=int, default=5, help="steps timed of each run")
    options = parser.parse_args(arguments)
    config, text = Config(), read_text()
    batches = tuple(
        draw_batches(text, count=options.steps, batch=options.batch, context=config.context, seed=1)
    )
    count = sum(p.numel() for p in GPT(config).parameters())
    CONSOLE.print(
        f"A GPT of {config.blocks} blocks and {count} parameters with dropout {config.dropout}; "
        f"{options.steps} steps of\n{options.batch} × {config.context} characters of {ORIGIN}.\n"
        f"torch {torch.__version__}, threads: {torch.get_num_threads()}; plain: without fxremat"
    )
    run = functools.partial(train, batches=batches, config=config, rounds=options.rounds)
    whole = run("plain", budget_bytes=None)
    half = run("half", budget_bytes=whole.peak_bytes // 2)
    quarter = run("a quarter", budget_bytes=whole.peak_bytes // 4)
    runs = (whole, half, quarter)
    CONSOLE.print(curves(runs), summary(runs))
    same = all(run.equals(whole) for run in runs)
    fits = all(run.fits() for run in runs)
    CONSOLE.print(
        "All losses and all final parameters are equal to the last bit."
        if same
        else "Losses or parameters DIFFER."
    )
    CONSOLE.print(
        "Every measured peak is within its budget."
        if fits
        else "A measured peak EXCEEDS its budget."
    )
    return 0 if same and fits else 1


if __name__ == "__main__":
    sys.exit(main())
