"""The optimizer state and the gradients of a model that live in host memory."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from fxremat.loop.windows import WindowedStep
from fxremat.runtime.host_tensor import HostSpace, Place

SMALL_SHARE = 0.005
"""The smallest parameters, up to this share of all their bytes, keep gradient and state on the
device: copying them takes longer than their bytes are worth."""


def large_parameters(parameters: Iterable[Tensor]) -> list[Tensor]:
    """Return the parameters whose gradient and state may live in host memory, the largest first.

    They are dense, they are on a device whose memory is counted, and they are not among the
    smallest ones, which together have :data:`SMALL_SHARE` of the bytes.
    """
    trained: list[Tensor] = [p for p in parameters if p.requires_grad and type(p) is nn.Parameter]
    ordered = sorted(trained, key=lambda p: p.nbytes)
    small_bytes, total_bytes = 0, sum(p.nbytes for p in ordered)
    while ordered and small_bytes + ordered[0].nbytes <= SMALL_SHARE * total_bytes:
        small_bytes += ordered.pop(0).nbytes
    return ordered[::-1]


@dataclass(eq=False)
class Hosting:
    """What of a model's training lives in host memory between its uses.

    Attributes:
        state_of: ``id`` of each parameter whose optimizer state is in host memory.
        gradient_of: ``id`` of each parameter whose gradient is there.
        space: the host memory.
        window_bytes: bytes of gradients and state that an optimizer's step has on the device.
    """

    space: HostSpace
    state_of: frozenset[int]
    gradient_of: frozenset[int]
    window_bytes: int
    _places: dict[int, Place] = field(default_factory=dict)
    _steps: list[WindowedStep] = field(default_factory=list)

    def wrap(self, optimizer: torch.optim.Optimizer) -> None:
        """Have the optimizer step some parameters at a time, with state in host memory."""
        self._steps.append(
            WindowedStep(
                optimizer,
                space=self.space,
                is_hosted=lambda parameter: id(parameter) in self.state_of,
                window_bytes=lambda: self.window_bytes,
            )
        )

    def gradients_among(
        self, leaves: Sequence[Tensor | None], computed: Iterable[int]
    ) -> frozenset[int]:
        """Return which of the primals ``computed`` have a gradient that goes to host memory.

        Args:
            leaves: for each primal its leaf tensor; ``None`` where it is no leaf.
            computed: the primals that the graph computes a gradient of.
        """
        return frozenset([i for i in computed if id(leaves[i]) in self.gradient_of])

    def take_gradient(self, leaf: Tensor, gradient: Tensor) -> Tensor:
        """Return ``gradient`` as a tensor in host memory, if that is where the leaf's belongs.

        It stays on the device while another gradient of the leaf is in host memory, because
        autograd adds it to that one.

        Raises:
            HostMemoryError, TransferError: it cannot be copied.
        """
        if id(leaf) not in self.gradient_of or leaf.grad is not None:
            return gradient
        place = self._places.get(id(leaf))
        if place is None:
            place = self._places[id(leaf)] = self.space.place(leaf.nbytes)
        return place.put(gradient) if place.is_free else gradient
