"""One loop of one model within one budget: run, measured, and held against ``aot_eager``."""

from __future__ import annotations

import contextlib
import functools
import gc
import re
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import distributed, nn
from torch._dynamo.exc import BackendCompilerFailed
from torch._functorch import config as functorch_settings

import fxremat
from tests.loops import usual, wrapped  # noqa: F401 - list their loops
from tests.loops.job import LOOPS, Job, Loop, digest, nothing
from tests.loops.memory import recording, sizes_known, storage_bytes
from tests.loops.subjects import SUBJECTS

TEACHING, MEASURED = 2, 3
"""Iterations that may teach, and those after them that are held to the budget."""

TEACHING_REGIONS = 4
"""The same where a model is captured in pieces: captured, watched, and watched as planned."""

SETTLING = 2
"""Plans that the measured rounds may still make: one that was taught changes what the next find."""

TRIES = 6
"""Larger and larger budgets, as errors ask for them, before a loop counts as never content."""

Compile = Callable[[nn.Module, Any, dict[str, Any]], Callable[..., Any]]


@dataclass(frozen=True, slots=True)
class Ran:
    """What a loop took and left behind.

    Attributes:
        peak_bytes: most that was allocated in the measured iterations.
        held_bytes: allocated when they began: parameters, state of the optimizer and the like.
        peak_in: the operation that was running at the peak.
        seen: digests of what the loop showed, and of gradients after each iteration.
        state: digests of parameters, buffers, gradients and optimizer at the end.
        taught, warned: warnings of the iterations that may teach, and of the others.
        gradient_bytes: of all parameters that are trained.
        plans: how many there were before the measured iterations, and after; ``None``: of a
            module that does not tell.
    """

    peak_bytes: int
    held_bytes: int
    peak_in: str
    seen: tuple[str, ...]
    state: dict[str, str]
    taught: tuple[str, ...]
    warned: tuple[str, ...]
    gradient_bytes: int
    plans: tuple[int, int] | None

    def differs_from(self, other: Ran) -> str:
        """What is not bitwise the same; empty if all is."""
        if len(self.seen) != len(other.seen):
            return f"{len(self.seen)} values seen against {len(other.seen)}"
        for index, (mine, yours) in enumerate(zip(self.seen, other.seen, strict=True)):
            if mine != yours:
                return f"value {index} of {len(self.seen)} seen"
        if self.state.keys() != other.state.keys():
            return f"only one has {sorted(self.state.keys() ^ other.state.keys())}"
        return ", ".join(name for name in self.state if self.state[name] != other.state[name])


@dataclass
class _Run:
    """A loop that is being run; :meth:`drop` lets go of all of it."""

    loop: Loop
    job: Job
    rounds: Iterator[None]
    caught: list[list[str]] = field(default_factory=lambda: [[], []])

    def iterate(self, times: int, *, kind: int) -> None:
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            for _ in range(times):
                next(self.rounds)
                self.job.show(*(p.grad for p in self.job.trained() if p.grad is not None))
        self.caught[kind] += [f"{w.category.__name__}: {w.message}" for w in found]

    def drop(self) -> int:
        """Returns bytes of what was others'."""
        apart = storage_bytes(t for found in self.job.apart for t in found())
        self.rounds.close()  # type: ignore[attr-defined]
        del self.job, self.rounds
        torch._dynamo.reset()
        _collect()
        return apart


def run(loop: Loop, subject: str, compile: Compile, *, teaching: int = TEACHING) -> Ran:
    """Run ``loop`` on a model and measure it, once ``teaching`` iterations have run.

    Raises:
        BudgetError: of ``compile``, or of a call.
    """
    with _settings(loop), sizes_known():
        return _measured(_begin(loop, subject, compile), teaching)


