"""Optimizers of a model: the state that they keep, and what their steps allocate."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from dataclasses import InitVar, dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from fxremat import torch_compat
from fxremat.graph.shortfall import excess_bytes, user_line, warn
from fxremat.passes.joint.graph import allocated_bytes
from fxremat.runtime.profile import MemoryProfile, Watcher
from fxremat.units import format_bytes

MOST_WATCHED = 2
"""Steps of an optimizer whose allocations are watched: the first one makes its state."""

LOOK_EVERY = 100
"""State is added up at every so-manieth step, and whenever the optimizer shows that it changed."""

FEW = 8
"""Entries of state that are added up at every step: LBFGS keeps a list that grows in one."""


@dataclass(slots=True)
class _Optimizer:
    """What is known of one optimizer.

    Attributes:
        steps: that it has made.
        shape: entries of state, parameters and groups that it had when its state was added up.
        nbytes: of its state.
        line: of the user's code that ran the step at which its state grew last.
        is_ours: it steps a parameter of the model.
    """

    steps: int = 0
    shape: tuple[int, ...] = ()
    nbytes: int = 0
    line: str = ""
    is_ours: bool = False


@dataclass(slots=True)
class Optimizers:
    """Optimizers that step parameters of a model: their state, and what a step allocates.

    Attributes:
        budget_bytes: asked for when a step was seen; ``None``: there is no budget yet.
        given: those that ``optimizer=`` names; a class stands for all of its instances. They are
            not kept alive; one that is gone counts as one that has not stepped.
        given_bytes: of the state that these keep.
        before_step: is called before each step: what a training step takes ends there.
        watcher: of what a step allocates. A step that raises ends with what is watched next, a
            forward or a profile of the user's.
        has_news: the state has changed since that was set to ``False``.
    """

    budget_bytes: Callable[[], int | None]
    given: InitVar[tuple[object, ...]] = ()
    given_bytes: int = 0
    before_step: Callable[[], None] = lambda: None
    watcher: Watcher = field(default_factory=Watcher)
    has_news: bool = False
    _known: weakref.WeakKeyDictionary[torch.optim.Optimizer, _Optimizer] = field(
        default_factory=weakref.WeakKeyDictionary
    )
    _given: tuple[Callable[[], object], ...] = ()
    _profiles: list[MemoryProfile] = field(default_factory=list)
    _model: Callable[[], nn.Module | None] = lambda: None
    _device: torch.device = field(default_factory=lambda: torch.device("cpu"))

    def __post_init__(self, given: tuple[object, ...]) -> None:
        self._given = tuple(map(weakref.ref, given))

    @property
    def state_bytes(self) -> int:
        """Bytes of the state of all optimizers that have stepped, and still exist."""
        return sum([known.nbytes for known in self._known.values()])

    @property
    def line(self) -> str:
        """The user's line at which state grew last."""
        return next((own.line for own in reversed(list(self._known.values())) if own.line), "")

    @property
    def more_bytes(self) -> int:
        """Bytes of state beyond all that ``optimizer=`` says; less than none if it is less."""
        return self.beyond(self.given_bytes)

    def beyond(self, counted_bytes: int) -> int:
        """Return the bytes of state beyond those that are counted; less than none if it is less.

        Args:
            counted_bytes: what is counted of the optimizers that ``optimizer=`` names. It is
                replaced by what is there once all of them have stepped.
        """
        if not self._known:
            return 0
        more_bytes = self.state_bytes - counted_bytes
        return more_bytes if self._all_have_stepped() else max(0, more_bytes)

    def _all_have_stepped(self) -> bool:
        stepped = [own for own, known in self._known.items() if known.is_ours and known.steps]
        return bool(stepped) and all(
            any(
                own is given or (isinstance(given, type) and isinstance(own, given))
                for own in stepped
            )
            for given in (kept() for kept in self._given)
        )

    def tensors(self) -> Iterator[torch.Tensor]:
        """The tensors of the optimizers' state."""
        for optimizer, known in self._known.items():
            if known.is_ours:
                yield from _state_of(optimizer)

    def watch(self, model: nn.Module, device: torch.device) -> Callable[[], None]:
        """Watch those that step parameters of ``model``; what is returned ends that."""
        self._model, self._device = weakref.ref(model), device
        remove = torch_compat.around_optimizers(self._before, self._after)

        def end() -> None:
            remove()
            self.watcher.end()

        return end

    def _before(self, optimizer: torch.optim.Optimizer) -> None:
        self.before_step()
        self.watcher.end()
        known = self._known.setdefault(optimizer, _Optimizer())
        if known.shape != _shape_of(optimizer):
            known.is_ours = self._steps(optimizer)
        if known.is_ours and known.steps < MOST_WATCHED:
            self.watcher.begin(self._device, self._profiles.append)

    def _after(self, optimizer: torch.optim.Optimizer) -> None:
        known = self._known.get(optimizer)
        if known is None or not known.is_ours:
            if known is not None:
                known.shape = _shape_of(optimizer)
            return
        known.steps += 1
        shape = _shape_of(optimizer)
        few = len(optimizer.state) <= FEW
        if few or shape != known.shape or known.steps % LOOK_EVERY == 0:
            known.shape = shape
            self._add_up(optimizer, known)
        if known.steps > MOST_WATCHED:
            return
        self._profiles.clear()  # of one that has raised
        self.watcher.end()
        for profile in self._profiles:
            self._compare(optimizer, profile.forward_bytes - max(0, profile.left_bytes))

    def _add_up(self, optimizer: torch.optim.Optimizer, known: _Optimizer) -> None:
        nbytes = sum(
            allocated_bytes(nbytes, own.device)
            for own in map(torch_compat.local_part, _state_of(optimizer))
            if own.device == self._device
            for nbytes in torch_compat.storages_of(own).values()
        )
        if nbytes > known.nbytes:
            known.line = user_line()
        if nbytes != known.nbytes or known.steps == 1:
            known.nbytes, self.has_news = nbytes, True

    def _compare(self, optimizer: torch.optim.Optimizer, bytes_meanwhile: int) -> None:
        """Warn where a step of the optimizer alone is too much."""
        model, budget = self._model(), self.budget_bytes()
        if model is None or budget is None:
            return
        tensors: list[torch.Tensor] = [*model.parameters(), *model.buffers()]
        tensors += [p.grad for p in model.parameters() if p.grad is not None]
        local = map(torch_compat.local_part, tensors)
        held = sum(torch_compat.nbytes_of(t) for t in local if t.device == self._device)
        held += self.state_bytes
        if bytes_meanwhile and excess_bytes(held + bytes_meanwhile, budget):
            groups = optimizer.param_groups
            may_fuse = any("fused" in group and not group["fused"] for group in groups)
            other = ", or an optimizer with fused=True, which allocates less" if may_fuse else ""
            warn(
                f"a step of {type(optimizer).__name__} allocates {bytes_meanwhile} bytes "
                f"({format_bytes(bytes_meanwhile)}) beside {held} for parameters, gradients and "
                f"state: more than the budget of {budget}, whatever the plan. Give at least "
                f"{held + bytes_meanwhile}{other}"
            )

    def _steps(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether it steps any of the model's parameters."""
        model: Any = self._model()
        own = {id(p) for p in model.parameters()} if model is not None else set()
        return any(id(p) in own for group in optimizer.param_groups for p in group["params"])


def _shape_of(optimizer: torch.optim.Optimizer) -> tuple[int, ...]:
    """What changes where state may: its entries, groups, and their parameters."""
    groups = optimizer.param_groups
    return id(optimizer.state), len(optimizer.state), *(len(group["params"]) for group in groups)


def _state_of(optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    """The tensors of an optimizer's state, also those in lists."""
    for state in optimizer.state.values():
        for value in state.values():
            if isinstance(value, torch.Tensor):
                yield value
            elif isinstance(value, (list, tuple, dict)):
                yield from (leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor))
