"""A short training of one subject: every bit that it leaves behind, and its measured peak."""

from __future__ import annotations

import functools
import gc
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

import fxremat
from tests.loops.job import digest
from tests.loops.memory import recording, sizes_known

TEACHING, MEASURED = 4, 3
"""Steps that fxremat may learn from, and those after them that must keep to the budget."""

SMALLEST_BLOCK_BYTES = 512
"""By so much a step may exceed its budget without a warning."""

BUDGETS = (1.0, 0.6, "min")


def _squares(output: Any) -> Tensor:
    return output.float().square().mean()


def _adamw(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-3)


@dataclass(frozen=True)
class Subject:
    """What is trained.

    Attributes:
        build: makes the model, with the same weights each time.
        batch: the arguments of a call, by the number of the step.
        loss: computes the loss from the model's output; ``None``: that is the loss.
        optimizer: makes the optimizer of the parameters that are trained.
        context: entered around each forward.
    """

    build: Callable[[], nn.Module]
    batch: Callable[[int], tuple[Any, ...]]
    loss: Callable[[Any], Tensor] | None = _squares
    optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer] = _adamw
    context: Callable[[], AbstractContextManager[Any]] = nullcontext


@dataclass(frozen=True)
class Trained:
    """What a training took and left behind.

    Attributes:
        bits: digests of losses and gradients of each step, and of all tensors at the end.
        peak_bytes: the most bytes that were allocated between the start of a forward and the
            end of its backward, over the measured steps.
        budget_bytes: the budget; ``None`` if nothing was planned.
        planned: whether a plan was followed.
        warned: what was warned of in the measured steps.
        learned: what was warned of before them.
    """

    bits: dict[str, str]
    peak_bytes: int
    budget_bytes: int | None
    planned: bool
    warned: tuple[str, ...]
    learned: tuple[str, ...]


