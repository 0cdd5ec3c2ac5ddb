"""The least budget, and step time, where runs of operations may be computed in parts.

Language models whose logits are most of what they take, and others: the least budget of a step that
is computed as it was traced, with parts that keep bits, and with any parts; times at the first of
these, at half of it and at the least in parts. Interleaved rounds; seconds over those of the step
with everything kept, in the same round: median, least and greatest. Where parts keep bits gradients
are compared with the traced step's; elsewhere how far both are off is, from gradients in float64.
Run: OMP_NUM_THREADS=1 python -m benchmarks.split [model …] [--rounds N]
"""

from __future__ import annotations

import argparse
import warnings
from typing import Any

import torch

import fxremat
from benchmarks.common import SPLITS, Spread, interleave, ratios, rows_but, save, show
from benchmarks.overhead import vars_of
from benchmarks.steps import Step, entry_of, planned
from fxremat.errors import BudgetError
from fxremat.units import format_bytes
from tests.models.zoo import ZooModel

MODELS = ("llama_words32000", "llama_words128000", "gpt16", "vit", "unet", "encoder16384")

KEPT = "everything kept"


def gradients(step: Step) -> list[torch.Tensor]:
    """Of all parameters, of a step of its own."""
    step.model.zero_grad(set_to_none=True)
    torch.manual_seed(5)
    step.run()
    found = [p.grad.clone() for p in step.model.parameters() if p.grad is not None]
    step.model.zero_grad(set_to_none=True)
    return found


def precise(entry: ZooModel) -> list[torch.Tensor]:
    """Gradients in float64."""
    args, kwargs = torch.utils._pytree.tree_map(
        lambda x: x.double() if isinstance(x, torch.Tensor) and x.is_floating_point() else x,
        entry.sample(0),
    )
    model = entry.build().double()
    torch.manual_seed(5)
    entry.loss(model(*args, **kwargs)).backward()
    return [p.grad for p in model.parameters() if p.grad is not None]


def error(found: list[torch.Tensor], truth: list[torch.Tensor]) -> float:
    """Norm of the difference of gradients, over that of the gradients."""
    pairs = [(a.double() - b, b) for a, b in zip(found, truth, strict=True)]
    off, whole = (torch.stack([t.norm() for t in own]).norm() for own in zip(*pairs, strict=True))
    return float(off / whole)


def compiled(entry: ZooModel, budget: Any, split: str) -> tuple[Step, fxremat.CompiledModule]:
    """A model within a budget."""
    torch._dynamo.reset()
    return planned(entry, budget, **SPLITS[split])


def measure(name: str, rounds: int) -> list[dict[str, Any]]:
    """Rows of one model."""
    entry = entry_of(name)
    made = {
        KEPT: compiled(entry, "100%", "as traced"),
        "least, as traced": compiled(entry, "min", "as traced"),
    }
    least_bytes = made["least, as traced"][1].plan.least_budget_bytes
    for called in ("same bits", "to rounding"):
        for budget, where in (
            ("100%", "room for all"),
            (least_bytes, "there"),
            (least_bytes // 2, "half"),
            ("min", "least"),
        ):
            try:
                made[f"{where}, {called}"] = compiled(entry, budget, called)
            except BudgetError as refused:
                print(f"{name}, {where}, {called}: {refused}")
    expected, truth = gradients(made[KEPT][0]), precise(entry)
    kept_error = error(expected, truth)
    rows = []
    for setting, (step, call) in made.items():
        for _ in range(2):  # what gradients before a step take is learned
            found = gradients(step)
        same_bits = all(map(torch.equal, found, expected))
        if "rounding" not in setting and not same_bits:
            raise AssertionError(f"{name}, {setting}: other bits than with everything kept")
        plan = call.plan
        rows.append(
            {
                "model": name,
                "setting": setting,
                "budget_bytes": plan.budget_bytes,
                "peak_bytes": step.peak_bytes(),
                "of_traced": plan.budget_bytes / least_bytes,
                "parts_bytes": plan.form.parts_bytes,
                "same_bits": same_bits,
                "error": error(found, truth) / kept_error,
                "predicted": plan.predicted_s / made[KEPT][1].plan.predicted_s,
            }
        )
    values = interleave({n: step.seconds for n, (step, _) in made.items()}, rounds=rounds)
    for row in rows:
        row["seconds"] = vars_of(Spread.of(values[row["setting"]]))
        row["ratio"] = vars_of(ratios(values, row["setting"], KEPT))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="*", default=MODELS)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore", fxremat.BudgetWarning)  # steps before the gradients are known
    results = []
    for name in options.models:
        results += measure(name, options.rounds)
        before = rows_but("split", lambda row: row["model"] in options.models)
        save("split", {"rounds": options.rounds, "rows": [*before, *results]})
    rows = [
        [
            found["model"],
            found["setting"],
            format_bytes(found["budget_bytes"]),
            f"{found['of_traced']:.2f}",
            format_bytes(found["peak_bytes"]),
            "same" if found["same_bits"] else f"error × {found['error']:.2f}",
            Spread(*found["ratio"]).text(1, 3),
        ]
        for found in results
    ]
    titles = ["model", "setting", "budget", "÷ traced least", "peak", "bits", "time ÷ all kept"]
    show("Steps in parts", titles, rows)


if __name__ == "__main__":
    main()
