"""One row of ``benchmarks/wild.py``: a model as it is, or within one budget, in its own process."""

from __future__ import annotations

import gc
import logging
import random
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

import fxremat
from benchmarks.common import interleave, peak_of, ratios
from benchmarks.rows import Row, failure
from benchmarks.wild_models.registry import Case, Wild
from fxremat.errors import BudgetError, BudgetWarning, GraphBreakWarning
from tests.models.bits import first_difference

STEPS = 8

MEASURED = 4
"""Of them, the last."""

SEED = 5

ROUNDS = 15

TIMED_SHARE = 1.5
"""The share of the peak at which steps are timed."""

_KEPT_WORDS = 400
"""Characters of each warning that are kept."""


def seed(number: int) -> None:
    """Of all that draws."""
    torch.manual_seed(number)
    random.seed(number)
    np.random.seed(number)


def bytes_of(tensors: Iterator[Tensor] | list[Tensor]) -> int:
    """Of the storages below tensors, each counted once."""
    storages = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}
    return sum(storages.values())


def resident_bytes(model: nn.Module, *others: object) -> int:
    """Parameters, buffers and tensors of the arguments."""
    held = [t for t in tree_leaves(others) if isinstance(t, Tensor)]
    return bytes_of([*model.parameters(), *model.buffers(), *held])


@dataclass(slots=True)
class Run:
    """A fresh model and its steps.

    Attributes:
        case: the model.
        call: what is called in its place.
        varied: each step has a seed of its own.
        left: gradients and buffers that each step left.
    """

    case: Case
    call: Callable[..., Any]
    varied: bool = False
    left: list[Any] = field(default_factory=list)

    def forget(self) -> None:
        """Gradients."""
        self.case.model.zero_grad(set_to_none=True)
        for leaf in tree_leaves((self.case.args, self.case.kwargs)):
            if isinstance(leaf, Tensor):
                leaf.grad = None

    def step(self, number: int) -> None:
        """One forward and backward."""
        seed(SEED + (number if self.varied else 0))
        case = self.case
        case.loss(self.call(*case.args, **case.kwargs)).backward()

    def take(self, steps: int = STEPS) -> list[int]:
        """Take steps; the peaks of the last of them, less what is resident."""
        peaks = []
        for number in range(steps):
            if number >= steps - MEASURED:
                peaks.append(peak_of(lambda number=number: self.step(number)))
            else:
                self.step(number)
            self.left.append(self._left())
            self.forget()
        return peaks

    def seconds(self) -> float:
        """Of one step."""
        begin = time.perf_counter()
        self.step(0)
        taken = time.perf_counter() - begin
        self.forget()
        return taken

    def gradients(self) -> dict[str, Tensor | None]:
        """Copies of them."""
        return {name: aside(p.grad) for name, p in self.case.model.named_parameters()}

    def _left(self) -> Any:
        return self.gradients(), {name: aside(b) for name, b in self.case.model.named_buffers()}


def aside(tensor: Tensor | None) -> Tensor | None:
    """A copy that torch's allocator does not count: what is watched must not see it."""
    if tensor is None:
        return None
    found = tensor.detach().cpu()
    if found.dtype == torch.bfloat16:
        return aside(found.view(torch.int16))
    return torch.from_numpy(found.numpy().copy())


def fresh(entry: Wild) -> Case:
    """The model anew; Dynamo has forgotten all."""
    torch._dynamo.reset()
    gc.collect()
    seed(0)
    return entry.make()


def confirm_bits() -> None:
    """Dynamo's settings as far as they would make captures of one model differ.

    Loggers do not break the graph, and nothing is left uncompiled for being captured often, as
    with fxremat.
    """
    names = ("debug", "info", "warn", "error", "exception", "critical", "log")
    methods = {m for name, m in vars(logging.Logger).items() if name.startswith(names)}
    config: Any = torch._dynamo.config
    config.ignore_logging_functions = methods
    config.recompile_limit = 256
    config.accumulated_recompile_limit = 4096


