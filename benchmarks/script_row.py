"""One script of ``benchmarks.scripts`` in one setting, in this process: what its row says."""

from __future__ import annotations

import gc
import importlib
import re
import time
import traceback
import warnings
import weakref
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_leaves

import fxremat
from benchmarks.allocated import Allocated
from benchmarks.common import keep_freed_memory, ratios
from benchmarks.rows import Row, failure
from fxremat.errors import BudgetError, BudgetWarning, GraphBreakWarning, PlanError

FAR_TOO_SMALL = "1 KiB"
"""A budget that no script can have: its error names the least."""

SETTLED = 5
"""Steps after which a plan's peak must be the measured one."""

WARM, ROUNDS = 8, 25
"""Steps before timing, and steps that are timed."""

TIMED_SHARE = 1.5
"""Share of eager's peak at which there is room for all."""

_KEPT_WORDS = 600


@dataclass(slots=True)
class Earlier:
    """Tensors that existed before the first network was compiled, and that no network trains with.

    On a CPU a budget leaves these out: a data set that was loaded, or a layer that was copied.

    Attributes:
        tensors: all that existed then.
        trained: the networks, their samples and optimizers.
    """

    tensors: list[weakref.ref[Tensor]] = field(default_factory=list)
    trained: list[Any] = field(default_factory=list)

    def wrap(self, model: nn.Module, sample: object, optimizers: object) -> None:
        """Note a network, and at the first one what exists."""
        if not self.trained:
            # By type: ``isinstance`` asks ``__class__``, and a lazy import raises or warns at that.
            found = (each for each in gc.get_objects() if issubclass(type(each), Tensor))
            self.tensors = [weakref.ref(each) for each in found]
        several = optimizers if isinstance(optimizers, (list, tuple)) else [optimizers]
        self.trained.append((weakref.ref(model), _storages(tree_leaves(sample)), several))

    def held_bytes(self) -> int:
        """Bytes of those that still exist."""
        own: dict[int, int] = {}
        for model, sample, optimizers in self.trained:
            network: Any = model()
            if network is not None:
                own |= _storages([*network.parameters(), *network.buffers()])
            states = [each.state for each in optimizers if isinstance(each, torch.optim.Optimizer)]
            own |= sample | _storages(tree_leaves([[*state.values()] for state in states]))
        alive = _storages([each() for each in self.tensors])
        return sum(nbytes for place, nbytes in alive.items() if place not in own)


def _storages(values: Iterable[object]) -> dict[int, int]:
    """The storages of the tensors among ``values``: where they are, and their bytes."""
    found = {}
    for each in values:
        if isinstance(each, Tensor) and not isinstance(each, FakeTensor):
            storage = each.untyped_storage()
            found[storage.data_ptr()] = storage.nbytes()
    return found


@dataclass(slots=True)
class StepMeter:
    """Peaks and CPU seconds of steps, from ``begin`` to ``end``.

    Attributes:
        allocated: the counter; ``None`` where only time is taken.
        base_bytes: held before the script began.
        earlier: what the script held before it compiled a network.
        peak_bytes, seconds: of the steps of this iteration.
        ended: steps so far.
    """

    allocated: Allocated | None
    base_bytes: int = 0
    peak_bytes: int = 0
    seconds: float = 0.0
    ended: int = 0
    earlier: Earlier = field(default_factory=Earlier)
    _began: float = 0.0
    _earlier_bytes: int = 0

    def __post_init__(self) -> None:
        if self.allocated is not None:
            self.base_bytes = self.allocated.now_bytes

    def begin(self) -> None:
        """A step begins."""
        if self.allocated is not None:
            self._earlier_bytes = self.earlier.held_bytes()
            self.allocated.mark()
        self._began = time.process_time()

    def end(self) -> None:
        """A step ends."""
        self.ended += 1
        self.seconds += time.process_time() - self._began
        if self.allocated is not None:
            base_bytes = self.base_bytes + self._earlier_bytes
            self.peak_bytes = max(self.peak_bytes, self.allocated.most_bytes - base_bytes)

    def taken(self) -> tuple[int, float]:
        """Peak and seconds of the iteration that ended; the next one begins."""
        found = self.peak_bytes, self.seconds
        self.peak_bytes, self.seconds = 0, 0.0
        return found


