"""Measurements, by the signature of what was measured."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

import torch

from fxremat import torch_compat
from fxremat.ir import Request
from fxremat.passes.joint.sizes import Layout
from fxremat.passes.split.parts import Changed
from fxremat.passes.stages.block import Key


@dataclass(slots=True)
class CostCache:
    """Measurements by signature: what was measured once is not measured again.

    One cache serves all models of a process, so that plans of one model for several
    budgets rest on the same figures. It holds for one choice of the settings that choose
    kernels, and for one number of threads (:func:`measuring_settings`).

    Attributes:
        seconds: of blocks.
        operation_s: of operations, alone.
        workspace_bytes: peaks of operations beyond their arguments and results.
        result_bytes: of the storages of an operation's results.
        as_traced: whether an operation's results lie as the trace says.
        asked: what an operation asks for, where an allocator rounds.
        contrasts: numbers that show by which formula a pointwise kernel computes them; ``None``:
            it computes none that are made up.
        other_bits: what differs where runs are computed in parts.
        left: how kernels leave results; ``None``: that is not known.
        causal: whether a mask is causal, or attention has the same bits with ``is_causal``.
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
    causal: dict[Key, bool] = field(default_factory=dict)


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
