"""Optimizers that exist, under budgets: peaks of ten steps, warnings, and bits against aot_eager.

A small GPT is trained by each optimizer at several budgets: the least that an error names, a
share of 0.6 of what a step takes with everything kept (or the least, where that is more), and all
of it. A step is measured from its forward to the end of its backward, below torch
(``benchmarks.allocated``), in a process of its own.

    python -m benchmarks.optimizers                 # a table, and results/optimizers.json
    python -m benchmarks.optimizers --only Muon "fused AdamW"

Optimizers of libraries that are not installed are left out.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import json
import os
import subprocess
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.allocated import Allocated, built
from benchmarks.common import keep_freed_memory, rows_but, save, show

STEPS = 10

BUDGETS: tuple[str | float, ...] = ("least", 0.6, 1.0)

BATCH, LENGTH, VOCABULARY = 4, 64, 512

Parameters = list[Any]


class Several:
    """Several optimizers that step, clear and are counted as one."""

    def __init__(self, *optimizers: Any) -> None:
        self.optimizers = optimizers

    def step(self) -> None:
        """Step each."""
        for own in self.optimizers:
            own.step()

    def zero_grad(self) -> None:
        """Clear the gradients of each."""
        for own in self.optimizers:
            own.zero_grad()


def _torch(name: str, **options: Any) -> Callable[[Any], Any]:
    def make(model: Any) -> Any:
        import torch

        return getattr(torch.optim, name)(model.parameters(), **options)

    return make


def _of(module: str, name: str, **options: Any) -> Callable[[Any], Any]:
    def make(model: Any) -> Any:
        return getattr(importlib.import_module(module), name)(model.parameters(), **options)

    return make


def _muon(model: Any) -> Any:
    """Matrices of the layers by Muon, all others by AdamW."""
    import torch

    named = dict(model.named_parameters())
    matrices = [p for n, p in named.items() if p.ndim == 2 and "blocks" in n]
    matrix_ids = set(map(id, matrices))
    others = [p for p in named.values() if id(p) not in matrix_ids]
    return Several(torch.optim.Muon(matrices, lr=1e-3), torch.optim.AdamW(others, lr=1e-3))


def _schedule_free(model: Any) -> Any:
    optimizer = _of("schedulefree", "AdamWScheduleFree", lr=1e-3)(model)
    optimizer.train()
    return optimizer


def _in_backward(model: Any) -> Any:
    """An AdamW for each parameter, which steps as soon as the gradient is there."""
    import torch

    own = {p: torch.optim.AdamW([p], lr=1e-3) for p in model.parameters()}

    def step(parameter: Any) -> None:
        own[parameter].step()
        own[parameter].zero_grad()

    for parameter in own:
        parameter.register_post_accumulate_grad_hook(step)
    found = Several(*own.values())
    found.step = lambda: None  # type: ignore[method-assign]
    return found


OPTIMIZERS: dict[str, Callable[[Any], Any]] = {
    "AdamW, foreach": _torch("AdamW", lr=1e-3, foreach=True),
    "AdamW": _torch("AdamW", lr=1e-3),
    "fused AdamW": _torch("AdamW", lr=1e-3, fused=True),
    "AdamW in the backward": _in_backward,
    "SGD": _torch("SGD", lr=1e-2),
    "SGD, momentum": _torch("SGD", lr=1e-2, momentum=0.9),
    "Adafactor": _torch("Adafactor", lr=1e-3),
    "transformers' Adafactor": _of("transformers.optimization", "Adafactor"),
    "Muon and AdamW": _muon,
    "NAdam": _torch("NAdam", lr=1e-3),
    "RMSprop": _torch("RMSprop", lr=1e-3),
    "LBFGS": _torch("LBFGS", lr=1e-2, max_iter=2, history_size=4),
    "bitsandbytes AdamW8bit": _of("bitsandbytes.optim", "AdamW8bit", lr=1e-3),
    "bitsandbytes Lion8bit": _of("bitsandbytes.optim", "Lion8bit", lr=1e-4),
    "bitsandbytes PagedAdamW8bit": _of("bitsandbytes.optim", "PagedAdamW8bit", lr=1e-3),
    "torchao AdamW8bit": _of("torchao.optim", "AdamW8bit", lr=1e-3),
    "torchao AdamW4bit": _of("torchao.optim", "AdamW4bit", lr=1e-3),
    "torchao AdamWFp8": _of("torchao.optim", "AdamWFp8", lr=1e-3),
    "schedule-free AdamW": _schedule_free,
}


def model_and_batches() -> tuple[Any, list[Any]]:
    """A GPT whose parameters, gradients and state are most of a step, and ten batches."""
    import torch

    from tests.models.gpt import GPT, GPTConfig

    torch.manual_seed(0)
    sizes = GPTConfig(vocabulary=VOCABULARY, context=LENGTH, width=256, blocks=2, dropout=0.1)
    batches = torch.randint(0, VOCABULARY, (STEPS, 2, BATCH, LENGTH))
    return GPT(sizes), [*batches]


def measure_operations() -> None:
    """Measure the operations of the model once: the processes of all rows inherit the costs."""
    import fxremat
    from tests.efforts import QUICK

    model, batches = model_and_batches()
    fxremat.plan(model, tuple(batches[0]), 1.0, loss="own", effort=fxremat.Effort(**QUICK))


def measure(name: str, budget: str | float | int) -> dict[str, Any]:
    """Train in this process, which counts below torch; ``budget`` may be ``"aot_eager"``."""
    keep_freed_memory()
    import torch

    import fxremat
    from tests.efforts import QUICK

    torch.set_num_threads(1)
    allocated = Allocated()
    model, batches = model_and_batches()
    optimizer = OPTIMIZERS[name](model)
    row: dict[str, Any] = {"optimizer": name, "budget": budget}
    counted = list(optimizer.optimizers) if isinstance(optimizer, Several) else optimizer
    if name == "LBFGS":
        counted = None  # it steps with a closure only, so its state is counted once it exists
    call: Any
    if budget == "aot_eager":
        call = torch.compile(model, backend="aot_eager")
    else:
        given = {"loss": "own", "optimizer": counted, "effort": fxremat.Effort(**QUICK)}
        try:
            call = fxremat.compile(model, tuple(batches[0]), budget, **given)
        except fxremat.BudgetError as error:
            return row | {"least_bytes": error.least_budget_bytes}
    gc.collect()
    row |= {"peaks_bytes": [], "step_peaks_bytes": [], "bits": [], "warnings": []}

    def forward_and_backward(batch: Any) -> Any:
        allocated.mark()
        loss = call(*batch)
        loss.backward()
        row["peaks_bytes"].append(allocated.most_bytes)
        row["bits"].append(loss.item().hex())
        return loss.detach()

    for batch in batches:
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            if name == "LBFGS":
                optimizer.step(lambda batch=batch: forward_and_backward(batch))
            else:
                forward_and_backward(batch)
                allocated.mark()
                optimizer.step()
            row["step_peaks_bytes"].append(allocated.most_bytes)
            optimizer.zero_grad()
        own = [str(w.message) for w in found if issubclass(w.category, fxremat.BudgetWarning)]
        own = [text.replace(f"{Path(__file__).parents[1]}/", "") for text in own]
        row["warnings"].append(own)
    row["bits"] += [p.double().sum().item().hex() for p in model.parameters()]
    if budget != "aot_eager":
        row["budget_bytes"] = call.plan.budget_bytes
        row["least_bytes"] = call.plan.least_budget_bytes
    return row


def _run(name: str, budget: str | float | int) -> dict[str, Any]:
    """Measure in a process of its own, forked from this one, which has measured nothing."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            found = measure(name, budget)
        except Exception:
            found = {"optimizer": name, "budget": budget, "failed": traceback.format_exc()[-2000:]}
        with os.fdopen(writer, "w") as file:
            json.dump(found, file)
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as file:
        row: dict[str, Any] = json.load(file)
    os.waitpid(child, 0)
    return row


