"""How long pofo takes, and how that grows with stages and slots.

How many labels there are depends on how much has to go and how fast it can: the chain is
tried at several shares of its full peak, and at several speeds of the link.
"""

from __future__ import annotations

import os
import time

from benchmarks.common import Spread, save, show
from benchmarks.solver_speed.chains import heterogeneous
from fxremat.ir import Backward, Forward, Keep, Problem, Schedule, Solved
from fxremat.solvers import rotor
from fxremat.solvers.papers import pofo
from tests.paper_terms import symmetric_link
from tests.reference.simulate import check, simulate

STAGES = 50
SLOTS = 50
SHARES = (0.1, 0.3, 0.5)
GIGABYTES_PER_S = (4, 12, 24)


def section(repeats: int) -> None:
    """Time pofo at several budgets and links, then at the slowest of them several sizes."""
    timed(20, 0.3, 12, SLOTS, 1)  # loads the compiled code
    results = []
    for share in SHARES:
        for speed in GIGABYTES_PER_S:
            results.append(timed(STAGES, share, speed, SLOTS, repeats))
    load = os.getloadavg()
    slowest = max(results, key=lambda entry: entry["seconds"]["median"])
    share, speed = slowest["share"], slowest["gigabytes_per_s"]
    growth = [timed(stages, share, speed, SLOTS, repeats) for stages in (12, 25, 50, 100)]
    growth += [timed(STAGES, share, speed, slots, repeats) for slots in (25, 100, 200)]
    columns = [
        "",
        "GB/s",
        "seconds, median [low … high]",
        "cpu s",
        "overhead, fluid",
        "whole",
        "rotor",
        "at least",
    ]
    for title, entries in (
        (f"pofo, {STAGES} stages x {SLOTS} slots, warm; load {load[0]:.1f}", results),
        ("how that grows, at the slowest of these", growth),
    ):
        rows = [
            [
                f"{e['stages']} stages x {e['slots']} slots, {e['share']:.1f} of the full peak",
                str(e["gigabytes_per_s"]),
                Spread(**e["seconds"]).text(digits=2),
                f"{e['cpu_seconds']:.2f}",
                *(f"{e[name]:.1%}" for name in ("fluid", "whole", "rotor", "bound")),
            ]
            for e in entries
        ]
        show(title, columns, rows)
    save("solver_speed_pofo", {"load_average": load, "budgets": results, "growth": growth})


def timed(stages: int, share: float, speed: float, slots: int, repeats: int) -> dict[str, object]:
    """Time one problem; what comes out is replayed, both ways."""
    chain, costs = heterogeneous(stages)
    ops = [Forward(i, Keep.ALL) for i in range(stages)]
    full = simulate(chain, costs, Schedule((*ops, *map(Backward, reversed(range(stages))))))
    link = symmetric_link(speed * 1e9)
    problem = Problem(chain, costs, int(share * full.peak_bytes), link)
    seconds, cpu = [], []
    for _ in range(repeats):
        start, start_cpu = time.perf_counter(), time.process_time()
        found = pofo.explore(problem, slots=slots)
        seconds.append(time.perf_counter() - start)
        cpu.append(time.process_time() - start_cpu)
    assert isinstance(found, pofo.Outcome)
    spread = Spread.of(seconds)
    entry: dict[str, object] = {
        "stages": stages,
        "slots": slots,
        "share": share,
        "gigabytes_per_s": speed,
        "seconds": {"median": spread.median, "low": spread.low, "high": spread.high},
        "cpu_seconds": Spread.of(cpu).median,
        "bound": found.bound_s / full.makespan_s - 1,
        "exact": found.exact,
    }
    alone = rotor.solve(problem, slots=slots)
    solved = {"rotor": alone, "fluid": found.fluid(), "whole": found.whole()}
    for name, solution in solved.items():
        assert isinstance(solution, Solved)
        check(problem, solution.schedule, fluid=name == "fluid")
        entry[name] = solution.makespan_s / full.makespan_s - 1
    return entry
