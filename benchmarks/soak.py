"""A long training of all that happens in loops, at "min" and at the least that an error names.

One small model takes thousands of steps of eight sizes. Chance, seeded, decides when gradients are
cleared and how, which steps fail in the forward, in the loss or in the backward, whose outputs are
held, and when the model is evaluated. Errors that the loop did not raise itself are counted, and
steps over the budget of which no warning had come. Peaks are counted below torch (allocated.c).
Run: python -m benchmarks.soak [--steps N] [--seed N] [--budgets min least]
"""

from __future__ import annotations

import argparse
import collections
import random
import resource
import statistics
import tempfile
import time
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

import fxremat
from benchmarks.allocated import Allocated, built
from benchmarks.common import show
from benchmarks.rows import Row, Rows, append, failure, run_part
from fxremat.errors import BudgetError, BudgetWarning, PlanError

BUDGETS = ("min", "least")
SIZES = (4, 6, 8, 10, 12, 14, 15, 16)
CLEARED = ("before", "between", "after", "zeros")
FAILS = ("forward", "loss", "output", "gradient")
"""Where a step is made to fail: after the forward, in the loss, before the backward of the model,
and when its first gradient is there."""

FAILING, EVALUATED, HELD, DROPPED = 0.04, 0.05, 0.1, 0.02
"""Shares of steps."""

MOST_ERRORS = 50
NOTED = 10
SECONDS = 7200


class MeantError(Exception):
    """What the loop itself raises."""


