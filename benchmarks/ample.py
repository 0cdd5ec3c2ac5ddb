"""What a step of a small model takes where nothing is to be done: a budget of 1.5 × eager's peak.

Fresh models of each kind train in one process and one thread, interleaved: as they are, by
``torch.compile(backend="aot_eager")``, and by fxremat. CPU time of a step (gradients cleared,
forward, loss, backward, a step of SGD), and its ratio to that of ``aot_eager`` in the same round:
median, least and greatest; and the ratio of the least times of all rounds, which other work on the
machine disturbs least. Besides, most bytes that a step allocates, by torch's profiler, and with
``--where`` where fxremat's own Python takes its time, by cProfile.

Run: OMP_NUM_THREADS=1 FXREMAT_CACHE=0 python -m benchmarks.ample [model …] [--rounds N] [--where]
"""

from __future__ import annotations

import argparse
import cProfile
import gc
import math
import pstats
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import fxremat
from benchmarks.ample_models import CASES, Case
from benchmarks.common import Spread, interleave, keep_freed_memory, peak_of, ratios, save, show
from fxremat.units import format_bytes

SHARE = 1.5
"""The budget over eager's peak."""

WARM = 24
"""Steps before any is timed: until nothing is watched or learned any more."""

ROUND_S = 0.02
"""CPU time of a round of each, about."""

WAYS = ("fxremat", "aot_eager", "eager")


class Training:
    """A fresh model that trains in one way."""

    def __init__(self, case: Case, wrap: Callable[[nn.Module], Callable[..., Any]]) -> None:
        torch.manual_seed(0)
        model = case.build()
        self.call = wrap(model)
        self.case = case
        self.optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    def step(self) -> None:
        """One of them."""
        case = self.case
        self.optimizer.zero_grad()
        case.loss(self.call(*case.inputs), *case.targets).backward()
        self.optimizer.step()

    def seconds(self, steps: int) -> float:
        """CPU time of a step, over so many."""
        begin = time.thread_time_ns()
        for _ in range(steps):
            self.step()
        return (time.thread_time_ns() - begin) / steps / 1e9

    def peak_bytes(self) -> int:
        """Most that a step allocates, gradients included."""
        self.optimizer.zero_grad()
        return peak_of(self.step)


def trainings_of(case: Case) -> dict[str, Training]:
    """The three ways, warm."""
    eager = Training(case, lambda model: model)
    eager.step()
    held = [*case.inputs, *case.targets, *(t for t in _tensors(eager)), *_gradients(eager)]
    budget = math.ceil(SHARE * (peak_of(eager.step) + sum(t.nbytes for t in held)))
    sample = fxremat.Sample(case.inputs)

    def planned(model: nn.Module) -> Callable[..., Any]:
        found: Callable[..., Any] = fxremat.compile(model, sample, budget)
        return found

    found = {
        "fxremat": Training(case, planned),
        "aot_eager": Training(case, lambda m: torch.compile(m, backend="aot_eager")),
        "eager": eager,
    }
    for training in found.values():
        for _ in range(WARM):
            training.step()
    return found


def _tensors(training: Training) -> list[Tensor]:
    return [p for group in training.optimizer.param_groups for p in group["params"]]


def _gradients(training: Training) -> list[Tensor]:
    return [p.grad for p in _tensors(training) if p.grad is not None]


def measure(name: str, rounds: int, *, where: bool = False) -> dict[str, Any]:
    """Seconds of CPU of a step of one model in each way, and most bytes that a step allocates."""
    torch._dynamo.reset()
    torch.manual_seed(1)
    trainings = trainings_of(CASES[name]())
    peaks = {way: training.peak_bytes() for way, training in trainings.items()}
    for training in trainings.values():
        for _ in range(4):
            training.step()  # a profile that began has ended what was watched
    one_s = min(trainings["aot_eager"].seconds(4) for _ in range(3))
    steps = max(1, round(ROUND_S / one_s))
    gc.collect()
    gc.disable()
    try:
        runs = {way: lambda own=own: own.seconds(steps) for way, own in trainings.items()}
        values = interleave(runs, rounds=rounds)
    finally:
        gc.enable()
    more = [a - b for a, b in zip(values["fxremat"], values["aot_eager"], strict=True)]
    if where:
        _show_where(name, trainings["fxremat"])
    return {
        "model": name,
        "steps": steps,
        "seconds": {way: vars_of(Spread.of(own)) for way, own in values.items()},
        "more_s": vars_of(Spread.of(more)),
        "ratio": vars_of(ratios(values, "fxremat", "aot_eager")),
        "ratio_of_least": min(values["fxremat"]) / min(values["aot_eager"]),
        "to_eager": vars_of(ratios(values, "fxremat", "eager")),
        "allocated_bytes": peaks,
    }


def vars_of(spread: Spread) -> tuple[float, float, float]:
    """``spread`` as JSON has it."""
    return spread.median, spread.low, spread.high


def _show_where(name: str, training: Training, steps: int = 100) -> None:
    profile = cProfile.Profile()
    profile.enable()
    for _ in range(steps):
        training.step()
    profile.disable()
    print(f"{name}: {steps} steps")
    pstats.Stats(profile).sort_stats("tottime").print_stats(35)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="*", default=list(CASES))
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--where", action="store_true")
    parser.add_argument("--name", default="ample", help="of the file of results")
    options = parser.parse_args()
    torch.set_num_threads(1)
    keep_freed_memory()
    warnings.simplefilter("ignore")
    results = []
    for name in options.models:
        results.append(measure(name, options.rounds, where=options.where))
        _print(results[-1:])
    _print(results)
    save(options.name, {"rounds": options.rounds, "share": SHARE, "models": results})


def _print(results: list[dict[str, Any]]) -> None:
    rows = [
        [
            found["model"],
            *(f"{found['seconds'][way][0] * 1e3:.2f}" for way in WAYS),
            Spread(*found["ratio"]).text(1.0, 3),
            f"{found['ratio_of_least']:.3f}",
            f"{found['more_s'][0] * 1e6:.0f}",
            f"{found['to_eager'][0]:.3f}",
            *(format_bytes(found["allocated_bytes"][way]) for way in WAYS),
        ]
        for found in results
    ]
    columns = ["model", *(f"{way} ms" for way in WAYS), "÷ aot_eager", "of the least"]
    columns += ["more µs", "÷ eager", *(f"{way} takes" for way in WAYS)]
    show("CPU time of a step at 1.5 × eager's peak (median [low … high])", columns, rows)


if __name__ == "__main__":
    main()
