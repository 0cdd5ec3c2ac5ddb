"""The optimizer state and the gradients of a model that live in host memory."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from fxremat.errors import ArgumentError
from fxremat.ir import MeasuredLink
from fxremat.loop.optimizer_state import StateBytes
from fxremat.loop.placement import Placement, Trained, placements, trained_parameters
from fxremat.loop.windowed_step import WindowedStep
from fxremat.runtime.arena import HostLimit
from fxremat.runtime.host_tensor import HostSpace, Place

NOTHING = Placement({}, {}, 0, 0, 0.0, 0.0, 0.0)


@dataclass(eq=False)
class Hosting:
    """What of a model's training lives in host memory between its uses.

    Attributes:
        trained: the eligible parameters, the largest first.
        optimizers: the optimizers that step them.
        sizes: bytes of each parameter that these step.
        space: the host memory.
        placement: what is in host memory now.
        is_chosen: whether the placement is final.
        room: returns the bytes that an optimizer's step may have on the device in addition to what
            is held between steps; ``None``: as few as possible.
    """

    trained: tuple[Trained, ...]
    optimizers: tuple[Callable[[], torch.optim.Optimizer | None], ...]
    sizes: tuple[int, ...]
    space: HostSpace
    placement: Placement = NOTHING
    is_chosen: bool = False
    room: Callable[[], int | None] = lambda: None
    _places: dict[int, Place] = field(default_factory=dict)
    _steps: list[WindowedStep] = field(default_factory=list)

    @staticmethod
    def of(
        optimizers: Sequence[Any],
        model: nn.Module,
        state: StateBytes,
        *,
        device: torch.device,
        folder: str | None,
        limit: HostLimit,
    ) -> Hosting:
        """Return the parameters of ``model`` whose gradient and state may be in host memory.

        Args:
            optimizers: the optimizers that ``optimizer=`` names.
            model: the model.
            state: bytes of each tensor of their state, by the ``id`` of the parameter.
            device: the device of the model.
            folder: for a CPU, the folder of the file that represents host memory.
            limit: the limit of all host memory of the model.

        Raises:
            ArgumentError: there is no optimizer that exists, an optimizer cannot step some
                parameters at a time, or no parameter is eligible.
        """
        made = [own for own in optimizers if isinstance(own, torch.optim.Optimizer)]
        if not made or len(made) < len(optimizers):
            raise ArgumentError(
                "HostMemory(state=True) needs the optimizer that will step the model, not its "
                f"class: optimizer= is {list(optimizers)!r}. Create the optimizer first and pass "
                "optimizer=optimizer",
                argument="offload",
                value=optimizers,
                code="FXR412",
            )
        trained = trained_parameters(made, model, state)
        if not trained:
            raise ArgumentError(
                "HostMemory(state=True) has nothing to move: none of the parameters that the "
                "optimizer steps is a plain nn.Parameter of the model. Distributed and quantized "
                "parameters keep their state on the device. Omit state=True",
                argument="offload",
                value=optimizers,
                code="FXR413",
            )
        parameters = {id(p): p for own in made for g in own.param_groups for p in g["params"]}
        space = HostSpace(device, folder=folder, limit=limit)
        sizes = tuple(p.nbytes for p in parameters.values())
        return Hosting(tuple(trained), tuple(map(weakref.ref, made)), sizes, space)

    def choices(self, link: MeasuredLink) -> list[Placement]:
        """Return the choices of what is in host memory, from nothing to as much as may be.

        Gradients that processes exchange stay on the device, in the buckets of their wrapper.

        Args:
            link: the link to host memory.
        """
        made = placements(self.trained, link, self.sizes, limit_bytes=self.space.free_bytes)
        return [own for own in made if not (own.gradients and _exchanges_gradients())]

    def use(self, placement: Placement) -> None:
        """Move state and gradients to host memory from now on, as ``placement`` says.

        Raises:
            HostMemoryError: the memory cannot be allocated. Nothing is changed.
        """
        if placement.host_bytes:
            self.space.reserve(placement.host_bytes)
        self.placement, self.is_chosen = placement, True
        try:
            self._replace_steps(placement)
        except BaseException:
            self.release()
            raise

    def _replace_steps(self, placement: Placement) -> None:
        if not (placement.state or placement.gradients):
            return
        temporary = max(own.costs.temporary for own in self.trained)
        for reference in self.optimizers:
            optimizer = reference()
            if optimizer is not None:
                step = WindowedStep(
                    optimizer,
                    space=self.space,
                    hosted_bytes=lambda parameter: placement.state.get(id(parameter), 0),
                    room=self.room,
                    temporary=temporary,
                )
                self._steps.append(step)
                step.move_existing_state()

    def release(self) -> None:
        """Move everything back to the device, and give the optimizers their own ``step``."""
        for step in self._steps:
            step.remove()
        self._steps.clear()
        self._places.clear()
        self.space.release()
        self.placement, self.is_chosen = NOTHING, False

    def gradients_among(
        self, leaves: Sequence[Tensor | None], computed: Iterable[int]
    ) -> frozenset[int]:
        """Return which of the primals ``computed`` have a gradient that goes to host memory.

        Args:
            leaves: for each primal its leaf tensor; ``None`` where it is no leaf.
            computed: the primals that the graph computes a gradient of.
        """
        hosted = self.placement.gradients
        if not hosted or _exchanges_gradients():
            return frozenset()
        pairs = [(i, leaves[i]) for i in computed]
        return frozenset(
            [i for i, p in pairs if p is not None and id(p) in hosted and not p._backward_hooks]
        )

    def state_bytes(self, leaves: Sequence[Tensor | None], computed: Iterable[int]) -> int:
        """Return the bytes of state in host memory of the primals ``computed``."""
        hosted = self.placement.state
        return sum({id(leaves[i]): hosted.get(id(leaves[i]), 0) for i in computed}.values())

    def take_gradient(self, leaf: Tensor, gradient: Tensor) -> Tensor:
        """Return ``gradient`` as a tensor in host memory, if that is where the leaf's belongs.

        It stays on the device if autograd, or a hook of the leaf, computes something of it:
        :meth:`collect` moves the result.

        Raises:
            HostMemoryError, TransferError: it cannot be copied.
        """
        if leaf.grad is not None or leaf._backward_hooks or not self._may_leave(leaf, gradient):
            return gradient
        return self._put(leaf, gradient)

    def collect(self, leaves: Iterable[Tensor | None]) -> None:
        """Move the gradients that have been accumulated on the device to host memory.

        Raises:
            HostMemoryError, TransferError: one cannot be copied.
        """
        for leaf in leaves:
            gradient = None if leaf is None else leaf.grad
            if leaf is not None and gradient is not None and self._may_leave(leaf, gradient):
                leaf.grad = self._put(leaf, gradient)

    def _may_leave(self, leaf: Tensor, gradient: Tensor) -> bool:
        return (
            id(leaf) in self.placement.gradients
            and not _exchanges_gradients()
            and type(gradient) is Tensor
            and gradient.layout is torch.strided
            and not gradient.requires_grad
            and (gradient.shape, gradient.dtype) == (leaf.shape, leaf.dtype)
        )

    def _put(self, leaf: Tensor, gradient: Tensor) -> Tensor:
        place = self._places.get(id(leaf))
        if place is None or not place.is_free:
            place = self._places[id(leaf)] = self.space.place(leaf.nbytes)
        return place.put(gradient, like=leaf)


def _exchanges_gradients() -> bool:
    """Return whether this process belongs to a group of processes."""
    return torch.distributed.is_available() and torch.distributed.is_initialized()
