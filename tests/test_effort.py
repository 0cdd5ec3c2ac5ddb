"""How much work planning does, as it is asked for."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

import fxremat
from fxremat.effort import DEFAULT_GENERATORS
from fxremat.errors import ArgumentError
from fxremat.planner.search.search import GENERATORS_BY_NAME


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("effort", value) for value in (-1, -0.5, math.nan, "1", True, None, [1])),
        *(("generators", value) for value in ("rotor", (), None, [3], 7)),
        *(("forms", value) for value in ("parts", None, ["part"], [1], 7)),
    ],
)
def test_what_is_no_effort(name: str, value: Any) -> None:
    with pytest.raises(ArgumentError) as caught:
        fxremat.Effort(**{"scale" if name == "effort" else name: value})
    assert caught.value.argument == name


def test_efforts_that_mean_the_same_are_equal() -> None:
    one = fxremat.Effort(np.float32(2), iter(["join", "rotor", "join"]), ["norms"])  # type: ignore[arg-type]
    assert one == fxremat.Effort(2, ("join", "rotor"), ("norms",))
    assert type(one.scale) is float


def test_everything_is_looked_at_unless_asked_otherwise() -> None:
    usual = fxremat.Effort()
    assert (usual.scale, usual.forms) == (1.0, ("parts", "norms"))
    assert usual.generators == DEFAULT_GENERATORS
    assert set(DEFAULT_GENERATORS) <= GENERATORS_BY_NAME.keys()
    assert fxremat.Effort(math.inf).scale == math.inf
