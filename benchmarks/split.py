"""The least budget, and step time, where runs of operations may be computed in parts.

Language models of one block, whose logits are most of what they take: at the least budget of a step
that is computed as it was traced, at half of that, and at the least in parts. Interleaved rounds;
seconds over those of the step with everything kept, in the same round: median, least and greatest.
Run: OMP_NUM_THREADS=1 python -m benchmarks.split [vocabulary …] [--tokens N] [--rounds N]
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

import fxremat
from benchmarks.common import Spread, interleave, ratios, save, show
from benchmarks.overhead import vars_of
from fxremat.errors import BudgetError
from fxremat.units import format_bytes

VOCABULARIES = (32_000, 128_000)

WIDTH = 64


class Language(nn.Module):
    """A block, and a loss over the vocabulary."""

    def __init__(self, words: int) -> None:
        super().__init__()
        self.words, self.norm = nn.Embedding(words, WIDTH), nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, words, bias=False)

    def forward(self, ids: Tensor, target: Tensor) -> Tensor:
        """The mean loss of all tokens."""
        x = self.words(ids)
        x = x + self.down(functional.gelu(self.up(self.norm(x))))
        return functional.cross_entropy(self.head(x).flatten(0, 1), target.flatten())


def measure(words: int, tokens: int, rounds: int) -> list[dict[str, Any]]:
    """Rows of one vocabulary."""
    torch.manual_seed(0)
    given = tuple(torch.randint(0, words, (1, tokens)) for _ in range(2))

    def planned(budget: Any, *, split: bool) -> fxremat.CompiledModule:
        torch._dynamo.reset()
        return fxremat.compile(Language(words), given, budget, loss="own", split=split)

    traced, parted = planned("min", split=False), planned("min", split=True)
    least_bytes = traced.plan.least_budget_bytes
    calls = {"everything kept": planned("100%", split=False), "least as traced": traced}
    for name, budget in (("that, in parts", least_bytes), ("half of it", least_bytes // 2)):
        try:
            calls[name] = planned(budget, split=True)
        except BudgetError as error:
            print(f"{words} {name}: {error}")
    calls["least in parts"] = parted

    def step_of(call: fxremat.CompiledModule) -> Callable[[], float]:
        def step() -> float:
            begin = time.perf_counter()
            call(*given).backward()
            taken_s = time.perf_counter() - begin
            call.zero_grad(set_to_none=True)
            return taken_s

        return step

    steps = {name: step_of(call) for name, call in calls.items()}
    for step in steps.values():
        step()
        step()
    peaks = {
        name: fxremat.measure_step(call, steps[name]).peak_bytes for name, call in calls.items()
    }
    values = interleave(steps, rounds=rounds)
    return [
        {
            "words": words,
            "tokens": tokens,
            "setting": name,
            "budget_bytes": call.plan.budget_bytes,
            "peak_bytes": peaks[name],
            "parts_bytes": call.plan.form.parts_bytes,
            "predicted": call.plan.predicted_s / calls["everything kept"].plan.predicted_s,
            "seconds": vars_of(Spread.of(values[name])),
            "ratio": vars_of(ratios(values, name, "everything kept")),
        }
        for name, call in calls.items()
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("words", type=int, nargs="*", default=VOCABULARIES)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    torch.set_num_threads(1)
    results = []
    for words in options.words:
        results += measure(words, options.tokens, options.rounds)
    rows = [
        [
            str(found["words"]),
            found["setting"],
            format_bytes(found["budget_bytes"]),
            format_bytes(found["peak_bytes"]),
            Spread(*found["ratio"]).text(1, 3),
        ]
        for found in results
    ]
    show("Steps in parts", ["words", "setting", "budget", "peak", "time ÷ everything kept"], rows)
    save("split", {"rounds": options.rounds, "rows": results})


if __name__ == "__main__":
    main()
