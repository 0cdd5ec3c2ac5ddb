"""Plain frozen data that every layer shares. No torch here.

Stages are counted from 0: stage ``i`` reads boundary ``i`` and writes boundary
``i + 1``; the papers' stage ``l`` is stage ``l - 1`` here and their ``a^l`` is
boundary ``l``.
"""

from fxremat.ir.chain import Chain, Stage, Storage
from fxremat.ir.costs import Costs, SaveOption, StageCosts
from fxremat.ir.join import Join, JoinCosts, JoinProblem
from fxremat.ir.link import Link, MeasuredLink
from fxremat.ir.problem import Infeasible, Problem, Solution, Solved, TimedOut
from fxremat.ir.recorded import (
    TRACED,
    Form,
    Origin,
    RecordedCosts,
    StageSeconds,
)
from fxremat.ir.schedule import (
    Activations,
    Backward,
    Compute,
    Decision,
    Forward,
    Free,
    Keep,
    Move,
    Offload,
    Op,
    Part,
    Prefetch,
    Schedule,
    Shift,
    Tensors,
    Transfer,
    Wait,
)
from fxremat.ir.timeline import Copy, Event, Idle, Lane, Timeline

__all__ = [
    "TRACED",
    "Activations",
    "Backward",
    "Chain",
    "Compute",
    "Copy",
    "Costs",
    "Decision",
    "Event",
    "Form",
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
    "Move",
    "Offload",
    "Op",
    "Origin",
    "Part",
    "Prefetch",
    "Problem",
    "RecordedCosts",
    "SaveOption",
    "Schedule",
    "Shift",
    "Solution",
    "Solved",
    "Stage",
    "StageCosts",
    "StageSeconds",
    "Storage",
    "Tensors",
    "TimedOut",
    "Timeline",
    "Transfer",
    "Wait",
]
