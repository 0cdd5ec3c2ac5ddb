"""Plain frozen data that every layer shares. No torch here.

Stages are counted from 0: stage ``i`` reads boundary ``i`` and writes boundary
``i + 1``; the papers' stage ``l`` is stage ``l - 1`` here and their ``a^l`` is
boundary ``l``.
"""

from fxremat.ir.chain import Chain, Stage, Storage
from fxremat.ir.costs import Costs, StageCosts
from fxremat.ir.problem import Infeasible, Problem, Solution, Solved, TimedOut
from fxremat.ir.schedule import Backward, Forward, Keep, Op, Schedule
from fxremat.ir.timeline import Event, Timeline

__all__ = [
    "Backward",
    "Chain",
    "Costs",
    "Event",
    "Forward",
    "Infeasible",
    "Keep",
    "Op",
    "Problem",
    "Schedule",
    "Solution",
    "Solved",
    "Stage",
    "StageCosts",
    "Storage",
    "TimedOut",
    "Timeline",
]
