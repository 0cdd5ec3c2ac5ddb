"""Tensors that a training loop holds outside its model, where no allocator counts them."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterable
from dataclasses import dataclass, field
from time import perf_counter

import torch

from fxremat import torch_compat
from fxremat.frontend.budget import TrainingBudget
from fxremat.frontend.shortfall import warn
from fxremat.runtime.steps import SCALAR_BYTES
from fxremat.units import format_bytes

FIRST = 4
"""First calls at which a loop's tensors are looked for."""

EVERY = 100
"""Later, one of so many calls."""

MOST_SHARE = 0.01
"""Share of the time between two looks that a look may take."""

_TYPES = frozenset({torch.Tensor, torch.nn.Parameter})


@dataclass(slots=True)
class Outside:
    """What a loop has allocated outside the model since that was compiled, and still holds.

    Targets of the loss, a prefetched batch, an average of the weights, results of an evaluation: no
    plan counts them, and on a CPU nothing else shows them. Tensors that existed when the model was
    compiled, such as a data set, are left out.

    Attributes:
        nbytes: at the latest look.
        calls: of the model, so far.
    """

    nbytes: int = 0
    calls: int = 0
    _before: dict[int, torch_compat.StorageAlive] = field(default_factory=dict)
    _has_begun: bool = False
    _seconds: float = 0.0
    _looked_at: float = field(default_factory=perf_counter)

    def begin(self, device: torch.device) -> None:
        """Leave out, from now on, what exists now."""
        self._has_begun = True
        for tensor in _tensors_on(device):
            alive = torch_compat.StorageAlive(tensor)
            self._before[alive.key] = alive

    def is_due(self) -> bool:
        """Whether to look as a call of the model begins: at its first calls, and at some later."""
        self.calls += 1
        if not self._has_begun or (self.calls > FIRST and self.calls % EVERY):
            return False
        since_s = perf_counter() - self._looked_at
        return self.calls <= FIRST or self._seconds <= MOST_SHARE * since_s

    def look(self, device: torch.device, known: Iterable[int], told_bytes: int) -> None:
        """Look for tensors.

        Args:
            device: of the model.
            known: keys of storages that are counted elsewhere.
            told_bytes: are counted for what is found, as ``target=`` and ``reserve=`` say.
        """
        now = perf_counter()
        counted, nbytes = set(known), -told_bytes
        for tensor in _tensors_on(device):
            key = torch_compat.storage_key(tensor)
            if key not in counted and not self._before.get(key):
                counted.add(key)
                nbytes += tensor.untyped_storage().nbytes()
        self.nbytes = max(0, nbytes)
        self._looked_at = perf_counter()
        self._seconds = self._looked_at - now

    def check(self, peak_bytes: int, budget: TrainingBudget) -> None:
        """Warn of a step that keeps to a budget in bytes without these tensors, and not with them.

        Args:
            peak_bytes: measured, of what is planned or counted.
            budget: of the model.
        """
        budget_bytes = budget.written.nbytes
        if budget_bytes is None or not self.nbytes or peak_bytes > budget_bytes:
            return  # a share is of what is counted, and more than the budget is warned of anyway
        over = peak_bytes + self.nbytes - budget_bytes
        if over > 0:
            warn(
                f"this step took {peak_bytes} bytes, and the loop held {self.nbytes} bytes "
                f"({format_bytes(self.nbytes)}) outside the model that came since it was compiled "
                "(targets, batches, copies of weights): together "
                f"{over} ({format_bytes(over)}) more than the budget of {budget_bytes}. "
                f"reserve={self.nbytes} leaves room for them, target= for a loss's target"
            )


def _tensors_on(device: torch.device) -> list[torch.Tensor]:
    """Tensors on a device that Python holds, of more than one number."""
    found = []
    for one in gc.get_objects():
        if type(one) not in _TYPES or one.device.type != device.type:
            continue
        with contextlib.suppress(RuntimeError):  # a wrapper of a transform has no storage
            if one.layout is torch.strided and one.untyped_storage().nbytes() > SCALAR_BYTES:
                found.append(one)
    return found