def compiled_otherwise(case: Case, backend: Any) -> Callable[..., Any]:
    """The model through ``torch.compile``, with a code object of its own at the top."""
    from fxremat import torch_compat

    own: Any = torch_compat.with_code_of_its_own(case.model)
    return torch.compile(own, backend=backend)


def as_it_is(entry: Wild, *, varied: bool) -> Row:
    """The eager peak, and in how many graphs ``torch.compile`` captures a step."""
    run = Run(case := fresh(entry), case.model, varied)
    confirm_bits()
    begin = time.perf_counter()
    peaks = run.take()
    resident = resident_bytes(case.model, case.args, case.kwargs)
    eager_s = (time.perf_counter() - begin) / STEPS
    twice = []
    for _ in range(2):
        run.step(0)
        twice.append(run.gradients())
        run.forget()
    row: Row = {
        "peak_bytes": resident + max(peaks),
        "resident_bytes": resident,
        "gradient_bytes": sum(p.nbytes for p in case.model.parameters() if p.requires_grad),
        "step_s": eager_s,
        "repeats": first_difference(*twice) is None,
    }
    return {**row, **_graphs(entry)}


def _graphs(entry: Wild) -> Row:
    """How Dynamo captures it: the kind of the row."""
    from torch._dynamo.utils import counters

    found: list[torch.fx.GraphModule] = []

    def counting(graph: torch.fx.GraphModule, _inputs: object) -> Any:
        found.append(graph)
        return graph.forward

    case = fresh(entry)
    counters.clear()
    run = Run(case, compiled_otherwise(case, counting))
    try:
        run.step(0)
    except Exception as error:
        return {"kind": "pieces", "graphs": len(found), "counting": failure(error)["failed"]}
    breaks = {" ".join(why.split())[:160]: n for why, n in counters["graph_break"].items()}
    whole = len(found) == 1 and not breaks
    return {
        "kind": "whole" if whole else "pieces",
        "graphs": len(found),
        "operations": sum(len(graph.graph.nodes) for graph in found),
        "breaks": breaks,
    }


def reference(entry: Wild, *, varied: bool) -> tuple[Run, Row]:
    """Steps through ``aot_eager``; those of eager where that fails."""
    case = fresh(entry)
    confirm_bits()
    run = Run(case, compiled_otherwise(case, "aot_eager"), varied)
    try:
        run.take()
    except Exception as error:
        run = Run(case := fresh(entry), case.model, varied)
        run.take()
        return run, {"reference": "eager", "aot_eager": failure(error)["failed"]}
    return run, {"reference": "aot_eager"}


def within(entry: Wild, share: str, eager_bytes: int, *, varied: bool) -> Row:
    """The model within a share of its eager peak, or the least budget."""
    expected, row = reference(entry, varied=varied)
    budget: int | str = "min" if share == "min" else int(float(share) * eager_bytes)
    timed = share != "min" and float(share) == TIMED_SHARE
    found = _attempt(entry, budget, expected.left, varied=varied, timed=timed)
    row |= found
    least = found.get("least_budget_bytes")
    if "refused" in found and least is not None:
        row["least"] = _attempt(entry, least, expected.left, varied=varied, timed=False)
    return row


