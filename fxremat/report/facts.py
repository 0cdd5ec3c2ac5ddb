"""What plans say of units of operations, and beside CP-SAT."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class Fused:
    """Operations that an emitted graph calls as one: compiled, or computed in parts of their rows.

    Attributes:
        name: in emitted code.
        operations: what it computes, in order.
        calls: how often a step runs it.
        parts: in which each call computes it, one after the other.
    """

    name: str
    operations: tuple[str, ...]
    calls: int
    parts: int = 1


@dataclass(frozen=True, slots=True)
class Decided:
    """An operation of which a policy, or a tag in the model, decided what becomes of its results.

    Attributes:
        stage: the stage that computes it.
        operation: its name in the captured graph.
        answer: ``"keep"``, ``"recompute"`` or ``"offload"``.
        by: ``"policy"`` or ``"tag"``.
    """

    stage: int
    operation: str
    answer: Literal["keep", "recompute", "offload"]
    by: Literal["policy", "tag"]


@dataclass(frozen=True, slots=True)
class CrossCheck:
    """A plan's seconds beside those of the fastest schedule that CP-SAT finds for its stages.

    CP-SAT looks at memory-persistent schedules of the plan's chain within its budget, by the bytes
    and seconds of ``plan.costs``. Those bytes are estimates of whole stages, while a plan is
    evaluated operation by operation: a schedule that is found may not quite fit, and a plan may be
    faster. So the gap says how far planner and solver are apart, not that such a plan exists.

    Attributes:
        plan_s: seconds of a step that follows the plan.
        seconds: of a step by the schedule that was found; ``None``: there is none.
        proven: whether CP-SAT proved that none of those schedules is faster.
        why_not: why nothing was found; empty if something was.
    """

    plan_s: float
    seconds: float | None = None
    proven: bool = False
    why_not: str = ""

    @property
    def gap(self) -> float | None:
        """By what share of ``seconds`` the plan takes longer; negative where it is faster."""
        return self.plan_s / self.seconds - 1 if self.seconds else None
