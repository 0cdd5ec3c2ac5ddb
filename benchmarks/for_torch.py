"""What threads of torch's tracker ask for, beside what torch does now.

``sweep``: peaks of pytorch#197838's model at each share of ``activation_memory_budget``, at that
share where ``fxremat.integrations.torch`` chooses, and of fxremat given the peak of torch's as its
budget. ``times``: seconds of three of these, interleaved. ``shared``: peaks of pytorch#193193's
model, by number of blocks. ``draws``: whether dropout's gradients are those of a step without a
budget.
Run: python -m benchmarks.for_torch [sweep|times|shared|draws …] [--rounds N]
"""

from __future__ import annotations

import argparse
import contextlib
import functools
from typing import Any

import torch
from torch import nn
from torch._functorch import config

from benchmarks.common import Spread, interleave, save, show
from benchmarks.frontier import Recomputed
from benchmarks.steps import Step, make_step, planned, static_bytes
from fxremat import torch_compat
from fxremat.integrations.torch import activation_memory_budget
from tests.models import ZOO
from tests.models.bits import bitwise_equal
from tests.models.reference import run_step
from tests.models.threads import summed_llama, text_and_caption
from tests.models.zoo import ZooModel

SHARES = (0.0, 0.05, 0.1, 0.15, 0.2, 0.25, 0.3, 0.35)
"""Of pytorch#197838, and 0."""

TIMED = (0.05, 0.15, 0.3)
BACKEND = "aot_eager"
SCALE = 4
"""Of that thread's three, the smallest: 16 layers, 512 tokens."""

BLOCKS = (2, 4, 8)


def by_torch(entry: ZooModel, backend: str, context: Any = None, *, wrap: bool = False) -> Step:
    """A step of ``torch.compile``, compiled in a context; with a checkpoint around each block."""
    model = entry.build()
    if wrap:
        model.blocks = nn.ModuleList(Recomputed([block]) for block in model.blocks)
    own = torch_compat.with_code_of_its_own(model)  # copies would share what was compiled first
    call = own if backend == "eager" else torch.compile(own, backend=backend, fullgraph=True)
    step = make_step(entry, model, call)
    with context or contextlib.nullcontext():
        step.run()
    return step


def shares_of(entry: ZooModel, share: float) -> dict[str, Step]:
    """A step at a share of torch's, by who chooses."""
    found = {"torch": by_torch(entry, BACKEND, config.patch(activation_memory_budget=share))}
    if share:
        found["hook"] = by_torch(entry, BACKEND, activation_memory_budget(share))
    return found


def sweep() -> None:
    """Peaks by share."""
    entry, rows = summed_llama(SCALE), []
    for share in SHARES:
        row: dict[str, Any] = {"share": share}
        for who, step in shares_of(entry, share).items():
            row[who] = step.peak_bytes()
        inductor = by_torch(entry, "inductor", config.patch(activation_memory_budget=share))
        row["inductor"] = inductor.peak_bytes()
        rows.append(row)
    for row in sorted(rows, key=lambda row: row["torch"]):
        step, compiled = planned(entry, row["torch"])
        step.run()
        row["budget"], row["fxremat"] = row["torch"], step.peak_bytes()
        row["least"] = compiled.plan.least_budget_bytes
    resident = static_bytes(entry.build())
    save("for_torch/sweep", {"resident_bytes": resident, "rows": rows})
    names = ("torch", "inductor", "hook", "fxremat")
    show(
        "peaks by share of activation_memory_budget, MiB",
        ["share", *names],
        [[f"{r['share']:.2f}", *(mebibytes(r.get(name)) for name in names)] for r in rows],
    )


def mebibytes(nbytes: int | None) -> str:
    """With one decimal, or nothing."""
    return "" if nbytes is None else f"{nbytes / 2**20:.1f}"


def times(rounds: int) -> None:
    """Seconds at some shares, and of fxremat within the peak of torch's."""
    entry, steps = summed_llama(SCALE), dict[str, Step]()
    for share in TIMED:
        found = shares_of(entry, share)
        found["fxremat"], _ = planned(entry, found["torch"].peak_bytes())
        found["fxremat"].run()
        steps.update({f"{who} {share}": step for who, step in found.items()})
    values = interleave({name: step.seconds for name, step in steps.items()}, rounds=rounds)
    save("for_torch/times", {"seconds": values})
    rows = [[name, Spread.of(seconds).text(digits=2)] for name, seconds in values.items()]
    show("seconds of a step", ["who, share", "median [low … high]"], rows)


def shared() -> None:
    """Peaks by number of blocks."""
    rows = []
    for blocks in BLOCKS:
        entry = text_and_caption(blocks)
        torch._dynamo.reset()
        eager = by_torch(entry, "eager", wrap=True)
        row = {"blocks": blocks, "static": static_bytes(eager.model)}
        row["eager"] = eager.peak_bytes()
        row["inductor"] = by_torch(entry, "inductor", wrap=True).peak_bytes()
        step, compiled = planned(entry, row["eager"])
        step.run()
        row["fxremat"], row["least"] = step.peak_bytes(), compiled.plan.least_budget_bytes
        rows.append(row)
    save("for_torch/shared", {"rows": rows})
    names = ("static", "eager", "inductor", "fxremat", "least")
    show(
        "peaks of blocks that run twice, MiB; eager and inductor with a checkpoint around each",
        ["blocks", *names],
        [[str(r["blocks"]), *(mebibytes(r[name]) for name in names)] for r in rows],
    )


def draws() -> None:
    """Whether a budget leaves dropout's masks alone."""
    entry = ZOO["gpt"]

    def step(context: Any) -> Any:
        torch._dynamo.reset()
        model = entry.build()
        with context:
            return run_step(entry, model, torch.compile(model, backend=BACKEND, fullgraph=True))

    expected = step(contextlib.nullcontext()).gradients
    rows = []
    for share in (0.5, 0.05):
        found = {
            "torch": step(config.patch(activation_memory_budget=share)).gradients,
            "hook": step(activation_memory_budget(share)).gradients,
        }
        rows.append(
            {"share": share, **{who: bitwise_equal(g, expected) for who, g in found.items()}}
        )
    save("for_torch/draws", {"model": entry.name, "rows": rows})
    show(
        "gradients of a GPT with dropout: the bits of those without a budget?",
        ["share", "torch", "hook"],
        [[str(r["share"]), str(r["torch"]), str(r["hook"])] for r in rows],
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("parts", nargs="*", default=["sweep", "times", "shared", "draws"])
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    torch.set_num_threads(1)
    timed = functools.partial(times, options.rounds)
    parts = {"sweep": sweep, "times": timed, "shared": shared, "draws": draws}
    for run in [parts[name] for name in options.parts]:
        run()


if __name__ == "__main__":
    main()