@contextmanager
def told(row: Row) -> Iterator[None]:
    """Count warnings and note errors."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            yield
        except BudgetError as error:
            row |= {"refused": str(error), "least_budget_bytes": error.least_budget_bytes}
        except Exception as error:
            row |= failure(error)
            frames = traceback.extract_tb(error.__traceback__)[-4:]
            row["where"] = [f"{f.filename}:{f.lineno} {f.name}" for f in frames]
    for kind, name in ((BudgetWarning, "budget_warnings"), (GraphBreakWarning, "break_warnings")):
        said = [str(w.message)[:_KEPT_WORDS] for w in caught if issubclass(w.category, kind)]
        row[name] = said


def _attempt(
    entry: Wild, budget: int | str, expected: list[Any], *, varied: bool, timed: bool
) -> Row:
    """One compilation and its steps."""
    case = fresh(entry)
    confirm_bits()
    row: Row = {"budget": budget}
    with told(row):
        before = _state(case)
        seed(SEED)
        generators = _generators()
        begin = time.perf_counter()
        call = fxremat.compile(case.model, fxremat.Sample(case.args, case.kwargs), budget)
        row["compile_s"] = time.perf_counter() - begin
        row["untouched"] = {
            "state": first_difference(before, _state(case)) is None,
            "generators": first_difference(generators, _generators()) is None,
        }
        run = Run(case, call, varied)
        begin = time.perf_counter()
        try:
            peaks = run.take()
        finally:
            row["steps_taken"] = len(run.left)
            row["steps_s"] = time.perf_counter() - begin
        nbytes = call._training.loop.budget.nbytes
        resident = resident_bytes(case.model, case.args, case.kwargs)
        differs = [first_difference(*pair) for pair in zip(run.left, expected, strict=True)]
        row |= {
            "budget_bytes": nbytes,
            "peaks_bytes": [resident + peak for peak in peaks],
            "used": (resident + max(peaks)) / nbytes,
            "same_bits": not any(differs),
            "differs": next((d for d in differs if d), None),
            "differing_steps": [n for n, d in enumerate(differs) if d],
            "plans": len(call.plans),
            "graphs": len(call._training.graphs),
        }
        if timed:
            row |= _timed(entry, run)
    return row


def _timed(entry: Wild, ours: Run) -> Row:
    """Step times beside ``aot_eager`` and eager, all of them alive."""
    runs = {"fxremat": ours}
    for name in ("eager", "aot_eager"):
        seed(0)
        case = entry.make()
        call = case.model if name == "eager" else compiled_otherwise(case, "aot_eager")
        runs[name] = run = Run(case, call)
        try:
            for _ in range(3):
                run.seconds()
        except Exception:
            del runs[name]
    ours.varied = False
    for _ in range(3):
        ours.seconds()
    gc.collect()
    seconds = interleave({name: run.seconds for name, run in runs.items()}, rounds=ROUNDS)
    row: Row = {"seconds": seconds}
    for base in ("aot_eager", "eager"):
        if base in runs:
            spread = ratios(seconds, "fxremat", base)
            row[f"beside_{base}"] = [spread.median, spread.low, spread.high]
    return row


def _state(case: Case) -> list[Any]:
    """What compiling must leave alone: arguments, buffers, parameters and gradients."""
    leaves = tree_leaves((case.args, case.kwargs))
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    tensors += [*case.model.buffers(), *case.model.parameters()]
    kept: list[Any] = [aside(t) for t in tensors]
    grads = [aside(t.grad) for t in tensors if t.is_leaf]
    return [kept, grads, [t.requires_grad for t in tensors]]


def _generators() -> list[Any]:
    name, keys, *rest = np.random.get_state()
    return [torch.get_rng_state(), repr(random.getstate()), name, keys.tolist(), *rest]


def faults_of(row: Row) -> list[str]:
    """What is not as promised; of bits nothing, where eager itself does not repeat its own."""
    if "failed" in row:
        return [row["failed"]]
    if "refused" in row:
        least = row.get("least")
        if least is None:
            return [f"refused, wants {row.get('least_budget_bytes')} B"]
        least = {"repeats": row.get("repeats", True), **least}
        return [f"at its least: {fault}" for fault in faults_of(least)]
    faults = []
    if row["used"] > 1:
        faults.append(f"{row['used']:.3f} of the budget")
    if not row["same_bits"] and row.get("repeats", True):
        faults.append(f"other bits than {row.get('reference', 'the reference')}: {row['differs']}")
    touched = [name for name, kept in row["untouched"].items() if not kept]
    return faults + [f"compile touched {name}" for name in touched]


def measure(entry: Wild, budget: str, eager_bytes: int, *, varied: bool) -> Row:
    """The row of a model: ``budget`` is ``eager``, a share of the eager peak, or ``min``."""
    import contextlib
    import os
    from pathlib import Path

    torch.set_num_threads(1)
    with Path(os.devnull).open("w") as nowhere, contextlib.redirect_stdout(nowhere):
        if entry.trainer is not None:
            return entry.trainer(budget, eager_bytes)
        if budget == "eager":
            return as_it_is(entry, varied=varied)
        return within(entry, budget, eager_bytes, varied=varied)
