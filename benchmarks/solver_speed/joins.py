"""How long the join solver takes, and how that grows with branches, stages and slots.

The planning of one budget is timed whole: exact least budget, table and schedule. What comes
out is replayed. One thread does it all, so the least processor time is what a quiet machine takes.
"""

from __future__ import annotations

import os
import random
import time

from benchmarks.common import Spread, save, show
from benchmarks.solver_speed.chains import MIB
from fxremat.ir import (
    Backward,
    Forward,
    Join,
    JoinCosts,
    JoinProblem,
    Keep,
    Op,
    Schedule,
    Solved,
    StageCosts,
)
from fxremat.solvers import join as solver
from tests.paper_terms import costs_from_paper, join_from_sizes
from tests.reference.simulate.join import check, simulate

SIZES = [
    # branches, trunk, slots
    *(((n, n), 1, 200) for n in (10, 20, 40, 80)),
    *(((40, 40), 1, slots) for slots in (50, 100, 400, 800)),
    *(((40, 40), trunk, 200) for trunk in (5, 10)),
    *(((n, n, n), 1, 100) for n in (10, 20, 30)),
    *(((20, 20, 20), 1, slots) for slots in (50, 200, 400)),
]
LIMITS = {((40, 40), 1, 200): 5.0, ((30, 30, 30), 1, 100): 60.0}
"""Seconds that may be taken."""
SHARES = (0.1, 0.3, 0.6)


def section(repeats: int) -> None:
    """Time the two sizes that have a limit at several budgets, then how time grows."""
    timed((3, 3, 3), 2, 20, 0.5, 1)  # loads the compiled code
    limited = [timed(*size, share, repeats) for size in LIMITS for share in SHARES]
    growth = [timed(*size, 0.3, repeats) for size in SIZES]
    load = os.getloadavg()
    columns = ["", "of the full peak", "seconds, median [low … high]", "cpu s", "recomputation"]
    for title, entries in (
        (f"join, warm; load {load[0]:.1f}; may take 5 s and 60 s", limited),
        ("how that grows", growth),
    ):
        rows = [
            [
                f"{' + '.join(map(str, e['branches']))} stages, trunk {e['trunk']}, "
                f"{e['slots']} slots",
                f"{e['share']:.1f}",
                Spread(**e["seconds"]).text(digits=2),
                f"{e['cpu_seconds']:.2f}",
                f"{e['overhead']:.1%}",
            ]
            for e in entries
        ]
        show(title, columns, rows)
    for entry in limited:
        limit_s = LIMITS[entry["branches"], entry["trunk"], entry["slots"]]
        assert entry["seconds"]["high"] <= limit_s, entry
    save("solver_speed_joins", {"load_average": load, "limited": limited, "growth": growth})


def timed(
    branches: tuple[int, ...], trunk: int, slots: int, share: float, repeats: int
) -> dict[str, object]:
    """Time one problem at a share of what keeping everything needs."""
    join, costs = heterogeneous(branches, trunk)
    ops: list[Op] = [Forward(i, Keep.ALL) for i in range(len(join))]
    ops += [Backward(i) for i in reversed(range(len(join)))]
    full = simulate(join, costs, Schedule(tuple(ops)))
    problem = JoinProblem(join, costs, int(full.peak_bytes * share))
    seconds, cpu = [], []
    for _ in range(repeats):
        start, start_cpu = time.perf_counter(), time.process_time()
        found = solver.solve(problem, slots=slots)
        seconds.append(time.perf_counter() - start)
        cpu.append(time.process_time() - start_cpu)
    assert isinstance(found, Solved)
    check(problem, found.schedule)
    spread = Spread.of(seconds)
    return {
        "branches": branches,
        "trunk": trunk,
        "slots": slots,
        "share": share,
        "seconds": {"median": spread.median, "low": spread.low, "high": spread.high},
        "cpu_seconds": min(cpu),
        "overhead": found.makespan_s / full.makespan_s - 1,
    }


def heterogeneous(branches: tuple[int, ...], trunk: int) -> tuple[Join, JoinCosts]:
    """Stages as ``chains.heterogeneous`` draws them, on every branch and the trunk."""
    draw = random.Random(0)
    sizes = [[draw.randint(MIB, 64 * MIB) for _ in range(n + 1)] for n in (*branches, trunk)]
    saved = [[n + draw.randint(MIB, 200 * MIB) for n in line[1:]] for line in sizes]
    join = join_from_sizes(sizes[:-1], saved[:-1], sizes[-1][1:], saved[-1])
    sizes[-1][0] = sum(line[-1] for line in sizes[:-1])  # the ends of the branches

    def costs_of(boundaries: list[int], kept: list[int]) -> tuple[StageCosts, ...]:
        forward_s = [draw.randint(100, 5000) / 2**20 for _ in kept]
        return costs_from_paper(
            forward_s=forward_s,
            backward_s=[seconds * draw.choice([1.5, 2.0, 2.5]) for seconds in forward_s],
            gradient_bytes=boundaries,
            saved_bytes=kept,
            forward_extra_bytes=[draw.randint(0, 32 * MIB) for _ in kept],
            backward_extra_bytes=[draw.randint(0, 32 * MIB) for _ in kept],
        ).stages

    lines = [costs_of(*line) for line in zip(sizes, saved, strict=True)]
    done = tuple(line[0] for line in sizes[:-1])
    return join, JoinCosts(tuple(lines[:-1]), lines[-1], done_bytes=done)


if __name__ == "__main__":
    section(3)