def _begin(loop: Loop, subject: str, compile: Compile) -> _Run:
    entry = SUBJECTS[subject]
    module = loop.wrap(entry.build())
    optimizer = loop.optimizer(list(module.parameters()))
    told: dict[str, Any] = {"optimizer": optimizer, "loss": entry.loss}
    settings = {name: told[name] for name in sorted(loop.tells)}
    if loop.reserve_bytes(module):
        settings["reserve"] = loop.reserve_bytes(module)

    def prepared(model: nn.Module) -> Callable[..., Any]:
        with loop.context():
            return compile(
                model, fxremat.Sample(*entry.sample(0)), settings if model is module else {}
            )

    job = Job(entry, module, prepared(module), optimizer, prepared)
    torch.manual_seed(0)
    return _Run(loop, job, loop.rounds(job))


def _measured(running: _Run, teaching: int) -> Ran:
    with running.loop.context():
        running.iterate(running.loop.begins + teaching, kind=0)
        _collect()  # what an earlier error held is not of this loop
        before = _plans(running.job)
        with recording() as memory:
            memory.mark("begin")
            running.iterate(MEASURED, kind=1)
            memory.mark("end")
            after = _plans(running.job)
            found: dict[str, Any] = {
                "seen": tuple(running.job.seen),
                "state": {name: digest(value) for name, value in running.job.state().items()},
                "gradient_bytes": storage_bytes(running.job.trained()),
                "plans": None if before is None or after is None else (before, after),
            }
            apart = running.drop()
    held = memory.held_at_start() - apart
    peak, peak_in = memory.peak("begin", "end", held_bytes=held)
    taught, warned = (tuple(dict.fromkeys(found)) for found in running.caught)
    return Ran(peak, held, peak_in, taught=taught, warned=warned, **found)


def _collect() -> None:
    """Drop what only refers to itself, and what that held."""
    while gc.collect():
        pass


def _plans(job: Job) -> int | None:
    model = job.model
    return len(model.plans) if isinstance(model, fxremat.CompiledModule) else None


@contextlib.contextmanager
def _settings(loop: Loop) -> Iterator[None]:
    torch._dynamo.reset()
    deterministic = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    alone = loop.distributed and not distributed.is_initialized()
    if alone:
        distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        torch._dynamo.reset()
        if alone:
            distributed.destroy_process_group()
        torch.use_deterministic_algorithms(deterministic)


def reference(name: str, subject: str, *, regions: bool = False) -> Ran:
    """The loop through ``aot_eager``: nothing recomputed, nothing planned; run once a process.

    As many iterations as with ``regions``.
    """
    # It is told nothing, so loops that tell fxremat other things are one.
    untold = replace(LOOPS[name], name="", tells=frozenset(), reserve_bytes=nothing, backend=False)
    return _reference(untold, subject, TEACHING_REGIONS if regions else TEACHING)


@functools.cache
def _reference(loop: Loop, subject: str, teaching: int) -> Ran:
    def compile(model: nn.Module, _sample: object, _settings: object) -> Callable[..., Any]:
        return torch.compile(model, backend="aot_eager", fullgraph=loop.whole, dynamic=False)

    # Else the reference could not keep a graph after a backward that did not.
    with functorch_settings.patch(donated_buffer=False):
        return run(loop, subject, compile, teaching=teaching)


def planned(
    name: str, subject: str, budget: int, *, regions: bool = False, strict: bool = False
) -> Ran:
    """The loop through fxremat.

    Args:
        name: of the loop.
        subject: the model.
        budget: bytes.
        regions: each module of the model's is captured by itself.
        strict: errors are raised in a running job, too.
    """
    loop = LOOPS[name]

    def compile(model: nn.Module, sample: Any, settings: Any) -> Callable[..., Any]:
        if not loop.backend:
            if regions:
                inner = getattr(model, "module", model)
                settings = {**settings, "regions": [name for name, _ in inner.named_children()]}
            how = {"strict": strict, "assume": loop.assume, **settings}
            return fxremat.compile(model, sample, budget, **how)
        reserve = settings.pop("reserve", 0)
        if "optimizer" in settings:
            reserve += 2 * storage_bytes(model.parameters())  # two moments
        options = {"budget": budget, "reserve": reserve, "strict": strict}
        return torch.compile(model, backend="fxremat", fullgraph=loop.whole, options=options)

    return run(loop, subject, compile, teaching=TEACHING_REGIONS if regions else TEACHING)


