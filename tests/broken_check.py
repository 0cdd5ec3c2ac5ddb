"""Whether a program that breaks the graph trains within a budget as it does without one.

A step draws from generators that were seeded for it. What it leaves is compared with what the
program leaves under ``aot_eager``, to the last bit.

    python -m tests.broken_check SEED [BUDGET]    print a program and check it
    python -m tests.broken_check --range A B      a line for each seed and budget
    python -m tests.broken_check --reference A B  programs alone: aot_eager beside eager

A budget is a share of eager's peak, a number of bytes above 1, or ``min``.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import logging
import os
import random
import signal
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

import fxremat
from fxremat.costs.measured.measure import device_of, peak_of, resident_bytes
from fxremat.errors import BudgetError, BudgetWarning, CaptureError
from tests.broken_programs import Program, loss_of, program
from tests.models.bits import bitwise_equal, first_difference

BUDGETS: tuple[float | str, ...] = (0.9, 0.6, "min")
"""Shares of eager's peak, and the least."""

LEARNED = 4
"""Steps after which the budget holds, and none tells of more, where all are alike."""

KINDS = 4
"""Of data and draws where they are not: a step of each kind is captured, and then two watched."""

MEASURED = 3
"""Steps after those."""

Budget = float | int | str
Call = Callable[[Tensor], Any]


@dataclass
class State:
    """All that a step, or compiling, may change."""

    gradients: dict[str, Tensor | None]
    parameters: dict[str, Tensor]
    buffers: dict[str, Tensor]
    generators: dict[str, Any]
    calls: int
    log: list[float]
    told: dict[str, list[float]]
    sink: list[str]
    sample: Tensor

    @staticmethod
    def of(model: Program, sample: Tensor) -> State:
        named = dict(model.named_parameters())
        grads = {name: p.grad for name, p in named.items()}
        told = {name: getattr(m, "told", []) for name, m in model.named_modules()}
        _, keys, place, *rest = np.random.get_state()
        return State(
            {name: g if g is None else g.clone() for name, g in grads.items()},
            {name: p.detach().clone() for name, p in named.items()},
            {name: b.clone() for name, b in model.named_buffers()},
            {
                "python": random.getstate(),
                "numpy": [keys.tolist(), place, *rest],
                "torch": torch.get_rng_state(),
                "own": model.generator.get_state(),
            },
            model.calls,
            list(model.log),
            {name: list(found) for name, found in told.items()},
            list(model.sink.texts),
            sample.clone(),
        )

    def put_back(self, model: Program, sample: Tensor) -> None:
        """Make a program what it was, so that steps are judged apart from compiling."""
        with torch.no_grad():
            for name, found in (*model.named_parameters(), *model.named_buffers()):
                found.copy_((self.parameters | self.buffers)[name])
            sample.copy_(self.sample)
        model.generator.set_state(self.generators["own"])
        model.calls, model.log[:], model.sink.texts[:] = self.calls, self.log, self.sink
        for name, module in model.named_modules():
            if hasattr(module, "told"):
                module.told[:] = self.told[name]


@dataclass
class Ran:
    """Steps of a program.

    Attributes:
        states: after each.
        peaks_bytes: of the last three.
        warned: of budgets, with the number of the step.
        error: that ended one.
    """

    states: list[State] = field(default_factory=list)
    peaks_bytes: list[int] = field(default_factory=list)
    warned: list[tuple[int, str]] = field(default_factory=list)
    error: Exception | None = None


@dataclass(frozen=True)
class Truth:
    """What a program does without a budget.

    Attributes:
        ran: its steps, under ``backend``.
        backend: ``"eager"`` where ``aot_eager`` cannot run it.
        graphs: that may have a backward.
        peak_bytes: of eager.
        differs: where ``aot_eager`` leaves other bits than eager does.
    """

    ran: Ran
    backend: str
    graphs: int
    peak_bytes: int
    differs: str | None


def varies(seed: int) -> bool:
    """Whether the steps of a program have data and draws of their own: one program in four."""
    return seed % 4 == 3


def learned(seed: int) -> int:
    """Steps after which the budget holds."""
    return 3 * KINDS if varies(seed) else LEARNED


def refused_until(seed: int) -> int:
    """The step by which a budget is refused, if at all: the next one of its kind."""
    return learned(seed) + (KINDS if varies(seed) else 1)


