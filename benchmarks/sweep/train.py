"""One model under ``aot_eager`` and within fxremat's least budget: what differs."""

from __future__ import annotations

import functools
import gc
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import fxremat
from benchmarks.common import SPLITS, peak_of
from benchmarks.rows import Row, failure
from benchmarks.sweep.cases import Make, Plain, tensors_of
from fxremat.errors import BudgetWarning, FxrematError, GraphBreakWarning, PlanError
from tests.models.bits import first_difference

STEPS = 3
"""Steps that are compared: a model in pieces has its plan from the third one on."""

AGAIN = 16
"""Extra runs of ``aot_eager`` where bits differ: some operators vary from run to run."""

OUTCOMES = ("same", "bits", "refused", "untyped", "died")
"""Of what ``aot_eager`` trains."""

SKIPPED = ("cannot", "repeats", "nothing")
"""Of what it does not, or not twice alike."""

_KEPT = 300
"""Characters of a warning that are kept."""

Left = dict[str, Any]
"""What a step leaves: results, gradients and buffers as arrays or ``None``, by name."""


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
    row = _compared(make, expected, split="same bits")
    if row["outcome"] == "bits" and not all_alike(_taken(make, _aot_eager, times=AGAIN)):
        return {"outcome": "repeats"}
    if row["outcome"] != "same" and row.get("fused"):
        row["whole"] = _compared(make, expected, split="as traced")
    if row["outcome"] in ("refused", "untyped"):
        row["without_sample"] = _compared(make, expected, split="same bits", sampled=False)
    return row


def _compared(make: Make, expected: list[Left], *, split: str, sampled: bool = True) -> Row:
    """The row of a model within its least budget.

    ``planned`` is ``"whole"``, ``"regions"`` or ``"unplanned"``, and ``used`` the share of the
    budget that the last step took.
    """
    compiled: list[Any] = []
    peaks: list[int] = []

    def within(model: Plain) -> Callable[..., Any]:
        sample = fxremat.Sample(tuple(model.given), {}) if sampled else None
        loss = "own" if model.has_loss else None
        compiled.append(fxremat.compile(model, sample, "min", loss=loss, **SPLITS[split]))
        return compiled[0]

    with warnings.catch_warnings(record=True) as caught:
        try:
            (found,) = _taken(make, within, times=1, peaks=peaks)
        except Exception as error:
            frames = traceback.extract_tb(error.__traceback__)[-3:]
            where = [f"{Path(f.filename).name}:{f.lineno} {f.name}" for f in frames]
            typed = isinstance(error, FxrematError)
            return {"outcome": "refused" if typed else "untyped", **failure(error), "where": where}
    differs = difference(expected, found)
    row: Row = {"outcome": "bits" if differs else "same", **_planned(compiled[0], peaks)}
    if differs:
        row["differs"] = differs
    kinds = (BudgetWarning, GraphBreakWarning)
    given = [each for each in caught if issubclass(each.category, kinds)]
    if given:
        row["warnings"] = [f"{w.category.__name__}: {w.message}"[:_KEPT] for w in given]
    fused = _fused(compiled[0])
    return {**row, "fused": fused} if fused else row


def _planned(compiled: Any, peaks: list[int]) -> Row:
    """How a model was planned, and what its last step took of its budget."""
    training = compiled._training
    regions = "regions" if training.graphs else "unplanned"
    row: Row = {"planned": regions if training.regions.several else "whole"}
    budget_bytes = training.loop.budget.nbytes
    if budget_bytes:
        row |= {"peak_bytes": peaks[-1], "budget_bytes": budget_bytes}
    return row


def _fused(compiled: Any) -> list[str]:
    """What is in parts."""
    try:
        plan = compiled.plan
    except PlanError:
        return []
    plans = [region.plan for region in getattr(plan, "regions", ())] or [plan]
    return [str(each)[:120] for each in plans for each in getattr(each, "fused", ())]


