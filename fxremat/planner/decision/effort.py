"""How much work planning does, and what it looks at."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, cast, get_args

import numpy as np

from fxremat.errors import refuse

FormKind = Literal["parts", "norms"]
"""Kinds of further forms of a step."""

DEFAULT_GENERATORS = ("rotor", "equiv_chain", "join")
"""Generators whose schedules are looked at unless others are named."""


@dataclass(frozen=True, slots=True)
class Effort:
    """How much work planning does, and what it looks at.

    Attributes:
        scale: how much of planning may go into further forms of the step that are not needed to
            fit, in multiples of what is usual, which takes some seconds of CPU, or half as long as
            the rest of planning for a long step. Work is counted in operations that are looked at,
            not in seconds, so that the same step gets the same plan on any machine. ``0``: only
            forms that are needed to fit; ``math.inf``: all. ``explain()`` says what was left out.
        generators: names of solvers whose schedules the planner looks at, and from which local
            search starts: ``"rotor"``, ``"equiv_chain"``, ``"join"``, ``"store_all"``,
            ``"periodic"``, ``"revolve"`` or ``"pofo"`` (see :func:`fxremat.solve`). ``"join"`` and
            ``"equiv_chain"`` have schedules only for branches that meet. Least budgets are those of
            the named solvers.
        forms: further forms of the step that are looked at. ``"parts"``: runs of operations are
            computed in parts, one after the other. ``"norms"``: with ``bits="rounding"``, inputs
            of norms are rebuilt from outputs.

    Raises:
        ArgumentError: ``scale`` or ``forms`` cannot be read, or ``generators`` are no names. The
            names themselves are checked when the model is compiled.
    """

    scale: float = 1.0
    generators: tuple[str, ...] = DEFAULT_GENERATORS
    forms: tuple[FormKind, ...] = ("parts", "norms")

    def __post_init__(self) -> None:
        number = isinstance(self.scale, (int, float, np.integer, np.floating))
        if not number or isinstance(self.scale, bool) or not float(self.scale) >= 0:
            must_be = "a number, at least 0, such as 1.0 or math.inf, or a fxremat.Effort"
            refuse("effort", self.scale, must_be)
        generators = _names(self.generators)
        if not generators:
            refuse("generators", self.generators, "names of solvers, such as ('rotor', 'join')")
        forms = _names(self.forms)
        if forms is None or not set(forms) <= set(get_args(FormKind)):
            refuse("forms", self.forms, "some of 'parts' and 'norms', or ()")
        object.__setattr__(self, "scale", float(self.scale))
        object.__setattr__(self, "generators", generators)
        object.__setattr__(self, "forms", cast(tuple[FormKind, ...], forms))


def _names(value: object) -> tuple[str, ...] | None:
    """Return texts without repetitions; ``None``: ``value`` is not an iterable of texts."""
    names = list(value) if isinstance(value, Iterable) and not isinstance(value, str) else [None]
    if not all(isinstance(name, str) for name in names):
        return None
    return tuple(dict.fromkeys(cast(list[str], names)))