def run(seed: int, model: Program, call: Call, sample: Tensor) -> Ran:
    """Steps of a program, or so many as it takes until one raises."""
    ran = Ran()
    for index in range(learned(seed) + MEASURED):
        # Measured steps do what others did: nothing can be planned under a profiler.
        number = index % KINDS if varies(seed) else 0
        x = sample.clone()
        _seed_all(number)
        model.generator.manual_seed(number)
        if varies(seed):
            x += 0.5 * torch.randn(x.shape)
        model.zero_grad(set_to_none=True)
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            try:
                _step(ran, model, call, x, watched=index >= learned(seed))
            except Exception as error:
                ran.error = error.with_traceback(None)
                break
        found = (str(w.message) for w in told if issubclass(w.category, BudgetWarning))
        ran.warned += [(index, text) for text in found]
        ran.states.append(State.of(model, x))
    model.zero_grad(set_to_none=True)
    return ran


def _step(ran: Ran, model: Program, call: Call, x: Tensor, *, watched: bool) -> None:
    def step() -> None:
        loss_of(call(x)).backward()

    if not watched:
        step()
        return
    # As fxremat.measure_step, which runs a step twice.
    there_bytes = resident_bytes(model, step)
    ran.peaks_bytes.append(peak_of(step, device=device_of(model), resident_bytes=there_bytes))


def _seed_all(number: int) -> None:
    random.seed(number)
    np.random.seed(number)
    torch.manual_seed(number)


@contextlib.contextmanager
def anew() -> Iterator[None]:
    """Nothing is compiled before and after, and generators end as they began."""
    before = random.getstate(), np.random.get_state()
    torch._dynamo.reset()
    try:
        with torch.random.fork_rng(devices=[]):
            yield
    finally:
        random.setstate(before[0])
        np.random.set_state(before[1])
        torch._dynamo.reset()
        gc.collect()


@functools.lru_cache(maxsize=1)
def truth(seed: int) -> Truth:
    """What a program does, eager and under ``aot_eager``."""
    with anew():
        model, (sample,) = program(seed)
        eager = run(seed, model, model, sample)
    if eager.error is not None:
        raise eager.error
    graphs = 0

    def counting(module: Any, inputs: Sequence[Any], **options: Any) -> Any:
        nonlocal graphs
        trained = any(isinstance(t, Tensor) and t.requires_grad for t in inputs)
        graphs += trained and torch.is_grad_enabled()
        return torch._dynamo.lookup_backend("aot_eager")(module, inputs, **options)

    # Else what is captured often enough runs as it is.
    unlimited = {"recompile_limit": 256, "accumulated_recompile_limit": 4096}
    with anew(), torch._dynamo.config.patch(unlimited):
        model, (sample,) = program(seed)
        found = run(seed, model, torch.compile(model, backend=counting), sample)
    peak_bytes = max(eager.peaks_bytes)
    if found.error is not None:
        return Truth(eager, "eager", graphs, peak_bytes, repr(found.error))
    return Truth(
        found, "aot_eager", graphs, peak_bytes, first_difference(found.states, eager.states)
    )


@dataclass
class Check:
    """Of a program and a budget.

    Attributes:
        failures: what does not hold; none where all does.
        notes: what else was found.
    """

    failures: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def check(seed: int, budget: Budget) -> Check:
    """Hold fxremat to its promise on a program.

    Args:
        seed: of the program.
        budget: a share of eager's peak, bytes or ``"min"``.
    """
    known, found = truth(seed), Check()
    given = int(budget * known.peak_bytes) if isinstance(budget, float) else budget
    least = _attempt(found, seed, given, known)
    if least is None:
        return found
    found.notes.append(f"least {least} = {least / known.peak_bytes:.2f} of eager")
    if isinstance(given, str):
        found.failures.append(f"budget {given!r} is refused: the least is {least} bytes")
    elif least <= given:
        found.failures.append(f"refused: {given} bytes, of which the least is {least}")
    else:
        _hold_least(found, seed, least, known)
    return found


def _hold_least(found: Check, seed: int, least: int, known: Truth) -> None:
    """A budget that a refusal told holds; other data may tell of more, so often as there are."""
    for _ in range(KINDS if varies(seed) else 1):
        again = Check()
        more = _attempt(again, seed, least, known)
        found.notes += [f"with the least: {text}" for text in again.notes]
        if more is None or more <= least:
            break
        least = more
    new = (text for text in again.failures if text not in found.failures)
    found.failures += [f"with the least: {text}" for text in new]
    if more is not None:
        found.failures.append(f"the least is refused: then it is {more} bytes")


def _attempt(found: Check, seed: int, budget: int | str, known: Truth) -> int | None:
    """One compilation and its steps; the least budget where that one is refused."""
    with anew():
        model, (sample,) = program(seed)
        try:
            return _held(found, seed, budget, known, model, sample)
        except Exception as error:  # of compiling
            return _refused(found, error, known, "compile")
        finally:
            model.forget()