class Model(nn.Module):
    """Two blocks of an encoder and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.inside = nn.Linear(24, 32)
        self.norms = nn.ModuleList(nn.LayerNorm(32) for _ in range(2))
        self.mixing = nn.ModuleList(nn.Linear(32, 96) for _ in range(2))
        self.out = nn.ModuleList(nn.Linear(32, 32) for _ in range(2))
        self.dropout = nn.Dropout(0.1)
        self.head = nn.Linear(32, 8)

    def forward(self, x: Tensor) -> Tensor:
        """Logits of each place of a sequence."""
        x = self.inside(x)
        for norm, mixing, out in zip(self.norms, self.mixing, self.out, strict=True):
            q, k, v = mixing(norm(x)).chunk(3, dim=-1)
            weights = torch.softmax(q @ k.transpose(1, 2) / 5.6, dim=-1)
            x = x + self.dropout(functional.gelu(out(weights @ v)))
        return self.head(x)


@dataclass(slots=True)
class Counted:
    """What happened so far.

    Attributes:
        steps: that ended, or failed as they were meant to.
        errors: by type and place; noted: the first of them, by step.
        over, silent: steps over the budget, and those that no warning was for.
        warned_bytes: no larger peak was warned of.
        worst: most that a step took, of its budget.
        step_s: CPU seconds of steps that ended.
    """

    steps: int = 0
    errors: collections.Counter[str] = field(default_factory=collections.Counter)
    noted: list[Row] = field(default_factory=list)
    over: int = 0
    silent: int = 0
    silent_noted: list[Row] = field(default_factory=list)
    warned: int = 0
    warned_bytes: int = 0
    worst: float = 0.0
    step_s: list[float] = field(default_factory=list)


@dataclass(slots=True)
class Soak:
    """The loop.

    Attributes:
        budget: as ``fxremat.compile`` is given it.
        chance: decides.
        fails: where this step fails.
    """

    budget: int | str
    chance: random.Random
    allocated: Allocated
    counted: Counted = field(default_factory=Counted)
    held: collections.deque[Tensor] = field(default_factory=lambda: collections.deque(maxlen=3))
    fails: str | None = None
    base_bytes: int = 0
    model: Any = None
    optimizer: Any = None

    def begin(self) -> None:
        """Make and compile the model, for the largest size."""
        self.base_bytes = self.allocated.now_bytes
        torch.manual_seed(0)
        model = Model()
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        model.inside.weight.register_post_accumulate_grad_hook(lambda _: self.fail("gradient"))
        sample = torch.randn(max(SIZES), 32, 24)
        self.model = fxremat.compile(model, sample, self.budget, optimizer=self.optimizer)
        self.model.register_forward_hook(lambda *_: self.fail("forward"))

    def fail(self, where: str, _value: object = None) -> None:
        """Raise, where this step is meant to fail here."""
        if self.fails == where:
            raise MeantError(where)

    def step(self) -> int:
        """One iteration; the peak from before the forward to after the backward."""
        chance = self.chance
        size, cleared = chance.choice(SIZES), chance.choice(CLEARED)
        self.fails = chance.choice(FAILS) if chance.random() < FAILING else None
        held, dropped = chance.random() < HELD, chance.random() < DROPPED
        x, y = torch.randn(size, 32, 24), torch.randint(0, 8, (size, 32))
        if cleared in ("before", "zeros"):
            self.optimizer.zero_grad(set_to_none=cleared == "before")
        self.allocated.mark()
        try:
            output = self.model(x)
            if dropped:
                return self.allocated.most_bytes - self.base_bytes
            loss = functional.cross_entropy(output.flatten(0, 1), y.flatten())
            self.fail("loss")
            output.register_hook(lambda _: self.fail("output"))
            if cleared == "between":
                self.optimizer.zero_grad()
            if held:
                self.held.append(output.detach())
            loss.backward()
        except MeantError:
            return self.allocated.most_bytes - self.base_bytes
        peak = self.allocated.most_bytes - self.base_bytes
        self.optimizer.step()
        if cleared == "after":
            self.optimizer.zero_grad()
        return peak

    def evaluate(self) -> None:
        """Call the model in eval mode, at a size of its own."""
        self.fails = None
        self.model.eval()
        with torch.no_grad():
            self.model(torch.randn(self.chance.randrange(1, 40), 32, 24))
        self.model.train()

    def budget_bytes(self) -> int | None:
        """What the budget means now."""
        if isinstance(self.budget, int):
            return self.budget
        try:
            found: int = self.model.plan.budget_bytes
        except PlanError:
            return None
        return found

    def take(self, number: int) -> None:
        """One iteration, and count."""
        counted = self.counted
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            begin = time.process_time()
            try:
                peak = self.step()
                counted.step_s.append(time.process_time() - begin)
                if self.chance.random() < EVALUATED:
                    self.evaluate()
            except Exception as error:
                counted.errors[type(error).__name__] += 1
                if len(counted.noted) < NOTED:
                    counted.noted.append({"step": number, "fails": self.fails, **failure(error)})
                return
        counted.steps += 1
        if any(issubclass(each.category, BudgetWarning) for each in caught):
            counted.warned += 1
            counted.warned_bytes = max(counted.warned_bytes, peak)
        budget = self.budget_bytes()
        if budget is None:
            return
        counted.worst = max(counted.worst, peak / budget)
        if peak > budget:
            counted.over += 1
            if peak > counted.warned_bytes:
                counted.silent += 1
                if len(counted.silent_noted) < NOTED:
                    note = {"step": number, "peak_bytes": peak, "budget_bytes": budget}
                    counted.silent_noted.append({**note, "fails": self.fails})

    def row(self) -> Row:
        """What was counted."""
        counted = self.counted
        return {
            "budget": self.budget,
            "budget_bytes": self.budget_bytes(),
            "steps": counted.steps,
            "errors": dict(counted.errors),
            "first_errors": counted.noted,
            "over": counted.over,
            "silent": counted.silent,
            "first_silent": counted.silent_noted,
            "warnings": counted.warned,
            "worst_over": counted.worst,
            "median_s": statistics.median(counted.step_s) if counted.step_s else None,
            "longest_after_100_s": max(counted.step_s[100:], default=None),
            "held_bytes": self.allocated.now_bytes - self.base_bytes,
            "resident_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        }


def least_named(allocated: Allocated) -> int | None:
    """The least that the error of a far too small budget names."""
    try:
        Soak(1024, random.Random(0), allocated).begin()
    except BudgetError as error:
        return error.least_budget_bytes
    return None


def in_this_process(options: argparse.Namespace) -> None:
    """Take all steps; a row every tenth of them."""
    torch.set_num_threads(1)
    allocated = Allocated()
    budget: int | str | None = options.budget
    if budget == "least":
        budget = least_named(allocated)
        torch._dynamo.reset()
    if budget is None:
        append(options.rows, {"failed": "no error named a least budget"})
        return
    soak = Soak(budget, random.Random(options.seed), allocated)
    soak.begin()
    every = max(1, options.steps // 10)
    for number in range(options.steps):
        soak.take(number)
        if (number + 1) % every == 0:
            append(options.rows, {**soak.row(), "taken": number + 1})
        if soak.counted.errors.total() >= MOST_ERRORS:
            append(options.rows, {**soak.row(), "taken": number + 1, "stopped": True})
            return


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--budgets", nargs="+", choices=BUDGETS, default=list(BUDGETS))
    parser.add_argument("--budget", help=argparse.SUPPRESS)
    parser.add_argument("--rows", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.budget:
        in_this_process(options)
        return
    results = Rows("soak", {"steps": options.steps, "seed": options.seed, "sizes": SIZES})
    with tempfile.TemporaryDirectory(prefix="fxremat-soak-") as folder:
        settings = {"FXREMAT_CACHE": "0", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
        settings["LD_PRELOAD"] = str(built(Path(folder)))
        for budget in options.budgets:
            found: list[Row] = []
            command = ["-m", "benchmarks.soak", "--budget", budget]
            command += ["--steps", str(options.steps), "--seed", str(options.seed)]
            ended = run_part(command, settings=settings, seconds=SECONDS, add=found.append)
            last = found[-1] if found else {}
            results.rows.append({"asked": budget, **last, "ended": ended})
    columns = ["budget", "steps", "errors", "over", "silent", "worst ÷ budget", "warnings"]
    columns += ["median ms", "longest ms"]
    show("A long training", columns, [_shown(row) for row in results.rows])
    for row in results.rows:
        for each in (row.get("first_errors") or [])[:3]:
            print(f"{row['asked']}: step {each['step'] + 1}: {each['failed']}")
        for each in (row.get("first_silent") or [])[:3]:
            print(f"{row['asked']}: silent: {each}")
        if row.get("ended") or row.get("failed"):
            print(f"{row['asked']}: {row.get('ended') or row['failed']}")
    results.save()


def _shown(row: Row) -> list[str]:
    if "steps" not in row:
        return [str(row["asked"]), "", str(row.get("failed") or row["ended"]), *[""] * 6]
    return [
        f"{row['asked']} ({row['budget_bytes']})",
        f"{row['steps']}",
        ", ".join(f"{n} {name}" for name, n in row["errors"].items()) or "0",
        f"{row['over']}",
        f"{row['silent']}",
        f"{row['worst_over']:.4f}",
        f"{row['warnings']}",
        f"{(row['median_s'] or 0) * 1e3:.1f}",
        f"{(row['longest_after_100_s'] or 0) * 1e3:.0f}",
    ]


if __name__ == "__main__":
    main()