def _aot_eager(model: Plain) -> Callable[..., Any]:
    compiled: Any = torch.compile(model, backend="aot_eager")
    return compiled


def _taken(
    make: Make,
    compile: Callable[[Plain], Callable[..., Any]],
    *,
    times: int,
    peaks: list[int] | None = None,
) -> list[list[Left]]:
    """What each step of a fresh model leaves, so many times from the same state.

    The bytes that the last step holds at most are added to ``peaks``.
    """
    torch._dynamo.reset()
    gc.collect()
    model = make()
    before = {name: buffer.detach().clone() for name, buffer in model.named_buffers()}
    with warnings.catch_warnings(), torch.random.fork_rng():
        warnings.simplefilter("ignore" if peaks is None else "always")
        torch.manual_seed(0)  # as the first step's: a lazy module draws its numbers in either
        call = compile(model)
        lefts = []
        for _ in range(times):
            for name, buffer in model.named_buffers():
                if name in before:  # those of a lazy module are made by its first call
                    buffer.data.copy_(before[name])
            lefts.append([_step(model, call, number) for number in range(STEPS)])
        if peaks is not None:
            step = functools.partial(_train, model, call)
            peaks.append(peak_of(step) + _resident_bytes(model))
    return lefts


def _train(model: Plain, call: Callable[..., Any]) -> Any:
    """Take a step, and return its outputs and its loss."""
    outputs = call(*model.given)
    loss = model.loss_of(outputs)
    loss.backward()
    return outputs, loss


def _resident_bytes(model: Plain) -> int:
    """Bytes of the parameters, the buffers and the arguments."""
    tensors = [*model.parameters(), *model.buffers(), *model.given]
    dense = [x for x in tensors if x.layout is torch.strided]
    storages = {x.untyped_storage()._cdata: x.untyped_storage().nbytes() for x in dense}
    return sum(storages.values())


def _step(model: Plain, call: Callable[..., Any], seed: int) -> Left:
    torch.manual_seed(seed)
    outputs, loss = _train(model, call)
    left: Left = {"loss": aside(loss)}
    results = tensors_of(outputs)[1 if model.has_loss else 0 :]
    left |= {f"result {n}": aside(y) for n, y in enumerate(results)}
    given = {f"argument {n}": x for n, x in enumerate(model.given) if x.requires_grad}
    for name, leaf in (*model.named_parameters(), *given.items()):
        left[f"grad {name}"] = None if leaf.grad is None else aside(leaf.grad)
    left |= {f"buffer {n}": aside(b) for n, b in model.named_buffers()}
    for leaf in (*model.parameters(), *model.given):
        leaf.grad = None
    return left


def aside(tensor: Tensor) -> Any:
    """A dense copy as an array of numpy: a budget would have to hold a tensor."""
    tensor = tensor.detach()
    dense = tensor if tensor.layout is torch.strided else tensor.to_dense()
    exact = {torch.bfloat16: torch.float32, torch.complex32: torch.complex64}
    dense = dense.resolve_conj().resolve_neg().to(exact.get(dense.dtype, dense.dtype))
    return dense.numpy(force=True).copy()


def all_alike(runs: list[list[Left]]) -> bool:
    """Whether all runs left the same bits."""
    return not any(difference(runs[0], run) for run in runs[1:])


def difference(expected: list[Left], found: list[Left]) -> str | None:
    """The first difference, but for which NaN a NaN is."""
    pairs = enumerate(zip(expected, found, strict=True))
    for step, (one, other) in pairs:
        given = first_difference(_alike(other), _alike(one))
        if given:
            return f"step {step}, {given}"
    return None


def _alike(left: Left) -> Left:
    """All NaNs as one."""

    def one(array: Any) -> Tensor | None:
        if array is None:
            return None
        x = torch.from_numpy(array)
        x = torch.view_as_real(x) if x.is_complex() else x
        return torch.where(x.isnan(), torch.nan, x) if x.is_floating_point() else x

    return {name: one(array) for name, array in left.items()}
