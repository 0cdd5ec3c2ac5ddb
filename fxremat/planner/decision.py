"""What a planner chooses: all that tells one step from another of the same line."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import fx

from fxremat.ir import Schedule

Tensors = Mapping[int, frozenset[fx.Node]]
"""Tensors of stages."""


@dataclass(frozen=True, slots=True)
class Decision:
    """The order of stage computations, and what each forward keeps.

    Attributes:
        schedule: the computations in order.
        missing: for each stage of whose saved set not all is kept: what its backward rebuilds.
        held: tensors that a stage keeps from its first forward on, whatever the schedule.
    """

    schedule: Schedule
    missing: Tensors
    held: Tensors
