"""fxremat makes PyTorch training fit in a stated number of bytes, at the least step time.

The public names are loaded when they are first used, so that ``fxremat.solvers`` can be
used without torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    __version__: str
    from fxremat.api import compile, estimate, frontier, max_batch, plan
    from fxremat.capture.sample import Sample
    from fxremat.costs.estimated.devices import Device
    from fxremat.costs.measured.measure import StepMeasurement, measure_step
    from fxremat.effort import Effort
    from fxremat.errors import (
        ArgumentError,
        BackwardError,
        BudgetError,
        BudgetWarning,
        CaptureError,
        CostError,
        DataSizesError,
        FxrematError,
        FxrematWarning,
        GraphBreakWarning,
        GraphError,
        HostMemoryError,
        NoGradientError,
        PlanError,
        RankError,
        SampleError,
        ScheduleError,
        SizesError,
        TorchVersionError,
        TransferError,
    )
    from fxremat.module.backend import backend, plan_of
    from fxremat.module.compiled import CompiledModule
    from fxremat.options.loss import Loss
    from fxremat.options.plain import Options
    from fxremat.options.values import Bits, HostMemory
    from fxremat.passes.joint.constraints import Operation
    from fxremat.ranks.peers import Ranks
    from fxremat.report.estimate import Estimate
    from fxremat.report.frontier import Batches, BatchPoint, Frontier
    from fxremat.report.plan import Plan, StepPlan
    from fxremat.solvers.named import solve

_NAMES = {
    "api": ("compile", "estimate", "frontier", "max_batch", "plan"),
    "costs.estimated.devices": ("Device",),
    "costs.measured.measure": ("StepMeasurement", "measure_step"),
    "capture.sample": ("Sample",),
    "module.backend": ("backend", "plan_of"),
    "module.compiled": ("CompiledModule",),
    "options.loss": ("Loss",),
    "options.plain": ("Options",),
    "options.values": ("Bits", "HostMemory"),
    "effort": ("Effort",),
    "passes.joint.constraints": ("Operation",),
    "ranks.peers": ("Ranks",),
    "report.estimate": ("Estimate",),
    "report.frontier": ("BatchPoint", "Batches", "Frontier"),
    "report.plan": ("Plan", "StepPlan"),
    "solvers.named": ("solve",),
}
_HOMES = {name: home for home, names in _NAMES.items() for name in names}
"""Modules of all names but the errors, which are in ``errors``."""

__all__ = [
    "ArgumentError",
    "BackwardError",
    "BatchPoint",
    "Batches",
    "Bits",
    "BudgetError",
    "BudgetWarning",
    "CaptureError",
    "CompiledModule",
    "CostError",
    "DataSizesError",
    "Device",
    "Effort",
    "Estimate",
    "Frontier",
    "FxrematError",
    "FxrematWarning",
    "GraphBreakWarning",
    "GraphError",
    "HostMemory",
    "HostMemoryError",
    "Loss",
    "NoGradientError",
    "Operation",
    "Options",
    "Plan",
    "PlanError",
    "RankError",
    "Ranks",
    "Sample",
    "SampleError",
    "ScheduleError",
    "SizesError",
    "StepMeasurement",
    "StepPlan",
    "TorchVersionError",
    "TransferError",
    "__version__",
    "backend",
    "compile",
    "estimate",
    "frontier",
    "max_batch",
    "measure_step",
    "plan",
    "plan_of",
    "solve",
]


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return _version()
    if name not in __all__:
        raise AttributeError(f"module 'fxremat' has no attribute {name!r}")
    return getattr(importlib.import_module(f"fxremat.{_HOMES.get(name, 'errors')}"), name)


def _version() -> str:
    """The version of the installed package; ``"0+unknown"`` for a checkout never installed."""
    metadata = importlib.import_module("importlib.metadata")
    try:
        return str(metadata.version("fxremat"))
    except metadata.PackageNotFoundError:
        return "0+unknown"


def __dir__() -> list[str]:
    return sorted(__all__)
