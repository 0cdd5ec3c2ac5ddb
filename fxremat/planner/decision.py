"""What a planner chooses: all that tells one step from another of the same line."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import fx

from fxremat.costs.options import Kept
from fxremat.ir import Schedule
from fxremat.passes.emit.travel import Move

Held = Mapping[int, frozenset[fx.Node]]
"""For each stage of which something is kept from its first forward on: those tensors."""


@dataclass(frozen=True, slots=True)
class Decision:
    """The order of stage computations, what each forward keeps, and what travels when.

    Attributes:
        schedule: the computations in order; what its save options keep is in ``kept``.
        kept: what each stage keeps, of those that do not keep everything.
        held: tensors that a stage keeps from its first forward on, whatever the schedule.
        moves: storages that travel to host memory and back.
    """

    schedule: Schedule
    kept: Kept
    held: Held = field(default_factory=dict)
    moves: tuple[Move, ...] = ()
