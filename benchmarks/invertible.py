"""Inputs of norms rebuilt from outputs: the error of gradients by depth, and what it gains.

A plain network of convolutions, BatchNorm and leaky ReLU. The error is that of each
parameter's gradient against the exact step, relative in the Euclidean norm, the largest of
all parameters; beside it that of a step in which the input is changed in its last bit, which
is what rounding does. Measured times: bits="rounding" over bits="exact" at the same budget.
Run: python -m benchmarks.invertible [--rounds N] [--threads N]
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
from torch import Tensor, nn

import fxremat
from benchmarks.common import Spread, interleave, ratios, save, show
from fxremat.costs.measured.measure import seconds_of

DEPTHS = (4, 8, 16, 32)
SLOPES = (0.01, 0.1)
SHARE = 0.6
NORMS = fxremat.Effort(forms=("norms",))
CPU = torch.device("cpu")


def network(depth: int, slope: float) -> nn.Module:
    """``depth`` convolutions of 16 channels."""
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    width = 3
    for _ in range(depth):
        convolution = nn.Conv2d(width, 16, 3, padding=1, bias=False)
        layers += [convolution, nn.BatchNorm2d(16), nn.LeakyReLU(slope)]
        width = 16
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 10))


def loss_of(outputs: Tensor) -> Tensor:
    """Of some weight in every output."""
    return outputs.square().sum()


def gradients(model: nn.Module, call: nn.Module, x: Tensor) -> list[Tensor]:
    """Of one step."""
    model.zero_grad(set_to_none=True)
    loss_of(call(x)).backward()
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


def error(found: list[Tensor], expected: list[Tensor]) -> float:
    """The largest relative error of any gradient."""
    pairs = zip(found, expected, strict=True)
    return max(((a - b).norm() / b.norm()).item() for a, b in pairs)


def measure(depth: int, slope: float, rounds: int) -> dict[str, Any]:
    """One network, both ways."""
    x = torch.randn(8, 3, 64, 64, generator=torch.Generator().manual_seed(0))
    eager = network(depth, slope)
    expected = gradients(eager, eager, x)
    nudged = gradients(eager, eager, torch.nextafter(x, torch.full_like(x, 9.0)))
    steps, plans, errors = {}, {}, {}
    for exact in (True, False):
        torch._dynamo.reset()
        model = network(depth, slope)
        bits = "exact" if exact else "rounding"
        call = fxremat.compile(model, x, SHARE, loss=loss_of, bits=bits, effort=NORMS)
        errors[exact] = error(gradients(model, call, x), expected)
        plans[exact] = call.plan

        def run(model: nn.Module = model, call: nn.Module = call) -> float:
            return seconds_of(lambda: gradients(model, call, x), device=CPU)

        steps[str(exact)] = run
    for step in steps.values():
        step()  # the first one is captured again after the reset
    spread = ratios(interleave(steps, rounds=rounds), "False", "True")
    return {
        "depth": depth,
        "slope": slope,
        "budget_bytes": plans[True].budget_bytes,
        "rebuilt": not plans[False].form.exact,
        "error": errors[False],
        "error_exact": errors[True],
        "error_of_last_bit": error(nudged, expected),
        "predicted": [plans[e].predicted_s / plans[e].baseline_s for e in (True, False)],
        "measured": (spread.median, spread.low, spread.high),
    }


def row(found: dict[str, Any]) -> list[str]:
    """A line of the table."""
    exact, rebuilt = found["predicted"]
    return [
        str(found["depth"]),
        str(found["slope"]),
        "yes" if found["rebuilt"] else "no",
        f"{found['error']:.1e}",
        f"{found['error_of_last_bit']:.1e}",
        f"{exact:.3f}",
        f"{rebuilt:.3f}",
        Spread(*found["measured"]).text(digits=2),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    found = [measure(depth, slope, options.rounds) for slope in SLOPES for depth in DEPTHS]
    save("invertible", {"threads": options.threads, "points": found})
    show(
        f"inputs of norms rebuilt, at {SHARE:.0%} of the full peak",
        ["layers", "slope", "rebuilt", "error", "last bit", "exact", "rebuilding", "measured ÷"],
        [row(point) for point in found],
    )


if __name__ == "__main__":
    main()
