"""Forms of a step that tests leave out."""

from __future__ import annotations

from typing import Any

import fxremat

WHOLE = fxremat.Effort(forms=("norms",))
"""Nothing is computed in parts."""

PARTS = fxremat.Effort(forms=("parts",))
"""No norm is undone."""

ROUNDED_PARTS: dict[str, Any] = {"bits": "rounding", "effort": PARTS}
"""Runs may be computed in parts whose results are equal to rounding."""

SPLITS: dict[object, dict[str, Any]] = {
    False: {"effort": WHOLE},
    "exact": {},
    True: ROUNDED_PARTS,
}
"""Options by what may be computed in parts: nothing, what keeps bits, anything."""
