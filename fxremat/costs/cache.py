"""Measurements, by the signature of what was measured."""

from __future__ import annotations

from collections import defaultdict

import torch

from fxremat import torch_compat
from fxremat.passes.stages.signature import Key


class CostCache:
    """Measurements by signature: what was measured once is not measured again.

    One cache serves all models of a process, so that plans of one model for several
    budgets rest on the same figures. It holds for one choice of the settings that choose
    kernels, and for one number of threads (:func:`measuring_settings`).
    """

    def __init__(self) -> None:
        self.seconds: dict[Key, float] = {}
        self.operation_s: dict[Key, float] = {}
        self.workspace_bytes: dict[Key, int] = {}
        self.result_bytes: dict[Key, tuple[int, ...]] = {}
        self.as_traced: dict[Key, bool] = {}
        self.asked: dict[Key, tuple[int, ...]] = {}


COSTS: dict[Key, CostCache] = defaultdict(CostCache)
"""Measurements of this process by the settings under which they were made."""


THREADS = "torch.get_num_threads"
"""Name of the setting that operations on a CPU depend on alone."""


def measuring_settings() -> dict[str, object]:
    """All settings of the process that measurements depend on, by name."""
    return {THREADS: torch.get_num_threads(), **torch_compat.kernel_settings()}


def cost_cache() -> CostCache:
    """Measurements under the settings that hold now."""
    return COSTS[tuple(measuring_settings().items())]
