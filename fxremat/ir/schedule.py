"""A schedule: the typed sequence of operations of one training step."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum


class Keep(Enum):
    """What a forward leaves in memory beside the boundary it writes."""

    NONE = "none"
    """``F_none``: nothing; a boundary that nobody else holds is freed."""
    INPUT = "input"
    """``F_ck``: the boundary it read."""
    ALL = "all"
    """``F_all``: the boundary it read and its saved set."""


@dataclass(frozen=True, slots=True)
class Forward:
    """Forward of ``stage``: reads boundary ``stage``, writes boundary ``stage + 1``."""

    stage: int
    keep: Keep

    def __str__(self) -> str:
        name = {Keep.NONE: "F_none", Keep.INPUT: "F_ck", Keep.ALL: "F_all"}[self.keep]
        return f"{name} {self.stage}"


@dataclass(frozen=True, slots=True)
class Backward:
    """Backward of ``stage``: reads the gradient after it, its saved set and boundary ``stage``."""

    stage: int

    def __str__(self) -> str:
        return f"B {self.stage}"


Op = Forward | Backward


@dataclass(frozen=True, slots=True)
class Schedule:
    """Operations in the order in which they run."""

    ops: tuple[Op, ...]

    def __len__(self) -> int:
        return len(self.ops)

    def __iter__(self) -> Iterator[Op]:
        return iter(self.ops)

    def __str__(self) -> str:
        return ", ".join(map(str, self.ops))