def _held(
    found: Check, seed: int, budget: int | str, known: Truth, model: Program, sample: Tensor
) -> int | None:
    fail = found.failures.append
    _seed_all(123)
    before = State.of(model, sample)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            call = fxremat.compile(model, sample, budget, strict=True)
    finally:
        after = State.of(model, sample)
        if not bitwise_equal(before, after):
            fail(f"compile changed {first_difference(before, after)}")
            before.put_back(model, sample)
    ran = run(seed, model, call, sample)
    for index, (own, expected) in enumerate(zip(ran.states, known.ran.states, strict=False)):
        if not bitwise_equal(own, expected):
            fail(f"step {index + 1} differs: {first_difference(own, expected)}")
            break
    for index, text in ran.warned:
        if index >= learned(seed):
            fail(f"step {index + 1} warned: {text}")
    if ran.error is not None:
        number = len(ran.states) + 1
        if isinstance(ran.error, BudgetError) and number > refused_until(seed):
            fail(f"step {number} is refused, later than step {refused_until(seed)}")
        return _refused(found, ran.error, known, f"step {number}")
    bound = budget if isinstance(budget, int) else call.plan.budget_bytes
    peaks = [f"{peak / known.peak_bytes:.3f}" for peak in ran.peaks_bytes]
    shares = f"{', '.join(peaks)} of eager, budget {bound / known.peak_bytes:.3f}"
    found.notes.append(f"peaks {shares}")
    if max(ran.peaks_bytes) > bound:
        fail(f"peaks {shares}: {max(ran.peaks_bytes) - bound} bytes more than {bound}")
    return None


def _refused(found: Check, error: Exception, known: Truth, where: str) -> int | None:
    found.notes.append(f"{where}: {type(error).__name__}: {error}")
    if isinstance(error, BudgetError) and error.least_budget_bytes is not None:
        return error.least_budget_bytes
    if not (isinstance(error, CaptureError) and not known.graphs):
        found.failures.append(f"{where} raised {type(error).__name__}: {error}")
    return None


MOST_S = 600
"""Of one check."""


def main(words: Sequence[str]) -> None:
    """What the shell asked for: see above."""
    logging.getLogger("torch._dynamo").setLevel(logging.ERROR)  # it tells of breaks
    if words and words[0] in ("--range", "--reference"):
        one = _range_line if words[0] == "--range" else _reference_line
        for seed in range(int(words[1]), int(words[2])):
            one(seed)
        return
    seed = int(words[0])
    model, (sample,) = program(seed)
    print(model.source)
    known = truth(seed)
    print(
        f"{tuple(sample.shape)}, new data each step: {varies(seed)}, {known.graphs} graphs, "
        f"eager's peak {known.peak_bytes} bytes\n"
        f"beside {known.backend}; eager differs: {known.differs}"
    )
    for budget in [_read(word) for word in words[1:]] or BUDGETS:
        begin = time.perf_counter()
        found = check(seed, budget)
        print(f"\nbudget {budget}: {time.perf_counter() - begin:.1f} s")
        for text in found.notes:
            print(f"  {text}")
        for text in found.failures:
            print(f"  FAILED {text}")


def _read(word: str) -> Budget:
    if word == "min":
        return word
    return float(word) if float(word) <= 1 else int(word)


def _range_line(seed: int) -> None:
    """Lines of one program, whatever happens."""
    for budget in BUDGETS:
        begin = time.perf_counter()
        signal.signal(signal.SIGALRM, _too_long)
        signal.alarm(MOST_S)
        try:
            failures = check(seed, budget).failures
        except Exception as error:
            failures = [f"the check raised {type(error).__name__}: {error}"]
        finally:
            signal.alarm(0)
        told = "; ".join(" ".join(text.split())[:240] for text in failures) or "ok"
        print(f"{seed} {budget} {time.perf_counter() - begin:.1f}s {told}", flush=True)


def _too_long(*_: object) -> None:
    raise TimeoutError(f"more than {MOST_S} s")


def _reference_line(seed: int) -> None:
    """Whether a program runs, comes to the same under ``aot_eager``, and has gradients."""
    begin = time.perf_counter()
    known = truth(seed)
    gradients = known.ran.states[-1].gradients.values()
    trained = sum(gradient is not None for gradient in gradients)
    model_bytes = sum(p.nbytes for p in known.ran.states[-1].parameters.values())
    print(
        f"{seed} {time.perf_counter() - begin:.1f}s {known.backend} graphs={known.graphs} "
        f"trained={trained}/{len(gradients)} peak={known.peak_bytes} model={model_bytes} "
        f"eager differs: {known.differs}",
        flush=True,
    )


if __name__ == "__main__":
    os.environ["FXREMAT_CACHE"] = "0"
    main(sys.argv[1:])