def rows_of(name: str) -> list[dict[str, Any]]:
    """Rows of an optimizer: at each budget."""
    eager = _run(name, "aot_eager")
    probed = _run(name, "1 KiB")
    if "failed" in probed:
        return [probed | {"budget": budget} for budget in BUDGETS]
    least_bytes = probed["least_bytes"]
    rows: list[dict[str, Any]] = []
    for budget in BUDGETS:
        row = _run(name, least_bytes if budget == "least" else budget)
        if "peaks_bytes" not in row and "failed" not in row:  # the share is too small
            row = dict(rows[0])
        row["budget"] = budget
        row["named_least_bytes"] = least_bytes
        if "bits" in row:
            row["same_bits"] = row.pop("bits") == eager.get("bits", 1)
        row["eager_peak_bytes"] = max(eager.get("peaks_bytes", [0]))
        rows.append(row)
    return rows


def table(rows: list[dict[str, Any]]) -> list[tuple[str, ...]]:
    """The rows as text."""
    found = []
    for row in rows:
        if "failed" in row:
            reason = row["failed"].strip().splitlines()[-1][:60]
            found.append((row["optimizer"], str(row["budget"]), "failed", "", "", reason, ""))
            continue
        budget_bytes, warned = row["budget_bytes"], row["warnings"]
        codes = [w.rsplit("[", 1)[-1][:6] for each in warned for w in each]
        found.append(
            (
                row["optimizer"],
                str(row["budget"]),
                f"{budget_bytes / 1e6:.2f}",
                f"{max(row['peaks_bytes']) / budget_bytes:.4f}",
                f"{max(row['step_peaks_bytes']) / budget_bytes:.4f}",
                ", ".join(f"{codes.count(code)} × {code}" for code in sorted(set(codes))) or "none",
                "same" if row["same_bits"] else "other",
            )
        )
    return found


HEADINGS = (
    "optimizer", "budget", "MB", "peak ÷ budget", "peak of step() ÷ budget", "warnings", "bits",
)  # fmt: skip


def main() -> None:
    """Print the table, and write ``results/optimizers.json``."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="*", help="names of optimizers")
    asked = parser.parse_args()
    if "LD_PRELOAD" not in os.environ:
        with tempfile.TemporaryDirectory() as folder:
            own = {"LD_PRELOAD": str(built(Path(folder))), "FXREMAT_CACHE": "0"}
            again = [sys.executable, "-m", "benchmarks.optimizers", *sys.argv[1:]]
            env = os.environ | own | {"OMP_NUM_THREADS": "1"}
            sys.exit(subprocess.run(again, env=env, check=False).returncode)
    for module in ("torch", "fxremat.compiler.compiler", "tests.models.gpt"):  # once for all rows
        importlib.import_module(module)
    measure_operations()
    rows: list[dict[str, Any]] = []
    for name in asked.only or OPTIMIZERS:
        rows += rows_of(name)
        print(*("\t".join(each) for each in table(rows)[-len(BUDGETS) :]), sep="\n", flush=True)
    show("Ten steps of each optimizer", HEADINGS, table(rows))
    others = rows_but("optimizers", lambda row: row["optimizer"] in (asked.only or OPTIMIZERS))
    save("optimizers", {"rows": [*others, *rows]})


if __name__ == "__main__":
    main()
