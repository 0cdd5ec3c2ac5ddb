"""What a loop is given, and what it leaves behind."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, distributed, nn
from torch.optim import AdamW, Optimizer
from torch.utils._pytree import tree_leaves, tree_map

from tests.models.zoo import ZooModel

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

BATCHES = 6
"""Different batches; loops go through them again and again."""


@dataclass(frozen=True, slots=True)
class Batch:
    """Arguments of one call."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def through(self, model: Callable[..., Any]) -> Any:
        """What ``model`` makes of it."""
        return model(*self.args, **self.kwargs)


@dataclass
class Job:
    """A model to train.

    Attributes:
        entry: what it is.
        module: the model itself, whose parameters are trained.
        model: the same, compiled: what a loop calls.
        optimizer: of its parameters.
        compile: compiles another module in the same way.
        seen: digests of all that a loop has shown, in order.
        apart: tensors of others, which no budget of this model is for.
    """

    entry: ZooModel
    module: nn.Module
    model: Callable[..., Any]
    optimizer: Optimizer
    compile: Callable[[nn.Module], Callable[..., Any]]
    seen: list[str] = field(default_factory=list)
    apart: list[Callable[[], Iterable[Tensor]]] = field(default_factory=list)
    _arrays: list[Any] = field(default_factory=list)

    def __post_init__(self) -> None:
        # What waits to be loaded lies where the allocator does not count it.
        rank = distributed.get_rank() if distributed.is_initialized() else 0
        for number in range(BATCHES):
            self._arrays.append(tree_map(_array, self.entry.sample(BATCHES * rank + number)))

    def loss(self, outputs: Any) -> Tensor:
        """The loss of a call."""
        return self.entry.loss(outputs)

    def batches(self, *, halved: Callable[[int], bool] = lambda _: False) -> Iterator[Batch]:
        """Batches without end, each of fresh tensors; some with the first half of the rows."""
        number = 0
        while True:
            yield self._load(number % BATCHES, halved(number))
            number += 1

    def _load(self, index: int, half: bool) -> Batch:
        def load(value: object) -> object:
            if not isinstance(value, np.ndarray):
                return value
            return torch.from_numpy(value[: len(value) // 2] if half else value).clone()

        return Batch(*tree_map(load, self._arrays[index]))

    def trained(self) -> list[nn.Parameter]:
        """The parameters of the optimizer."""
        return [p for group in self.optimizer.param_groups for p in group["params"]]

    def show(self, *values: Tensor) -> None:
        """What has to be the same, bit for bit, whoever compiled the model."""
        self.seen += [digest(value) for value in values]

    def state(self) -> dict[str, Tensor]:
        """Parameters, buffers, gradients and state of the optimizer, by name."""
        found: dict[str, Tensor] = dict(self.module.named_buffers())
        for name, parameter in self.module.named_parameters():
            found[name] = parameter.detach()
            if parameter.grad is not None:
                found[f"{name}.grad"] = parameter.grad
        for index, state in enumerate(self.optimizer.state.values()):
            for path, leaf in enumerate(tree_leaves(state)):
                if isinstance(leaf, Tensor):
                    found[f"state {index}.{path}"] = leaf
        return found


def _array(value: object) -> object:
    return value.numpy().copy() if isinstance(value, Tensor) else value


def digest(value: Tensor) -> str:
    """Of shape, dtype and every bit; nothing is allocated that torch counts."""
    bits = value.detach().view(_INTEGERS[value.element_size()]).numpy()
    about = f"{tuple(value.shape)} {value.dtype} ".encode()
    return hashlib.blake2b(about + bits.tobytes(), digest_size=8).hexdigest()


Rounds = Callable[[Job], Iterator[None]]


def _adamw(parameters: list[nn.Parameter]) -> Optimizer:
    return AdamW(parameters, lr=1e-3)


def nothing(_model: nn.Module) -> int:
    return 0


def as_it_is(model: nn.Module) -> nn.Module:
    return model


@dataclass(frozen=True, slots=True)
class Loop:
    """A training loop.

    Attributes:
        name: for people.
        rounds: the loop; it yields after each iteration.
        begins: the first iteration that is what the loop is about: it and the next may teach.
        wrap: what becomes of the model before it is compiled.
        optimizer: made of the parameters.
        tells: of the optimizer and the loss those that ``fxremat.compile`` is told of.
        reserve_bytes: what the loop holds that no step knows of, from the model.
        assume: as ``fxremat.compile`` takes it; ``"strict"``: other networks are not counted.
        context: where model and loop run.
        whole: the model can be captured whole.
        distributed: a process group is needed.
        backend: through ``torch.compile(backend="fxremat")``.
        floats: the model's arguments must be floating-point tensors.
    """

    name: str
    rounds: Rounds
    begins: int = 0
    wrap: Callable[[nn.Module], nn.Module] = as_it_is
    optimizer: Callable[[list[nn.Parameter]], Optimizer] = _adamw
    tells: frozenset[str] = frozenset({"optimizer"})
    reserve_bytes: Callable[[nn.Module], int] = nothing
    assume: str = "usual"
    context: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext
    whole: bool = True
    distributed: bool = False
    backend: bool = False
    floats: bool = False

    def suits(self, entry: ZooModel) -> bool:
        """Whether a model can be trained so."""
        if not self.floats:
            return True
        leaves = [x for x in tree_leaves(entry.sample(0)) if isinstance(x, Tensor)]
        return all(x.is_floating_point() for x in leaves)


LOOPS: dict[str, Loop] = {}
"""All loops, by name."""


def loop(**settings: Any) -> Callable[[Rounds], Rounds]:
    """List a loop under its function's name."""

    def add(rounds: Rounds) -> Rounds:
        name = rounds.__name__
        LOOPS[name] = Loop(name, rounds, **settings)
        return rounds

    return add


def also(name: str, rounds: Rounds, **settings: Any) -> None:
    """List a loop once more, under other settings."""
    LOOPS[name] = Loop(name, rounds, **settings)