@dataclass(slots=True)
class Wrapping:
    """What a script calls ``wrap``.

    Attributes:
        budget: ``"eager"``, ``"aot_eager"`` or what ``fxremat.compile`` is given.
        earlier: what the script holds before.
        inside: ``compile`` is running.
        made: the compiled modules.
        compile_s: CPU seconds of ``compile``.
    """

    budget: str | int | float
    earlier: Earlier
    inside: bool = False
    made: list[weakref.ref[nn.Module]] = field(default_factory=list)
    compile_s: float = 0.0

    def __call__(self, model: nn.Module, sample: object, **keywords: Any) -> nn.Module:
        """Return the model as it is trained here."""
        self.earlier.wrap(model, sample, keywords.get("optimizer"))
        if self.budget == "eager":
            return model
        if self.budget == "aot_eager":
            compiled: Any = torch.compile(model, backend="aot_eager")
            return compiled
        self.inside, begin = True, time.process_time()
        found = fxremat.compile(model, sample, self.budget, **keywords)
        self.inside, self.compile_s = False, self.compile_s + time.process_time() - begin
        self.made.append(weakref.ref(found))
        return found

    def plans(self) -> list[Any]:
        """The plan that each compiled module followed last, where it has one."""
        found = []
        for made in self.made:
            module: Any = made()
            if module is not None:
                try:
                    found.append(module.plan)
                except PlanError:
                    found.append(None)
        return found

    def budget_bytes(self) -> int | None:
        """The most that a compiled module's budget means now; ``None``: it is not known yet."""
        if isinstance(self.budget, int):
            return self.budget
        modules: list[Any] = [made() for made in self.made]
        runners = [module._state.runner for module in modules if module is not None]
        budgets = [runner.training.loop.budget.nbytes for runner in runners if runner is not None]
        return max((nbytes for nbytes in budgets if nbytes is not None), default=None)


@dataclass(slots=True)
class Training:
    """A script that runs.

    Attributes:
        wrap, meter: as the script takes them.
        steps: its iterations.
        drawn: the state of random numbers, where another script runs between its iterations.
    """

    wrap: Wrapping
    meter: StepMeter
    steps: Iterator[Tensor]
    drawn: Tensor | None = None

    @staticmethod
    def of(name: str, budget: str | int | float, *, steps: int, allocated: Allocated | None) -> Any:
        """A script before its first line."""
        meter = StepMeter(allocated)
        wrap = Wrapping(budget, meter.earlier)
        return Training(wrap, meter, script(name).train(wrap, meter, steps))

    def step(self) -> str:
        """Take one iteration; its loss, exactly."""
        return next(self.steps).item().hex()

    def step_in_turn(self) -> float:
        """Take one iteration of several scripts that run by turns; its CPU seconds."""
        if self.drawn is not None:
            torch.set_rng_state(self.drawn)
        begin = time.process_time()
        self.step()
        taken = time.process_time() - begin
        self.drawn = torch.get_rng_state()
        return taken


def script(name: str) -> ModuleType:
    """The module of a script."""
    return importlib.import_module(f"benchmarks.scripts.{name}")


def calls_of(name: str) -> int | None:
    """Forwards of a step that each have a backward of their own; ``None``: other steps."""
    found: int | None = getattr(script(name), "CALLS", 1)
    return found


def networks_of(name: str) -> int:
    """Networks that a script compiles."""
    found: int = getattr(script(name), "NETWORKS", 1)
    return found


