"""``fxremat doctor`` on models of transformers and timm, and whether its text comes true.

For each model, in a process of its own, the command runs first. Then the model is trained within
the least budget that it printed, and within 0.6 of the memory with everything kept.

    python -m benchmarks.doctor              # all, into benchmarks/results/doctor.json
    python -m benchmarks.doctor llama t5     # some; the other rows of the file stay
    python -m benchmarks.doctor --no-parts   # faster: nothing in parts (--forms norms)
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import subprocess
import sys
import time
import warnings
from typing import Any

import torch
from torch import nn

import fxremat
from benchmarks import doctor_models
from benchmarks.common import rows_but, save, show
from fxremat.command import main as command
from fxremat.costs.measured.measure import peak_of

SHARE = 0.6

STEPS = 3

PLANNED_STEPS = 6
"""Steps in which a model in several graphs is planned and observed."""

TOLERATED_BYTES = 512
"""Bytes over a budget that are not warned of."""

TIMEOUT_S = 480


def loss_of(outputs: Any) -> torch.Tensor:
    """The loss that a model returns, else a sum over its output."""
    found: Any = getattr(outputs, "loss", None)
    return outputs.square().mean() if found is None else found


def train(name: str, budget: str, forms: str) -> dict[str, Any]:
    """Train a model within a budget, and measure the peak of each step.

    For a model in several graphs, the peak is the one that the package itself observes.
    """
    torch.manual_seed(0)
    model, sample = getattr(doctor_models, name)()
    own = isinstance(sample, dict)
    kwargs = sample if own else {}
    args = () if own else (sample,)
    written = int(budget) if budget.isdigit() else float(budget)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    with warnings.catch_warnings(record=True) as issued:
        warnings.simplefilter("always")
        compiled = fxremat.compile(
            model,
            sample,
            written,
            loss="own" if own else None,
            effort=fxremat.Effort(forms=(forms,)) if forms else 1.0,
        )
        peaks: list[int] = []

        def step() -> None:
            outputs = compiled(*args, **kwargs)
            loss_of(outputs).backward()
            optimizer.step()
            optimizer.zero_grad()

        several = _plan_of(compiled) is None
        for _ in range(PLANNED_STEPS if several else STEPS):
            if several:  # steps are planned and observed by a profiler of their own
                step()
            else:
                peaks.append(_measured(model, (args, kwargs), step))
        plan = _plan_of(compiled)
        if several and plan is not None and plan.measured_peak_bytes is not None:
            peaks = [plan.measured_peak_bytes]
    budget_bytes = plan.budget_bytes if plan is not None else 0
    return {
        "budget_bytes": budget_bytes,
        "peaks_bytes": peaks,
        "holds": bool(peaks) and max(peaks) <= budget_bytes + TOLERATED_BYTES,
        "graphs": len(plan.regions) if isinstance(plan, fxremat.StepPlan) else 1,
        "least_budget_bytes": plan.least_budget_bytes if plan is not None else None,
        "warnings": [_bare(str(own.message))[:300] for own in issued if _is_ours(own.category)],
    }


def _is_ours(category: type[Warning]) -> bool:
    return issubclass(category, (fxremat.BudgetWarning, fxremat.GraphBreakWarning))


def _plan_of(compiled: Any) -> Any:
    try:
        return compiled.plan
    except fxremat.PlanError:
        return None


def _measured(model: nn.Module, held: Any, step: Any) -> int:
    """The peak of a step in bytes, with parameters, buffers and arguments."""
    args, kwargs = held
    tensors = [*model.parameters(), *model.buffers(), *args, *kwargs.values()]
    storages = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}
    return peak_of(step, device=torch.device("cpu"), resident_bytes=sum(storages.values()))


def _bare(text: str) -> str:
    """Text with paths of packages relative to the folder of packages."""
    return re.sub(r"[^\s\"':]*/(?:site|dist)-packages/", "", text)


def _trained(name: str, budget: str, forms: str) -> dict[str, Any]:
    try:
        return train(name, budget, forms)
    except Exception as error:
        return {"error": _bare(f"{type(error).__name__}: {error}")[:600]}


def examine(name: str, forms: str) -> dict[str, Any]:
    """What the command says of a model, and what training shows; in a process of its own."""
    begun_s = time.perf_counter()
    arguments = ["doctor", f"benchmarks.doctor_models:{name}", "--json"]
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        code = command([*arguments, *(["--forms", forms] if forms else [])])
    row: dict[str, Any] = {
        "name": name,
        "forms": forms or "all",
        "exit": code,
        "seconds": time.perf_counter() - begun_s,
    }
    if not printed.getvalue():
        return row
    facts = json.loads(printed.getvalue())
    row |= {"graphs": facts["graphs"], "problem": facts["problem"], "steps": facts["steps_run"]}
    if facts["problem"]:
        return row
    least = facts["least"]
    return {
        **row,
        "breaks": [own["line"] for own in facts["breaks"]],
        "opaque": [[own["name"], own["count"]] for own in facts["opaque"]],
        "kept_bytes": facts["kept"]["budget_bytes"],
        "least_bytes": least["budget_bytes"],
        "needed_by": least["needed_by"],
        "least_time": least["predicted_s"] / facts["kept"]["predicted_s"],
        "cold_s": sum(facts["first_step"]["cold"].values()),
        "cached_s": sum(facts["first_step"]["cached"].values()),
        "advice": [f"{own['argument']}: {own['effect']}" for own in facts["advice"]],
        "at_least": _trained(name, str(least["budget_bytes"]), forms),
        "at_share": _trained(name, str(SHARE), forms),
    }


def row_of(name: str, forms: str) -> dict[str, Any]:
    """The row of a model, from a process of its own."""
    ran = subprocess.run(
        [sys.executable, "-m", "benchmarks.doctor", "--examine", name, forms],
        env={
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "FXREMAT_PROGRESS": "0",
            "FXREMAT_CACHE": "0",
        },
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    if ran.returncode:
        return {"name": name, "exit": ran.returncode, "stderr": _bare(ran.stderr)[-600:]}
    row: dict[str, Any] = json.loads(ran.stdout.splitlines()[-1])
    return row


def _verdict(trained: dict[str, Any] | None) -> str:
    if not trained:
        return ""
    if "error" in trained:
        return trained["error"].partition(":")[0]
    return "holds" if trained["holds"] else "over"


def _size(nbytes: int | None) -> str:
    return "" if nbytes is None else f"{nbytes / 2**20:.1f} MiB"


def main() -> None:
    """Print a table, and write the rows."""
    if sys.argv[1:2] == ["--examine"]:
        print(json.dumps(examine(*sys.argv[2:])))
        return
    forms = "norms" if "--no-parts" in sys.argv else ""
    names = [name for name in sys.argv[1:] if name in doctor_models.NAMES]
    names = names or list(doctor_models.NAMES)
    rows = rows_but("doctor", lambda row: row["name"] in names)
    for name in names:
        rows.append(row_of(name, forms))
        rows.sort(key=lambda row: doctor_models.NAMES.index(row["name"]))
        save("doctor", {"rows": rows}, quiet=True)
        print(name, rows[[r["name"] for r in rows].index(name)]["exit"], flush=True)
    columns = (
        "model",
        "forms",
        "exit",
        "graphs",
        "kept",
        "least",
        "×",
        "cold",
        "at least",
        "at 0.6",
    )
    show(
        "fxremat doctor",
        columns,
        [
            (
                row["name"],
                row.get("forms", ""),
                str(row["exit"]),
                str(row.get("graphs", "")),
                _size(row.get("kept_bytes")),
                _size(row.get("least_bytes")),
                f"{row.get('least_time', 0):.2f}",
                f"{row.get('cold_s', 0):.1f} s",
                _verdict(row.get("at_least")),
                _verdict(row.get("at_share")),
            )
            for row in rows
        ],
    )


if __name__ == "__main__":
    main()
