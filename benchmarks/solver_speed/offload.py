"""How long dynprog takes, and how that grows with stages and slots.

The number of states that are incomparable depends on how much must move and how fast it can, so
several budgets and links are tried: 6 GB/s is slow for this chain, 24 GB/s about right.
"""

from __future__ import annotations

import os
import time

from benchmarks.common import Spread, save, show
from benchmarks.solver_speed.chains import heterogeneous
from fxremat.ir import Problem, Solved
from fxremat.solvers.papers.offload import dp
from fxremat.solvers.papers.offload.line import line_of
from tests.paper_terms import symmetric_link
from tests.reference.offload_bounds import lower_bounds
from tests.reference.simulate import check

STAGES = 100
SLOTS = 500
SHARES = (0.1, 0.3, 0.5, 0.6, 0.8)
GIGABYTES_PER_S = (6, 12, 24)


def section(repeats: int) -> None:
    """Time dynprog at several budgets and links, then at the slowest of them several sizes."""
    timed(20, 0.5, 12, SLOTS, 1)  # loads the compiled code
    results = []
    for share in SHARES:
        for speed in GIGABYTES_PER_S:
            results.append(timed(STAGES, share, speed, SLOTS, repeats))
    load = os.getloadavg()
    slowest = max(results, key=lambda entry: entry["seconds"]["median"])
    share, speed = slowest["share"], slowest["gigabytes_per_s"]
    growth = [timed(stages, share, speed, SLOTS, repeats) for stages in (25, 50, 100, 200)]
    growth += [timed(STAGES, share, speed, slots, repeats) for slots in (125, 250, 500, 1000)]
    columns = ["", "GB/s", "seconds, median [low … high]", "over the lower bound"]
    for title, entries in (
        (f"dynprog, {STAGES} stages x {SLOTS} slots, warm; load {load[0]:.1f}", results),
        ("how that grows, at the slowest of these", growth),
    ):
        rows = [
            [
                f"{e['stages']} stages x {e['slots']} slots, {e['share']:.1f} of the memory",
                str(e["gigabytes_per_s"]),
                Spread(**e["seconds"]).text(digits=2),
                f"{e['ratio']:.3f}",
            ]
            for e in entries
        ]
        show(title, columns, rows)
    save("solver_speed_offload", {"load_average": load, "budgets": results, "growth": growth})


def timed(stages: int, share: float, speed: float, slots: int, repeats: int) -> dict[str, object]:
    """Time one problem; what comes out is replayed as whole transfers."""
    chain, costs = heterogeneous(stages)
    link = symmetric_link(speed * 1e9, shared=True)
    line = line_of(Problem(chain, costs, 0, link))
    least, most = line.least_budget_bytes, line.peak_bytes
    problem = Problem(chain, costs, int(least + share * (most - least)), link)
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        found = dp.solve(problem, slots=slots)
        seconds.append(time.perf_counter() - start)
    assert isinstance(found, Solved)
    check(problem, found.schedule)
    spread = Spread.of(seconds)
    return {
        "stages": stages,
        "slots": slots,
        "share": share,
        "gigabytes_per_s": speed,
        "seconds": {"median": spread.median, "low": spread.low, "high": spread.high},
        "ratio": found.makespan_s / lower_bounds(problem).makespan_s,
    }
