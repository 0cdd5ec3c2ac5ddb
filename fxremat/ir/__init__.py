"""Plain frozen data that every layer shares. No torch here.

Stages are counted from 0: stage ``i`` reads boundary ``i`` and writes boundary
``i + 1``; the papers' stage ``l`` is stage ``l - 1`` here and their ``a^l`` is
boundary ``l``.
"""

from fxremat.ir.chain import Chain, Stage, Storage
from fxremat.ir.costs import Costs, SaveOption, StageCosts
from fxremat.ir.join import Join, JoinCosts, JoinProblem, chain_of, join_of
from fxremat.ir.link import Link, MeasuredLink
from fxremat.ir.problem import Infeasible, Problem, Solution, Solved, TimedOut
from fxremat.ir.recorded import (
    Origin,
    RecordedCosts,
    RecordedDecision,
    RecordedMove,
    RecordedShift,
    StageSeconds,
)
from fxremat.ir.schedule import (
    Activations,
    Backward,
    Compute,
    Forward,
    Free,
    Keep,
    Offload,
    Op,
    Part,
    Prefetch,
    Schedule,
    Transfer,
    Wait,
)
from fxremat.ir.timeline import Copy, Event, Idle, Lane, Timeline

__all__ = [
    "Activations",
    "Backward",
    "Chain",
    "Compute",
    "Copy",
    "Costs",
    "Event",
    "Forward",
    "Free",
    "Idle",
    "Infeasible",
    "Join",
    "JoinCosts",
    "JoinProblem",
    "Keep",
    "Lane",
    "Link",
    "MeasuredLink",
    "Offload",
    "Op",
    "Origin",
    "Part",
    "Prefetch",
    "Problem",
    "RecordedCosts",
    "RecordedDecision",
    "RecordedMove",
    "RecordedShift",
    "SaveOption",
    "Schedule",
    "Solution",
    "Solved",
    "Stage",
    "StageCosts",
    "StageSeconds",
    "Storage",
    "TimedOut",
    "Timeline",
    "Transfer",
    "Wait",
    "chain_of",
    "join_of",
]
