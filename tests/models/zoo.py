"""What a zoo entry is, and the seeding every entry shares."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import wraps
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

Args = tuple[Any, ...]
Kwargs = dict[str, Any]
T = TypeVar("T")


@contextlib.contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Draw from a generator seeded with ``seed``; the global one does not advance."""
    with torch.random.fork_rng(devices=[]):
        # Only the CPU generator: parameters and samples are drawn there, then moved.
        torch.random.default_generator.manual_seed(seed)
        yield


def drawn_once(build: Callable[..., T], *, seed: int = 0) -> Callable[..., T]:
    """``build`` drawing from ``seed`` each time, so that two builds agree to the last bit."""

    @wraps(build)
    def wrapper(*args: Any, **kwargs: Any) -> T:
        with seeded(seed):
            return build(*args, **kwargs)

    return wrapper


@dataclass(frozen=True)
class ZooModel:
    """A model to train, the data to train it on, and the loss.

    Attributes:
        sample: ``sample(seed)`` is ``(args, kwargs)`` of one call, on the CPU.
        loss: makes a scalar of the outputs; with ``loss_inside`` it only picks it, so that
            nothing is computed between forward and backward.
        autocast: the dtype of an autocast region around forward and loss.
        draws: the training forward draws random numbers.
        without_gradient: the trainable parameters that a step leaves without a gradient.
        hooks_at_first_call: the first call installs hooks under a lock, which Dynamo cannot
            enter.
        reference_backend: what compiles the reference.
    """

    name: str
    build: Callable[[], nn.Module]
    sample: Callable[[int], tuple[Args, Kwargs]]
    loss: Callable[[Any], Tensor]
    loss_inside: bool = False
    autocast: torch.dtype | None = None
    draws: bool = False
    without_gradient: frozenset[str] = frozenset()
    hooks_at_first_call: bool = False
    reference_backend: str = "aot_eager"

    def context(self, device_type: str = "cpu") -> contextlib.AbstractContextManager[Any]:
        """The region the step runs in."""
        if self.autocast is None:
            return contextlib.nullcontext()
        return torch.autocast(device_type, dtype=self.autocast)


def sum_of_squares(outputs: Any) -> Tensor:
    """The mean square of every floating-point tensor in nested outputs, summed."""
    leaves = torch.utils._pytree.tree_leaves(outputs)
    floats = [x for x in leaves if isinstance(x, Tensor) and x.is_floating_point()]
    return torch.stack([x.float().square().mean() for x in floats]).sum()
