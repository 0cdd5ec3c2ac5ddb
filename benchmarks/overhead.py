"""What a step takes of the CPU beside its operations: many tiny calls, against ``aot_eager``.

Interleaved rounds in one process and one thread; microseconds of CPU time a step, and how many
more than the reference's in the same round: median, least and greatest.
Run: OMP_NUM_THREADS=1 python -m benchmarks.overhead [parameters …] [--rounds N]
"""

from __future__ import annotations

import argparse
import gc
import time
from collections.abc import Callable

import torch
from torch import nn

import fxremat
from benchmarks.common import Spread, interleave, save, show

PARAMETERS = (24, 72, 300)

STEPS = 2400
"""Parameters over steps of a round: rounds of all sizes take alike."""


class Layers(nn.Module):
    """Layers whose operations take next to nothing, with two parameters each."""

    def __init__(self, parameters: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(parameters // 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The sum of what the last layer returns."""
        for layer in self.layers:
            x = torch.relu(layer(x))
        return x.sum()


def round_of(model: nn.Module, call: Callable[..., torch.Tensor], count: int) -> float:
    """Seconds of CPU time of a step: forward, backward, gradients gone."""
    x = torch.ones(2, 4)
    own = list(model.parameters())
    begin = time.thread_time_ns()
    for _ in range(count):
        call(x).backward()
        for parameter in own:
            parameter.grad = None
    return (time.thread_time_ns() - begin) / count / 1e9


def measure(parameters: int, rounds: int) -> dict[str, object]:
    """Microseconds of a step, and of what it takes more than the reference's."""
    torch._dynamo.reset()
    count = max(1, STEPS // parameters)
    planned, plain = Layers(parameters), Layers(parameters)
    calls: dict[str, tuple[nn.Module, Callable[..., torch.Tensor]]] = {
        "fxremat": (planned, fxremat.compile(planned, torch.ones(2, 4), "100%", loss="own")),
        "aot_eager": (plain, torch.compile(plain, backend="aot_eager")),
    }
    for model, call in calls.values():
        round_of(model, call, 50)  # until nothing is watched or learned any more
    gc.collect()
    gc.disable()
    try:
        runs = {
            name: lambda model=model, call=call: round_of(model, call, count)
            for name, (model, call) in calls.items()
        }
        values = interleave(runs, rounds=rounds)
    finally:
        gc.enable()
    more = [a - b for a, b in zip(values["fxremat"], values["aot_eager"], strict=True)]
    found = {name: Spread.of(own) for name, own in (*values.items(), ("more", more))}
    return {"parameters": parameters, **{name: vars_of(own) for name, own in found.items()}}


def vars_of(spread: Spread) -> tuple[float, float, float]:
    """``spread`` as JSON has it."""
    return spread.median, spread.low, spread.high


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("parameters", type=int, nargs="*", default=PARAMETERS)
    parser.add_argument("--rounds", type=int, default=40)
    options = parser.parse_args()
    torch.set_num_threads(1)
    results = [measure(parameters, options.rounds) for parameters in options.parameters]
    names = ("fxremat", "aot_eager", "more")
    rows = [
        [str(found["parameters"]), *(Spread(*found[name]).text(1e6, 0) for name in names)]  # type: ignore[misc]
        for found in results
    ]
    columns = ["parameters", "fxremat µs", "aot_eager µs", "more µs"]
    show("CPU time of a step of next to no work (median [low … high])", columns, rows)
    save("overhead", {"rounds": options.rounds, "sizes": results})


if __name__ == "__main__":
    main()
