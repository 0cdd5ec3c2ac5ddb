"""The table of all errors and warnings, by their codes.

Codes below FXR100 are errors of the budget, FXR1xx its warnings, FXR2xx other warnings, FXR3xx
captures, FXR4xx arguments, FXR5xx samples, FXR6xx plans and costs, FXR7xx steps and processes,
FXR8xx versions, and FXR9xx faults of fxremat. A code keeps its meaning; one that is no longer
used is not used again.
"""

from __future__ import annotations

from fxremat.diagnostics.arguments import ARGUMENTS, SAMPLES
from fxremat.diagnostics.breaks import BREAKS
from fxremat.diagnostics.budget import BUDGET
from fxremat.diagnostics.budget_warnings import BUDGET_WARNINGS
from fxremat.diagnostics.capture import CAPTURE
from fxremat.diagnostics.entry import Diagnostic
from fxremat.diagnostics.plans import PLANS
from fxremat.diagnostics.steps import BACKWARD, HOST, OTHERS, RANKS

DIAGNOSTICS: tuple[Diagnostic, ...] = (
    *BUDGET,
    *BUDGET_WARNINGS,
    *BREAKS,
    *CAPTURE,
    *ARGUMENTS,
    *SAMPLES,
    *PLANS,
    *BACKWARD,
    *HOST,
    *RANKS,
    *OTHERS,
)
BY_CODE = {entry.code: entry for entry in DIAGNOSTICS}
