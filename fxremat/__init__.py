"""fxremat makes PyTorch training fit in a stated number of bytes, at the least step time.

The public names are loaded when they are first used, so that ``fxremat.solvers`` can be
used without torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fxremat.api import backend, compile, frontier, plan
    from fxremat.compiled import CompiledModule
    from fxremat.errors import (
        BackwardError,
        BudgetError,
        CaptureError,
        CostError,
        FxrematError,
        GraphError,
        NoGradientError,
        SampleError,
        ScheduleError,
    )
    from fxremat.measure import StepMeasurement, measure_step
    from fxremat.report.frontier import Frontier
    from fxremat.report.plan import Plan
    from fxremat.sample import Sample

_HOMES = {
    "backend": "api",
    "compile": "api",
    "frontier": "api",
    "plan": "api",
    "CompiledModule": "compiled",
    "BackwardError": "errors",
    "BudgetError": "errors",
    "CaptureError": "errors",
    "CostError": "errors",
    "FxrematError": "errors",
    "GraphError": "errors",
    "NoGradientError": "errors",
    "SampleError": "errors",
    "ScheduleError": "errors",
    "StepMeasurement": "measure",
    "measure_step": "measure",
    "Frontier": "report.frontier",
    "Plan": "report.plan",
    "Sample": "sample",
}

__all__ = [
    "BackwardError",
    "BudgetError",
    "CaptureError",
    "CompiledModule",
    "CostError",
    "Frontier",
    "FxrematError",
    "GraphError",
    "NoGradientError",
    "Plan",
    "Sample",
    "SampleError",
    "ScheduleError",
    "StepMeasurement",
    "backend",
    "compile",
    "frontier",
    "measure_step",
    "plan",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'fxremat' has no attribute {name!r}")
    return getattr(importlib.import_module(f"fxremat.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
