"""One model under ``aot_eager`` and within fxremat's least budget: what differs."""

from __future__ import annotations

import gc
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import fxremat
from benchmarks.common import SPLITS
from benchmarks.rows import Row, failure
from benchmarks.sweep.cases import Embedded, Make
from fxremat.errors import FxrematError, PlanError
from tests.models.bits import first_difference

STEPS = 3
"""Steps that are compared: a model in pieces has its plan from the third one on."""

AGAIN = 16
"""Extra runs of ``aot_eager`` where bits differ: some operators vary from run to run."""

OUTCOMES = ("same", "bits", "refused", "untyped", "died")
"""Of what ``aot_eager`` trains."""

SKIPPED = ("cannot", "repeats", "nothing")
"""Of what it does not, or not twice alike."""

Left = dict[str, Tensor | None]
"""What a step leaves: results, gradients and buffers, by name."""


def row_of(make: Make) -> Row:
    """What becomes of one model.

    ``outcome`` is ``"same"``, ``"bits"``, ``"refused"`` (an error of fxremat), ``"untyped"``
    (another error), or of what ``aot_eager`` cannot do: ``"cannot"``, ``"repeats"`` (its own bits
    differ from run to run) or ``"nothing"`` (there is no gradient).
    """
    try:
        expected, again = _taken(make, _aot_eager, times=2)
    except Exception as error:
        return {"outcome": "cannot", **failure(error)}
    if not any(x is not None for left in expected for name, x in left.items() if "grad" in name):
        return {"outcome": "nothing"}
    if not all_alike([expected, again]):
        return {"outcome": "repeats"}
    row: Row = {}
    row |= _compared(make, expected, row, split="same bits")
    if row["outcome"] == "bits" and not all_alike(_taken(make, _aot_eager, times=AGAIN)):
        return {"outcome": "repeats"}
    if row["outcome"] != "same" and row.get("fused"):
        row["whole"] = _compared(make, expected, {}, split="as traced")
    return row


def _compared(make: Make, expected: list[Left], row: Row, *, split: str) -> Row:
    """The row of a model within its least budget."""
    compiled: list[Any] = []

    def within(model: Embedded) -> Callable[..., Any]:
        sample = fxremat.Sample(tuple(model.given), {})
        compiled.append(fxremat.compile(model, sample, "min", loss="own", **SPLITS[split]))
        return compiled[0]

    try:
        (found,) = _taken(make, within, times=1)
    except Exception as error:
        frames = traceback.extract_tb(error.__traceback__)[-3:]
        where = [f"{Path(f.filename).name}:{f.lineno} {f.name}" for f in frames]
        typed = isinstance(error, FxrematError)
        return {"outcome": "refused" if typed else "untyped", **failure(error), "where": where}
    differs = difference(expected, found)
    row = {"outcome": "bits" if differs else "same"}
    if differs:
        row["differs"] = differs
    fused = _fused(compiled[0])
    return {**row, "fused": fused} if fused else row


def _fused(compiled: Any) -> list[str]:
    """What is in parts."""
    try:
        plan = compiled.plan
    except PlanError:
        return []
    plans = [region.plan for region in getattr(plan, "regions", ())] or [plan]
    return [str(each)[:120] for each in plans for each in getattr(each, "fused", ())]


def _aot_eager(model: Embedded) -> Callable[..., Any]:
    compiled: Any = torch.compile(model, backend="aot_eager")
    return compiled


def _taken(
    make: Make, compile: Callable[[Embedded], Callable[..., Any]], *, times: int
) -> list[list[Left]]:
    """What each step of a fresh model leaves, so many times from the same state."""
    torch._dynamo.reset()
    gc.collect()
    model = make()
    before = {name: buffer.detach().clone() for name, buffer in model.named_buffers()}
    with warnings.catch_warnings(), torch.random.fork_rng():
        warnings.simplefilter("ignore")
        torch.manual_seed(0)  # as the first step's: a lazy module draws its numbers in either
        call = compile(model)
        lefts = []
        for _ in range(times):
            for name, buffer in model.named_buffers():
                if name in before:  # those of a lazy module are made by its first call
                    buffer.data.copy_(before[name])
            lefts.append([_step(model, call, number) for number in range(STEPS)])
    return lefts


def _step(model: Embedded, call: Callable[..., Any], seed: int) -> Left:
    torch.manual_seed(seed)
    loss, *results = call(*model.given)
    loss.backward()
    left: Left = {"loss": loss.detach().clone()}
    left |= {f"result {n}": y.detach().clone() for n, y in enumerate(results)}
    left |= {f"grad {n}": _copy(p.grad) for n, p in model.named_parameters()}
    left |= {f"buffer {n}": b.detach().clone() for n, b in model.named_buffers()}
    model.zero_grad(set_to_none=True)
    return left


def _copy(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.detach().clone()


def all_alike(runs: list[list[Left]]) -> bool:
    """Whether all runs left the same bits."""
    return not any(difference(runs[0], run) for run in runs[1:])


def difference(expected: list[Left], found: list[Left]) -> str | None:
    """The first difference, but for which NaN a NaN is."""
    pairs = enumerate(zip(expected, found, strict=True))
    for step, (one, other) in pairs:
        told = first_difference(_alike(other), _alike(one))
        if told:
            return f"step {step}, {told}"
    return None


def _alike(left: Left) -> Left:
    """All NaNs as one."""

    def one(x: Tensor | None) -> Tensor | None:
        if x is None or x.layout is not torch.strided:
            return x if x is None else one(x.to_dense())
        if x.is_complex():
            x = torch.view_as_real(x.resolve_conj())
        return torch.where(x.isnan(), torch.nan, x) if x.is_floating_point() else x

    return {name: one(x) for name, x in left.items()}
