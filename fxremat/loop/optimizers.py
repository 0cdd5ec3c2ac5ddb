"""The optimizers of a model: the state that they keep, and what their steps allocate."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import InitVar, dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from fxremat import torch_compat
from fxremat.graph.shortfall import excess_bytes, warn
from fxremat.loop.optimizer_state import with_state
from fxremat.loop.placement import TEMPORARY
from fxremat.passes.joint.graph import allocated_bytes
from fxremat.runtime.profile import MemoryProfile, Watcher
from fxremat.units import format_bytes

MOST_WATCHED = 2
"""Steps of an optimizer whose allocations are watched: the first one makes its state."""

ADD_UP_EVERY = 100
"""State is added up at every 100th step, and whenever its entries or groups have changed."""

MOST_ENTRIES = 8
"""State of at most this many entries is added up at every step: LBFGS keeps a list that grows
in one entry."""


@dataclass(slots=True)
class _Measured:
    """What was measured of one optimizer.

    Attributes:
        steps: how many steps it has made.
        shape: numbers of state entries, groups and parameters when the state was last added up.
        nbytes: bytes of its state.
        steps_model: whether it steps a parameter of the model.
    """

    steps: int = 0
    shape: tuple[int, ...] = ()
    nbytes: int = 0
    steps_model: bool = False


@dataclass(slots=True)
class Optimizers:
    """The optimizers that step parameters of a model: their state, and what a step allocates.

    Attributes:
        budget_bytes: returns the bytes of the budget; ``None``: there is none yet.
        given: the optimizers that ``optimizer=`` names; a class stands for all of its instances.
            They are not kept alive; one that is gone counts as one that has not stepped.
        given_bytes: bytes of their state.
        before_step: is called before each step of an optimizer, to end measuring the training step.
        watcher: measures what a step allocates. Measuring a step that raises ends when the next
            measurement begins, of a forward or by a profiler of the user's.
        has_news: whether the state has changed since this was set to ``False``.
    """

    budget_bytes: Callable[[], int | None]
    given: InitVar[tuple[object, ...]] = ()
    given_bytes: int = 0
    before_step: Callable[[], None] = lambda: None
    watcher: Watcher = field(default_factory=Watcher)
    has_news: bool = False
    _measured: weakref.WeakKeyDictionary[torch.optim.Optimizer, _Measured] = field(
        default_factory=weakref.WeakKeyDictionary
    )
    _begun: weakref.WeakSet[torch.optim.Optimizer] = field(default_factory=weakref.WeakSet)
    _given: tuple[Callable[[], object], ...] = ()
    _profiles: list[MemoryProfile] = field(default_factory=list)
    _model: Callable[[], nn.Module | None] = lambda: None
    _device: torch.device = field(default_factory=lambda: torch.device("cpu"))

    def __post_init__(self, given: tuple[object, ...]) -> None:
        classes = [one for one in given if isinstance(one, type)]
        instances = (one for one in given if isinstance(one, torch.optim.Optimizer))
        self._given = tuple(map(weakref.ref, (*classes, *with_state(instances))))

    @property
    def state_bytes(self) -> int:
        """Bytes of the state of all optimizers that have stepped the model and still exist."""
        return sum([measured.nbytes for measured in self._measured.values()])

    @property
    def more_bytes(self) -> int:
        """Bytes of optimizer state beyond those that ``optimizer=`` counts; may be negative."""
        return self.beyond(self.given_bytes)

    def beyond(self, counted_bytes: int) -> int:
        """Return by how many bytes the state exceeds ``counted_bytes``; negative if it is smaller.

        Before all of the optimizers that ``optimizer=`` names have stepped, it is not negative.

        Args:
            counted_bytes: the bytes that plans count for these optimizers.
        """
        if not self._measured:
            return 0
        more_bytes = self.state_bytes - counted_bytes
        return more_bytes if self.all_have_stepped else max(0, more_bytes)

    @property
    def all_have_stepped(self) -> bool:
        """Whether each optimizer that ``optimizer=`` names has stepped the model."""
        stepped = [one for one, own in self._measured.items() if own.steps_model and own.steps]
        return bool(stepped) and all(
            any(
                one is given or (isinstance(given, type) and isinstance(one, given))
                for one in stepped
            )
            for given in (alive() for alive in self._given)
            if not self._steps_elsewhere(given)
        )

    def hook_bytes(self, taken: Iterable[torch.Tensor | None]) -> int:
        """Return the most bytes that a step in a hook is assumed to allocate and to free.

        Args:
            taken: parameters whose gradient a hook takes away. If ``optimizer=`` names an optimizer
                of such a parameter, the hook runs its step. Of others, later steps show the bytes.
        """
        given = (alive() for alive in self._given)
        optimizers = (one for one in given if isinstance(one, torch.optim.Optimizer))
        groups = (group for one in optimizers for group in one.param_groups)
        stepped = {id(parameter) for group in groups for parameter in group["params"]}
        own = (p.nbytes for p in taken if p is not None and id(p) in stepped)
        return allocated_bytes(int(TEMPORARY * max(own, default=0)), self._device)

    def _steps_elsewhere(self, given: object) -> bool:
        """Return whether an optimizer steps nothing on the device, as one of copies on the host."""
        if not isinstance(given, torch.optim.Optimizer):
            return False
        stepped = (p for group in given.param_groups for p in group["params"])
        return all(p.device != self._device for p in stepped)

    def tensors(self) -> Iterator[torch.Tensor]:
        """Yield the state tensors of all optimizers that step the model."""
        for optimizer, measured in self._measured.items():
            if measured.steps_model:
                yield from _state_of(optimizer)

    def watch(self, model: nn.Module, device: torch.device) -> Callable[[], None]:
        """Begin to measure state and steps of ``model``'s optimizers; return a function to stop."""
        self._model, self._device = weakref.ref(model), device
        remove = torch_compat.around_optimizers(self._before, self._after)

        def end() -> None:
            remove()
            self.watcher.end()

        return end

    def end_steps(self) -> None:
        """End measuring steps; add up the state that a step has made which has not ended.

        Such a step has raised, or a closure of it runs the model.
        """
        self.watcher.end()
        while self._begun:
            optimizer = self._begun.pop()
            measured = self._measured.get(optimizer)
            if measured is not None and measured.steps_model:
                self._add_up_state(optimizer, measured)

    def _before(self, optimizer: torch.optim.Optimizer) -> None:
        """Begin to measure a step of ``optimizer``, if it is one of its first of the model.

        A step in a hook, in the backward, is a part of the training step: that is measured as a
        whole, if at all.
        """
        is_in_backward = torch_compat.current_backward() >= 0
        if not is_in_backward:
            self.before_step()
            self.watcher.end()
        measured = self._measured.setdefault(optimizer, _Measured())
        self._begun.add(optimizer)
        if measured.shape != _shape_of(optimizer):
            measured.steps_model = self._steps_model(optimizer)
        if measured.steps_model and measured.steps < MOST_WATCHED and not is_in_backward:
            self.watcher.begin(self._device, self._profiles.append)

    def _after(self, optimizer: torch.optim.Optimizer) -> None:
        """Add up the state of ``optimizer`` after a step, if it may have changed.

        If the step was measured, a warning is given where it exceeds the budget.
        """
        measured = self._measured.get(optimizer)
        self._begun.discard(optimizer)
        if measured is None:
            return
        shape = _shape_of(optimizer)
        if not measured.steps_model:
            measured.shape = shape
            return
        measured.steps += 1
        is_small = len(optimizer.state) <= MOST_ENTRIES
        if is_small or shape != measured.shape or measured.steps % ADD_UP_EVERY == 0:
            measured.shape = shape
            self._add_up_state(optimizer, measured)
        if measured.steps > MOST_WATCHED or torch_compat.current_backward() >= 0:
            return
        self._profiles.clear()  # of a step that has raised
        self.watcher.end()
        for profile in self._profiles:
            self._check_step(optimizer, profile.forward_bytes - max(0, profile.left_bytes))

    def _add_up_state(self, optimizer: torch.optim.Optimizer, measured: _Measured) -> None:
        """Set ``measured.nbytes`` to the bytes of the optimizer's state on the model's device."""
        sizes = torch_compat.storages_on(self._device, _state_of(optimizer)).values()
        state_bytes = sum(allocated_bytes(nbytes, self._device) for nbytes in sizes)
        if state_bytes != measured.nbytes or measured.steps == 1:
            measured.nbytes, self.has_news = state_bytes, True

    def _check_step(self, optimizer: torch.optim.Optimizer, temporary_bytes: int) -> None:
        """Warn if a step of the optimizer exceeds the budget whatever is planned.

        Args:
            optimizer: the optimizer.
            temporary_bytes: the bytes that the step has allocated and freed.
        """
        model, budget = self._model(), self.budget_bytes()
        if model is None or budget is None:
            return
        tensors: list[torch.Tensor] = [*model.parameters(), *model.buffers()]
        tensors += [p.grad for p in model.parameters() if p.grad is not None]
        held = sum(torch_compat.nbytes_of(t) for t in tensors if t.device == self._device)
        held += self.state_bytes
        if temporary_bytes and excess_bytes(held + temporary_bytes, budget):
            option = self._option_of_less(optimizer)
            other = f", or an optimizer with {option}, which allocates less" if option else ""
            warn(
                f"a step of {type(optimizer).__name__} allocates {temporary_bytes} bytes "
                f"({format_bytes(temporary_bytes)}) while {held} are held for parameters, "
                f"gradients and state. With any plan that is more than the budget of {budget}. "
                f"Give at least {held + temporary_bytes}{other}",
                code="FXR112",
            )

    def _option_of_less(self, optimizer: torch.optim.Optimizer) -> str:
        """Return the option with which the optimizer's step allocates less; empty: none is known.

        On a CUDA device, steps take all parameters at once unless ``foreach=False``.
        """
        groups = optimizer.param_groups
        if any("fused" in group and not group["fused"] for group in groups):
            return "fused=True"
        default = self._device.type == "cuda"
        asked = [own["foreach"] for own in groups if "foreach" in own and not own.get("fused")]
        at_once = any(default if own is None else own for own in asked)
        return "foreach=False" if at_once else ""

    def _steps_model(self, optimizer: torch.optim.Optimizer) -> bool:
        model: Any = self._model()
        parameters = {id(p) for p in model.parameters()} if model is not None else set()
        groups = optimizer.param_groups
        return any(id(p) in parameters for group in groups for p in group["params"])


def _shape_of(optimizer: torch.optim.Optimizer) -> tuple[int, ...]:
    """Return a key that changes if state may have: numbers of state entries, groups, parameters."""
    groups = optimizer.param_groups
    return id(optimizer.state), len(optimizer.state), *(len(group["params"]) for group in groups)


def _state_of(optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    """Yield the tensors of an optimizer's state, also those in lists."""
    for state in optimizer.state.values():
        for value in state.values():
            if isinstance(value, torch.Tensor):
                yield value
            elif isinstance(value, (list, tuple, dict)):
                yield from (leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor))
