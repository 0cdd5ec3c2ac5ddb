"""Tensors that a training loop holds outside its model, where no allocator counts them."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import compress
from time import perf_counter

import torch

from fxremat import torch_compat
from fxremat.graph.shortfall import excess_bytes, warn
from fxremat.options.budget import TrainingBudget
from fxremat.planner.context.context_bytes import SCALARS
from fxremat.runtime.profile import WATCH_EVERY
from fxremat.runtime.steps import SCALAR_BYTES
from fxremat.units import format_bytes

FIRST = 4
"""First calls of the model at which a loop's tensors are measured."""

MOST_SHARE = 0.01
"""Share of the time between two measurements that one may take."""

_TYPES = frozenset({torch.Tensor, torch.nn.Parameter})


@dataclass(slots=True)
class Outside:
    """Measures tensors that a training loop holds outside the model, allocated since compilation.

    These are targets of the loss, a prefetched batch, an average of the weights, results of an
    evaluation. No plan counts them, and on a CPU no allocator does. Tensors that existed when the
    model was compiled, such as a data set, are left out.

    Attributes:
        nbytes: bytes of these tensors when they were measured last.
        calls: how often the model was called.
    """

    nbytes: int = 0
    calls: int = 0
    _before: dict[int, torch_compat.StorageAlive] = field(default_factory=dict)
    _has_begun: bool = False
    _has_warned: bool = False
    _seconds: float = 0.0
    _measured_at: float = field(default_factory=perf_counter)

    def begin(self, device: torch.device) -> None:
        """Record the tensors that exist now, which later measurements leave out."""
        self._has_begun = True
        for tensor in _tensors_on(device):
            alive = torch_compat.StorageAlive(tensor)
            self._before[alive.key] = alive

    def is_due(self) -> bool:
        """Count a call of the model that begins; return whether tensors are measured at it.

        They are at the first calls, and at some later ones.
        """
        self.calls += 1
        if not self._has_begun or (self.calls > FIRST and self.calls % WATCH_EVERY):
            return False
        since_s = perf_counter() - self._measured_at
        return self.calls <= FIRST or self._seconds <= MOST_SHARE * since_s

    def look(self, device: torch.device, counted_keys: Iterable[int], given_bytes: int) -> None:
        """Set :attr:`nbytes` to the bytes of tensors that the loop holds now.

        Args:
            device: the device of the model.
            counted_keys: keys of storages that are counted elsewhere.
            given_bytes: bytes of them that the target of ``loss=`` and ``reserve=`` already count.
        """
        now = perf_counter()
        self._before = {key: alive for key, alive in self._before.items() if alive}
        counted, nbytes = set(counted_keys), -given_bytes
        for tensor in _tensors_on(device):
            key = torch_compat.storage_key(tensor)
            if key not in counted and key not in self._before:
                counted.add(key)
                nbytes += tensor.untyped_storage().nbytes()
        self.nbytes = max(0, nbytes)
        self._measured_at = perf_counter()
        self._seconds = self._measured_at - now

    def check(
        self, peak_bytes: int, budget: TrainingBudget, reserve_bytes: int, *, planned: bool = False
    ) -> None:
        """Warn if a step keeps to the budget, but not together with the tensors held outside.

        Args:
            peak_bytes: the peak of what is counted.
            budget: the budget of the model. For a share or ``"min"`` the warning is given once.
            reserve_bytes: what the user has set aside by ``reserve=``.
            planned: whether the peak is the plan's, as only a part of the step was measured.
        """
        budget_bytes = budget.nbytes
        peak_bytes -= (
            SCALARS * SCALAR_BYTES
        )  # scalars that are held before a step, and allocated again by it
        if budget_bytes is None or excess_bytes(peak_bytes, budget_bytes):
            return  # that has a warning already
        over = excess_bytes(peak_bytes + self.nbytes, budget_bytes)
        if not self.nbytes or not over or (budget.is_relative and self._has_warned):
            return
        self._has_warned = True
        remedy = f"Pass reserve={reserve_bytes + self.nbytes} to set them aside"
        if not budget.is_relative:
            remedy += f", with a budget of {budget_bytes + self.nbytes} to keep the plan unchanged"
        warn(
            f"this step {'takes' if planned else 'took'} {peak_bytes} bytes, and the loop held "
            f"{self.nbytes} bytes ({format_bytes(self.nbytes)}) outside the model, allocated since "
            "it was compiled (targets, batches, copies of weights): together "
            f"{over} ({format_bytes(over)}) more than the budget of {budget_bytes}. {remedy}. "
            "loss=fxremat.Loss(function, target=...) counts the target of a loss",
            code="FXR103",
        )


def _tensors_on(device: torch.device) -> list[torch.Tensor]:
    """Return the dense tensors on a device that Python objects hold, except scalars.

    Parts of sparse tensors are included.
    """
    tensors = []
    objects = gc.get_objects()  # often a million: a loop in Python would be slower
    for tensor in compress(objects, map(_TYPES.__contains__, map(type, objects))):
        if tensor.device != device:
            continue
        with contextlib.suppress(RuntimeError):  # a wrapper of a transform has no storage
            for part in torch_compat.dense_parts(tensor):
                if part.untyped_storage().nbytes() > SCALAR_BYTES:
                    tensors.append(part)
    return tensors
