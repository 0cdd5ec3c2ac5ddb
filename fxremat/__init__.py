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
    from fxremat.costs.devices import Device
    from fxremat.costs.measure import StepMeasurement, measure_step
    from fxremat.errors import (
        ArgumentError,
        BackwardError,
        BudgetError,
        BudgetWarning,
        CaptureError,
        CostError,
        FxrematError,
        GraphBreakWarning,
        GraphError,
        HostMemoryError,
        NoGradientError,
        PlanError,
        RankError,
        SampleError,
        ScheduleError,
        SizesError,
        TransferError,
    )
    from fxremat.frontend.backend import backend, plan_of
    from fxremat.frontend.compiled import CompiledModule
    from fxremat.frontend.ranks import Ranks
    from fxremat.frontend.sample import Sample
    from fxremat.frontend.written import Options
    from fxremat.report.batches import Batches, BatchPoint
    from fxremat.report.estimate import Estimate
    from fxremat.report.frontier import Frontier
    from fxremat.report.plan import Plan
    from fxremat.report.step_plan import StepPlan
    from fxremat.solvers.named import solve

_HOMES = {
    "backend": "frontend.backend",
    "compile": "api",
    "estimate": "api",
    "frontier": "api",
    "max_batch": "api",
    "plan": "api",
    "solve": "solvers.named",
    "plan_of": "frontend.backend",
    "CompiledModule": "frontend.compiled",
    "Device": "costs.devices",
    "Estimate": "report.estimate",
    "ArgumentError": "errors",
    "BackwardError": "errors",
    "BudgetError": "errors",
    "BudgetWarning": "errors",
    "CaptureError": "errors",
    "CostError": "errors",
    "FxrematError": "errors",
    "GraphBreakWarning": "errors",
    "GraphError": "errors",
    "HostMemoryError": "errors",
    "NoGradientError": "errors",
    "PlanError": "errors",
    "RankError": "errors",
    "SampleError": "errors",
    "SizesError": "errors",
    "ScheduleError": "errors",
    "TransferError": "errors",
    "StepMeasurement": "costs.measure",
    "measure_step": "costs.measure",
    "BatchPoint": "report.batches",
    "Batches": "report.batches",
    "Frontier": "report.frontier",
    "Plan": "report.plan",
    "StepPlan": "report.step_plan",
    "Ranks": "frontend.ranks",
    "Sample": "frontend.sample",
    "Options": "frontend.written",
}

__all__ = [
    "ArgumentError",
    "BackwardError",
    "BatchPoint",
    "Batches",
    "BudgetError",
    "BudgetWarning",
    "CaptureError",
    "CompiledModule",
    "CostError",
    "Device",
    "Estimate",
    "Frontier",
    "FxrematError",
    "GraphBreakWarning",
    "GraphError",
    "HostMemoryError",
    "NoGradientError",
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
    if name not in _HOMES:
        raise AttributeError(f"module 'fxremat' has no attribute {name!r}")
    return getattr(importlib.import_module(f"fxremat.{_HOMES[name]}"), name)


def _version() -> str:
    """The version of the installed package; ``"0+unknown"`` for a checkout never installed."""
    metadata = importlib.import_module("importlib.metadata")
    try:
        return str(metadata.version("fxremat"))
    except metadata.PackageNotFoundError:
        return "0+unknown"


def __dir__() -> list[str]:
    return sorted(__all__)