def measure(name: str, budget: str | int | float, *, steps: int) -> Row:
    """Losses, peaks and warnings of each step, or where the script died."""
    torch.set_num_threads(1)
    torch._dynamo.reset()
    gc.collect()
    row: Row = {"budget": budget, "losses": [], "peaks_bytes": [], "budgets_bytes": []}
    row |= {"predicted_bytes": [], "seconds": [], "warnings": [], "whole": None}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        training = Training.of(name, budget, steps=steps, allocated=Allocated())
        try:
            for number in range(steps):
                row["losses"].append(training.step())
                _note(row, training)
                _warned(row, caught, number)
        except Exception as error:
            _warned(row, caught, len(row["losses"]))
            row |= _died(error, training, step=len(row["losses"]))
    row["compile_s"] = training.wrap.compile_s
    row["named_bytes"] = named_bytes(row)
    return row


def named_bytes(row: Row) -> int | None:
    """The bytes that an error says are least; without one, that the last warning says would do."""
    if "failed" in row:
        found: int | None = row.get("least_budget_bytes")
        return found
    texts = [text for _, kind, text in row["warnings"] if kind == "BudgetWarning"]
    named = [match for text in texts for match in re.findall(r"budget of (\d+) suffices", text)]
    return int(named[-1]) if named else None


def _note(row: Row, training: Training) -> None:
    """Add a step's figures."""
    peak, seconds = training.meter.taken()
    row["peaks_bytes"].append(peak)
    row["seconds"].append(seconds)
    plans = training.wrap.plans()
    predicted = [plan.predicted_peak_bytes for plan in plans if plan is not None]
    row["budgets_bytes"].append(training.wrap.budget_bytes())
    row["predicted_bytes"].append(max(predicted, default=None))
    row["whole"] = bool(plans) and all(isinstance(plan, fxremat.Plan) for plan in plans)


def _warned(row: Row, caught: list[warnings.WarningMessage], step: int) -> None:
    """Add warnings that came since the last step."""
    for each in caught:
        if issubclass(each.category, (BudgetWarning, GraphBreakWarning)):
            kind = each.category.__name__
            row["warnings"].append([step, kind, str(each.message)[:_KEPT_WORDS]])
    caught.clear()


def _died(error: Exception, training: Training, *, step: int) -> Row:
    frames = traceback.extract_tb(error.__traceback__)[-5:]
    found: Row = {
        **failure(error),
        "message": str(error),
        "died_at": step,
        "in_compile": training.wrap.inside,
        "steps_ended": training.meter.ended,
        "where": [f"{Path(f.filename).name}:{f.lineno} {f.name}" for f in frames],
    }
    if isinstance(error, BudgetError):
        found["least_budget_bytes"] = error.least_budget_bytes
    return found


def timed(name: str, budget: str | int | float) -> Row:
    """CPU seconds of steps, turn by turn with ``aot_eager``'s, each after its own warm-up."""
    torch.set_num_threads(1)
    keep_freed_memory()
    torch._dynamo.reset()
    gc.collect()
    warnings.simplefilter("ignore")
    steps = WARM + ROUNDS + 1
    runs = {
        "aot_eager": Training.of(name, "aot_eager", steps=steps, allocated=None),
        "fxremat": Training.of(name, budget, steps=steps, allocated=None),
    }
    seconds: dict[str, list[float]] = {each: [] for each in runs}
    iterations: dict[str, list[float]] = {each: [] for each in runs}
    row: Row = {"budget": budget}
    try:
        for number in range(WARM + ROUNDS):
            for each in list(runs) if number % 2 else list(reversed(runs)):
                taken = runs[each].step_in_turn()
                _, in_step = runs[each].meter.taken()
                if number >= WARM:
                    seconds[each].append(in_step)
                    iterations[each].append(taken)
    except Exception as error:
        return row | _died(error, runs["fxremat"], step=number)
    row |= {"seconds": seconds, "iteration_s": iterations}
    for key, values in (("beside", seconds), ("iteration_beside", iterations)):
        spread = ratios(values, "fxremat", "aot_eager")
        row[key] = [spread.median, spread.low, spread.high]
    plans = [plan for plan in runs["fxremat"].wrap.plans() if isinstance(plan, fxremat.Plan)]
    calls = calls_of(name)
    if plans and calls:
        row["predicted_s"] = calls * sum(plan.predicted_s for plan in plans)
    return row