def dense_parts(name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Yield the dense tensors that a tensor consists of, by name."""
    if tensor.layout is torch.sparse_coo:
        yield from ((f"{name}.indices", tensor._indices()), (f"{name}.values", tensor._values()))
        return
    inner = getattr(tensor, "__tensor_flatten__", None)
    if inner is None:
        yield name, tensor.detach()
        return
    for attribute in inner()[0]:
        yield from dense_parts(f"{name}.{attribute}", getattr(tensor, attribute))


def digests(named: dict[str, Any]) -> dict[str, str]:
    """Return a digest of every tensor among nested values, by name."""
    found = {}
    for name, value in named.items():
        for index, leaf in enumerate(tree_leaves(value)):
            if isinstance(leaf, Tensor):
                for part, tensor in dense_parts(f"{name}[{index}]", leaf):
                    found[part] = digest(tensor.contiguous())
    return found


def _gradients(model: nn.Module) -> dict[str, Any]:
    named = model.named_parameters()
    return {f"gradient {name}": p.grad for name, p in named if p.grad is not None}


class _Training:
    """A model, its compiled form and its optimizer, which :meth:`drop` lets go of."""

    def __init__(self, subject: Subject, compile: Callable[..., Any]) -> None:
        self.subject = subject
        self.model: Any = subject.build().train()
        self.trained = [p for p in self.model.parameters() if p.requires_grad]
        self.optimizer: Any = subject.optimizer(self.trained)
        with subject.context():
            self.call = compile(
                self.model,
                fxremat.Sample(subject.batch(0), {}),
                optimizer=self.optimizer,
                loss=subject.loss or "own",
            )
        self.bits: dict[str, str] = {}

    def step(self, number: int, mark: Callable[[str], None]) -> None:
        args = self.subject.batch(number)
        torch.manual_seed(number)
        mark(f"begin {number}")
        with self.subject.context():
            loss = self.call(*args)
            if self.subject.loss is not None:
                loss = self.subject.loss(loss)
        loss.backward()
        mark(f"end {number}")
        found = digests({"loss": loss, **_gradients(self.model)})
        self.bits |= {f"step {number}: {name}": bits for name, bits in found.items()}
        self.optimizer.step()
        self.optimizer.zero_grad()

    def finish(self) -> tuple[Any, ...]:
        """Return all figures of the plans, and let go of everything."""
        self.bits |= digests(dict(self.model.named_parameters()))
        self.bits |= digests(dict(self.model.named_buffers()))
        states = enumerate(self.optimizer.state.values())
        self.bits |= digests({f"state {number}": state for number, state in states})
        plans = self.call.plans if isinstance(self.call, fxremat.CompiledModule) else []
        figures = (
            max((plan.budget_bytes for plan in plans), default=None),
            bool(plans),
        )
        del self.model, self.trained, self.optimizer, self.call
        torch._dynamo.reset()
        gc.collect()
        return figures


def train(subject: Subject, compile: Callable[..., Any]) -> Trained:
    """Train for some steps and measure the last ones.

    ``compile`` is given the model and a sample, and the optimizer and the loss by name.
    """
    torch._dynamo.reset()
    gc.collect()
    with sizes_known():
        with warnings.catch_warnings(record=True) as learned:
            warnings.simplefilter("always")
            training = _Training(subject, compile)
            for number in range(TEACHING):
                training.step(number, lambda _name: None)
        gc.collect()
        with recording() as memory, warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            for number in range(TEACHING, TEACHING + MEASURED):
                training.step(number, memory.mark)
            figures = training.finish()
    held = memory.held_at_start()
    peak = max(
        memory.peak(f"begin {n}", f"end {n}", held_bytes=held)[0]
        for n in range(TEACHING, TEACHING + MEASURED)
    )
    return Trained(training.bits, peak, *figures, _own(warned), _own(learned))


def _own(found: list[warnings.WarningMessage]) -> tuple[str, ...]:
    """Return what fxremat warned of."""
    kinds = fxremat.BudgetWarning, fxremat.GraphBreakWarning
    own = (w for w in found if issubclass(w.category, kinds))
    return tuple(f"{w.category.__name__}: {w.message}" for w in own)


@functools.cache
def reference(build: Callable[[], Subject]) -> Trained:
    """Train a subject as ``aot_eager`` does; once a process."""
    return train(build(), by_torch)


def check(
    build: Callable[[], Subject],
    budget: Any,
    *,
    learns: bool = False,
    saves: bool = True,
    uncounted_bytes: int = 0,
) -> Trained:
    """Train a subject within ``budget``: planned, with the same bits, and without a warning.

    Warnings of what an optimizer's step allocates are allowed: no plan changes that.

    Args:
        build: makes the subject.
        budget: the budget.
        learns: whether the first steps may warn.
        saves: whether a smaller budget than the whole needs less than ``aot_eager``.
        uncounted_bytes: bytes that the model holds where only its library finds them.
    """
    expected, found = reference(build), train(build(), within(budget))
    different = [name for name, bits in expected.bits.items() if found.bits.get(name) != bits]
    assert not different and found.bits.keys() == expected.bits.keys(), different
    assert found.planned and found.budget_bytes is not None
    assert found.peak_bytes <= found.budget_bytes + SMALLEST_BLOCK_BYTES + uncounted_bytes
    warned = found.warned if learns else found.learned + found.warned
    of_plans = [text for text in warned if not text.startswith("BudgetWarning: a step of")]
    assert not of_plans, of_plans
    if saves and budget != 1.0:
        assert found.peak_bytes < expected.peak_bytes
    return found


def by_torch(model: nn.Module, _sample: Any, **_given: Any) -> Any:
    """Compile as the reference: the captured graph, and nothing recomputed."""
    return torch.compile(model, backend="aot_eager")


def within(budget: Any) -> Callable[..., Any]:
    """Return what compiles a model within ``budget``."""

    def compile(model: nn.Module, sample: Any, **given: Any) -> Any:
        return fxremat.compile(model, sample, budget, **given)

    return compile
