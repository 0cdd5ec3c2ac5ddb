"""Measurements of this process."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field, fields

import torch

from fxremat import torch_compat
from fxremat.ir import Request
from fxremat.passes.joint.sizes import Layout
from fxremat.passes.parts.parts import Changed
from fxremat.passes.stages.block import Key


@dataclass(slots=True)
class CostCache:
    """Measured bytes, seconds and results by key, so that nothing is measured twice.

    One cache serves all models of a process, so plans of one model for several budgets are based on
    the same figures. It is valid for one combination of the settings that affect the choice of
    kernels and one number of threads (:func:`measuring_settings`).

    Attributes:
        seconds: seconds of blocks.
        operation_s: seconds of operations, run by themselves.
        workspace_bytes: peaks of operations beyond their arguments and results.
        result_bytes: sizes of the storages of an operation's results.
        as_traced: whether an operation's results have the layout of the trace.
        asked: requests of an operation to the allocator, where the allocator rounds.
        contrasts: numbers that reveal which formula a pointwise kernel uses; ``None`` if the kernel
            refuses made-up numbers.
        other_bits: results that differ when runs are computed in parts.
        left: layouts that kernels give their results; ``None`` if unknown.
        unmasked: whether an attention gives the same bits without its mask.
    """

    seconds: dict[Key, float] = field(default_factory=dict)
    operation_s: dict[Key, float] = field(default_factory=dict)
    workspace_bytes: dict[Key, int] = field(default_factory=dict)
    result_bytes: dict[Key, tuple[int, ...]] = field(default_factory=dict)
    as_traced: dict[Key, bool] = field(default_factory=dict)
    asked: dict[Key, tuple[Request, ...]] = field(default_factory=dict)
    contrasts: dict[Key, list[list[torch.Tensor]] | None] = field(default_factory=dict)
    other_bits: dict[Key, Changed] = field(default_factory=dict)
    left: dict[Key, tuple[Layout, ...] | None] = field(default_factory=dict)
    unmasked: dict[Key, bool] = field(default_factory=dict)

    def copied(self) -> CostCache:
        """Return a cache with the same measurements, to which further ones can be added."""
        return CostCache(**{each.name: dict(getattr(self, each.name)) for each in fields(self)})


COSTS: dict[Key, CostCache] = defaultdict(CostCache)
"""Measurements of this process, by the settings that they were made under."""


THREADS = "torch.get_num_threads"
"""Name of the only setting that operations on a CPU depend on."""


def measuring_settings() -> dict[str, object]:
    """Return the settings of the process on which measured bytes and seconds depend, by name."""
    return {THREADS: torch.get_num_threads(), **torch_compat.kernel_settings()}


def cost_cache() -> CostCache:
    """Return the cache of this process for measurements under its current settings."""
    return COSTS[tuple(measuring_settings().items())]
