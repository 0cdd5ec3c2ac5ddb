"""How far the gradients of a step are from those of a step that recomputes nothing.

A GPT of four blocks with dropout takes one step from the same state of the generator each time. Its
gradients are compared with those of eager PyTorch. ``activation_memory_budget`` needs a backend
that draws other masks than eager even if it recomputes nothing, so it is compared with its share of
1.
Run: python -m benchmarks.pictures.bits
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from benchmarks.frontier import grouped
from benchmarks.pictures.style import OURS, THEIRS, new_picture, write
from benchmarks.steps import Step, make_step, planned, reference
from fxremat import torch_compat
from tests.models.gpt import GPTConfig, gpt_entry

ENTRY = gpt_entry("gpt16", GPTConfig(blocks=4, dropout=0.1), batch=4, length=128)

SHARE = 0.05

NONE = 1e-9
"""Where a difference of zero is drawn on the logarithmic axis."""


def _eager() -> Step:
    model = ENTRY.build()
    return make_step(ENTRY, model, model)


def _checkpointed() -> Step:
    model = ENTRY.build()
    grouped("gpt16", model, 1)
    return make_step(ENTRY, model, model)


def _share(share: float) -> Step:
    from torch._functorch import config

    model = ENTRY.build()
    own = torch_compat.with_code_of_its_own(model)
    step = make_step(ENTRY, model, torch.compile(own, backend="aot_eager_decomp_partition"))

    def run() -> None:
        with config.patch(activation_memory_budget=share):
            step.run()

    return Step(model, run)


def _ours(budget: Any, **options: Any) -> Step:
    return planned(ENTRY, budget, **options)[0]


WAYS: dict[str, Callable[[], Step]] = {
    "aot_eager": lambda: reference(ENTRY),
    "checkpoint": _checkpointed,
    'fxremat, "min"': lambda: _ours("min"),
    'fxremat, bits="rounding"': lambda: _ours("min", bits="rounding"),
    "fxremat, inductor": lambda: _ours("min", executor="inductor"),
    "activation_memory_budget": lambda: _share(SHARE),
}


def gradients_of(step: Step) -> list[torch.Tensor]:
    """Return the gradients of a second step, which is the same each time."""
    for _ in range(2):
        torch.manual_seed(1)
        step.run()
    return [p.grad.clone() for p in step.model.parameters() if p.grad is not None]


def difference(found: list[torch.Tensor], expected: list[torch.Tensor]) -> float:
    """Return the norm of the difference of all gradients, relative to their norm."""
    both = list(zip(found, expected, strict=True))
    apart = sum(float((a.double() - b.double()).square().sum()) for a, b in both)
    return float((apart / sum(float(b.double().square().sum()) for _, b in both)) ** 0.5)


def main() -> None:
    torch.set_num_threads(1)
    eager = gradients_of(_eager())
    torch._dynamo.reset()
    others = gradients_of(_share(1.0))
    found = {}
    for name, make in WAYS.items():
        torch._dynamo.reset()
        expected = others if name == "activation_memory_budget" else eager
        found[name] = difference(gradients_of(make()), expected)
        print(name, found[name], flush=True)
    figure, axes = new_picture(2.8)
    for place, (name, value) in enumerate(found.items()):
        color = OURS if name.startswith("fxremat") else THEIRS
        axes.barh(place, max(value, NONE), color=color, height=0.6)
        text = f" {value:.0e}" if value else " equal to the last bit"
        axes.text(max(value, NONE) * 1.2, place, text, va="center", fontsize=10)
    axes.set_xscale("log")
    axes.set_xlim(NONE / 3, 100)
    axes.set_xticks([1e-8, 1e-6, 1e-4, 1e-2, 1])
    axes.set_yticks(range(len(found)), list(found))
    axes.invert_yaxis()
    axes.set_xlabel("relative difference of gradients")
    write(figure, "bits")


if __name__ == "__main__":
    main()
