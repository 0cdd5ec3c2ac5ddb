"""Efforts of tests: forms of a step that are left out, and searches that are steered otherwise."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

import fxremat
from fxremat.options import readers

WHOLE = fxremat.Effort(forms=("norms",))
"""Nothing is computed in parts."""

PARTS = fxremat.Effort(forms=("parts",))
"""No norm is undone."""

ROUNDED_PARTS: dict[str, Any] = {"bits": "rounding", "effort": PARTS}
"""Runs may be computed in parts whose results are equal to rounding."""

QUICK: dict[str, Any] = {
    "starts": 3,
    "closer_starts": 1,
    "away_shares": fxremat.Effort().away_shares[::4],
    "part_shares": (8,),
    "most_aims": 1,
}
"""Local search that starts from few candidates, and few forms in parts."""

SPLITS: dict[object, dict[str, Any]] = {
    False: {"effort": WHOLE},
    "exact": {},
    True: ROUNDED_PARTS,
}
"""Options by what may be computed in parts: nothing, what keeps bits, anything."""


def plan_with(patch: pytest.MonkeyPatch, **changed: Any) -> None:
    """Change fields of every effort that ``fxremat.compile`` and its kin read from now on."""
    read = readers.READERS["effort"]
    patch.setitem(
        readers.READERS,  # type: ignore[arg-type]
        "effort",
        lambda name, value: replace(read(name, value), **changed),
    )
