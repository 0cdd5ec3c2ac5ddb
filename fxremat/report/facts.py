"""Facts of plans about single operations, and the comparison with CP-SAT."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class Fused:
    """Operations that an emitted graph calls as one unit, compiled or in parts of their rows.

    Attributes:
        name: name of the unit in emitted code.
        operations: names of its operations, in order.
        calls: number of calls in a step.
        parts: number of parts that each call computes, one after the other.
    """

    name: str
    operations: tuple[str, ...]
    calls: int
    parts: int = 1


@dataclass(frozen=True, slots=True)
class Decided:
    """An operation for which a policy, or a tag in the model, decided what happens to its results.

    Attributes:
        stage: index of the stage that computes it.
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
    """The seconds of a plan, compared with those of the fastest schedule that CP-SAT finds.

    CP-SAT searches memory-persistent schedules of the plan's chain within its budget, with the
    bytes and seconds of ``plan.costs``. These bytes are estimates of whole stages, while a plan is
    evaluated operation by operation. So a schedule of CP-SAT may not quite fit, and a plan may be
    faster. The gap measures the distance between planner and solver, and does not imply that a
    faster plan exists.

    Attributes:
        plan_s: seconds of a step that follows the plan.
        seconds: seconds of a step that follows CP-SAT's schedule, or ``None`` if there is none.
        proven: whether CP-SAT proved that no such schedule is faster.
        why_not: reason why there is no schedule; empty if there is one.
    """

    plan_s: float
    seconds: float | None = None
    proven: bool = False
    why_not: str = ""

    @property
    def gap(self) -> float | None:
        """The extra time of the plan as a share of ``seconds``; negative if the plan is faster."""
        return self.plan_s / self.seconds - 1 if self.seconds else None