@dataclass(frozen=True, slots=True)
class Cell:
    """A loop within a budget.

    Attributes:
        budget_bytes: what it had to keep to.
        ran: what it took; ``None``: it was refused.
        least_bytes: what a refusal asked for.
        reference: the same loop through ``aot_eager``.
    """

    budget_bytes: int
    ran: Ran | None
    least_bytes: int | None
    reference: Ran

    @property
    def over_bytes(self) -> int:
        """By how much the budget was passed."""
        return max(0, self.ran.peak_bytes - self.budget_bytes) if self.ran else 0

    @property
    def faults(self) -> list[str]:
        """What breaks the promise."""
        if self.ran is None:
            if self.least_bytes is None or self.least_bytes <= self.budget_bytes:
                return [f"refused, but told of {self.least_bytes} bytes as the least"]
            if self.reference.peak_bytes <= self.budget_bytes:
                return ["refused although the loop fits as it is"]
            return []
        found = []
        if self.over_bytes > self.warned_bytes:
            share = self.ran.peak_bytes / self.budget_bytes - 1
            found.append(f"{100 * share:.1f} % over, in {self.ran.peak_in}")
        difference = self.ran.differs_from(self.reference)
        if difference:
            found.append(f"differs: {difference}")
        if self.ran.plans is not None and self.ran.plans[0] + SETTLING < self.ran.plans[1]:
            found.append(f"planned anew: {self.ran.plans[1] - self.ran.plans[0]} times")
        known = set(self.reference.taught) | set(self.reference.warned)
        warned = (text for text in self.ran.warned if text not in known)
        found += [f"warned: {text}" for text in warned if not (self.over_bytes and _more(text))]
        return found

    @property
    def warned_bytes(self) -> int:
        """The most by which a warning says that the budget does not suffice.

        What the loop holds outside its model is warned of once, a step that is too large each time.
        """
        assert self.ran is not None
        outside = (text for text in self.ran.taught if "outside the model" in text)
        return max(map(_more, (*outside, *self.ran.warned)), default=0)


def _more(warning: str) -> int:
    """Bytes by which a warning says that a step exceeds its budget; 0: it says something else."""
    found = re.search(r"(\d+) (?:\([^)]*\) )?more than (?:the|its) budget", warning)
    return int(found[1]) if found and warning.startswith("BudgetWarning") else 0


def within(name: str, subject: str, share: float, *, regions: bool = False) -> Cell:
    """The loop within a share of what it takes as it is, or the plain one, if that is less."""
    compared = reference(name, subject, regions=regions)
    budget = int(share * min(compared.peak_bytes, reference("plain", subject).peak_bytes))
    try:
        return Cell(budget, planned(name, subject, budget, regions=regions), None, compared)
    except Exception as error:
        return Cell(budget, None, _refusal(error).least_budget_bytes, compared)


def _refusal(error: Exception) -> fxremat.BudgetError:
    """The budget error that ``error`` is, or that Dynamo tells of as a failure of its backend."""
    found = error.inner_exception if isinstance(error, BackendCompilerFailed) else error
    if isinstance(found, fxremat.BudgetError):
        return found
    raise error


def at_least(name: str, subject: str) -> Cell:
    """The loop within the least budget that errors ask for, from one byte on."""
    compared = reference(name, subject)
    budget = 1
    for _ in range(TRIES):
        try:
            return Cell(budget, planned(name, subject, budget, strict=True), None, compared)
        except Exception as error:
            least = _refusal(error).least_budget_bytes
            if least is None or least <= budget:
                return Cell(budget, None, least, compared)
            budget = least
    return Cell(budget, None, None, compared)
