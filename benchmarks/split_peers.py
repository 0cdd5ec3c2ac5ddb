"""Steps in parts beside losses and MLPs that are written by hand so that they never exist whole.

Each peer of ``split_by_hand.py`` computes the loss of one Llama-like decoder. Its peak is measured,
and fxremat gets that peak as its budget, once with eager's bits and once up to rounding. Gradients
of all are eager's to 1e-4, or the script fails. Interleaved rounds; ratios are of the same round:
median, least and greatest.
Run: OMP_NUM_THREADS=1 python -m benchmarks.split_peers [--words N …] [--tokens N] [--width N]
[--layers N] [--rounds N]
"""

from __future__ import annotations

import argparse
import functools
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

import fxremat
from benchmarks.common import SPLITS, Spread, interleave, ratios, save, show
from benchmarks.overhead import vars_of
from benchmarks.split_by_hand import PEERS, Decoder
from fxremat.errors import BudgetError
from fxremat.report.plan import Plan
from fxremat.units import format_bytes

BASE = "eager"

CLOSE = 1e-4
"""Of the norm of a gradient: by how much another may differ."""

WAYS = {"exact": "same bits", "to rounding": "to rounding", "as traced": "as traced"}
"""Names of ``SPLITS``, by names of the results."""

AT_PEAKS = ("exact", "to rounding")
"""What is compared with each peer; all have a least budget."""


@dataclass
class Contenders:
    """All that compute one step, and what is known of each.

    Attributes:
        model: the weights of all.
        given: ids and targets.
        calls: by name, what computes the loss.
        facts: by name, what goes into the file; of those that do not fit, too.
    """

    model: nn.Module
    given: tuple[Tensor, Tensor]
    calls: dict[str, Callable[..., Tensor]] = field(default_factory=dict)
    facts: dict[str, dict[str, Any]] = field(default_factory=dict)

    def step(self, name: str) -> float:
        """Seconds of a step, which leaves no gradients."""
        begin = time.perf_counter()
        torch.autograd.backward(self.calls[name](*self.given))
        taken_s = time.perf_counter() - begin
        self.model.zero_grad(set_to_none=True)
        return taken_s

    def peak_bytes(self, name: str) -> int:
        """The peak of a step once nothing is captured, watched or learned any more."""
        for _ in range(3):
            self.step(name)
        return fxremat.measure_step(self.model, lambda: self.step(name)).peak_bytes

    def same_bits(self, name: str) -> bool:
        """Whether loss and gradients have the bits of the base.

        Raises:
            RuntimeError: they are not even close.
        """
        own, base = self._results(name), self._results(BASE)
        for found, wanted in zip(own, base, strict=True):
            off = float((found - wanted).norm() / wanted.norm())
            if not off <= CLOSE:
                raise RuntimeError(f"{name}: a result is off by {off:.1e} of its norm")
        return all(map(torch.equal, own, base))

    def _results(self, name: str) -> list[Tensor]:
        loss = self.calls[name](*self.given)
        torch.autograd.backward(loss)
        found = [p.grad for p in self.model.parameters() if p.grad is not None]
        self.model.zero_grad(set_to_none=True)
        return [loss.detach(), *found]

    def measure(self, rounds: int) -> None:
        """Peaks, bits and seconds of all; whoever has a peer is held against it, too."""
        for name, call in self.calls.items():
            peak_bytes = self.peak_bytes(name)
            self.facts[name] |= {"peak_bytes": peak_bytes, "same_bits": self.same_bits(name)}
            if isinstance(call, fxremat.CompiledModule):
                self.facts[name] |= facts_of(call.plans[-1])  # captured anew after a reset
        steps: dict[str, Callable[[], float]] = {
            name: functools.partial(self.step, name) for name in self.calls
        }
        values = interleave(steps, rounds=rounds)
        for name, taken_s in values.items():
            facts = self.facts[name]
            facts["seconds"] = vars_of(Spread.of(taken_s))
            facts["over_base"] = vars_of(ratios(values, name, BASE))
            if "peer" in facts:
                facts["over_peer"] = vars_of(ratios(values, name, facts["peer"]))


def plan(all_: Contenders, name: str, split: str, budget: str | int, **facts: Any) -> None:
    """Let fxremat be a contender; where it cannot keep to the budget, that is known of it."""
    torch._dynamo.reset()
    all_.facts[name] = facts | {"split": split}
    try:
        call = fxremat.compile(all_.model, all_.given, budget, loss="own", **SPLITS[WAYS[split]])
    except BudgetError as error:
        print(f"{name}: {error}")
        all_.facts[name]["least_budget_bytes"] = error.least_budget_bytes
        return
    all_.calls[name] = call


def facts_of(plan: Plan) -> dict[str, Any]:
    """What is told of a plan."""
    return {
        "budget_bytes": plan.budget_bytes,
        "least_budget_bytes": plan.least_budget_bytes,
        "parts_bytes": plan.form.parts_bytes,
        "predicted_s": plan.predicted_s,
    }


def measure(words: int, options: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """What is known of all at one vocabulary."""
    torch.manual_seed(0)
    model = Decoder(words, options.width, options.layers)
    ids, target = (torch.randint(0, words, (1, options.tokens)) for _ in range(2))
    all_ = Contenders(model, (ids, target))
    for name, peer in PEERS.items():
        all_.calls[name], all_.facts[name] = functools.partial(peer, model), {}
        peak_bytes = all_.peak_bytes(name)
        for split in AT_PEAKS:
            plan(all_, f"{split}, {name}", split, peak_bytes, peer=name)
    for split in WAYS:
        plan(all_, f"{split}, least", split, "min")
    all_.measure(options.rounds)
    return all_.facts


def texts(facts: dict[str, Any], ratio: str) -> list[str]:
    """The peak and a ratio of a contender; of one that does not fit, what it needs."""
    if "peak_bytes" not in facts:
        return [f"> {format_bytes(facts['least_budget_bytes'])}", "–"]
    return [format_bytes(facts["peak_bytes"]), Spread(*facts[ratio]).text(1, 2)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--words", type=int, nargs="*", default=(32_000, 128_000))
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    torch.set_num_threads(1)
    found = {words: measure(words, options) for words in options.words}
    save("split_peers", {**vars(options), "words": found})
    columns = ["peer", "peak", "time ÷ eager"]
    for split in AT_PEAKS:
        columns += [f"{split}: peak", "time ÷ peer"]
    for words, facts in found.items():
        rows = [
            [name, *texts(facts[name], "over_base")]
            + [t for split in AT_PEAKS for t in texts(facts[f"{split}, {name}"], "over_peer")]
            for name in PEERS
        ]
        show(f"{words} words, at the peak of each peer", columns, rows)
        least = [[split, *texts(facts[f"{split}, least"], "over_base")] for split in WAYS]
        show(f"{words} words, at the least budget", ["split", "peak", "time ÷ eager"], least)


if __name__ == "__main__":
    main()
