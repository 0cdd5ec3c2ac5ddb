"""How long rotor takes on a long chain, beside the same recurrence in plain numpy.

The chain has as many stages as ResNet-1001 in the rotor paper. Its times add up exactly, so
that both must find equal optima, which is checked.
"""

from __future__ import annotations

import gc
import os
import resource
import time
from pathlib import Path

from benchmarks.common import Spread, save, show
from benchmarks.solver_speed.chains import MIB, heterogeneous
from fxremat.ir import Backward, Chain, Costs, Forward, Keep, Op, Problem, Schedule, Solved
from fxremat.solvers.rotor import RotorTable, least_budget
from tests.reference.plain_rotor import plain_rotor
from tests.reference.simulate import check, simulate

STAGES = 339
SLOTS = 500


def resident_bytes() -> int:
    """What this process occupies now."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()


def most_resident_bytes() -> int:
    """The most that this process ever occupied."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def cpu_seconds() -> float:
    """User and system time of all threads."""
    times = os.times()
    return times.user + times.system


def section(repeats: int) -> None:
    """Time rotor at several budgets."""
    chain, costs = heterogeneous(STAGES)
    least_budget(*heterogeneous(20))  # loads the compiled code
    RotorTable.build(*heterogeneous(20), max_budget_bytes=1 << 30)
    ops: list[Op] = [Forward(i, Keep.ALL) for i in range(STAGES)]
    ops += [Backward(i) for i in reversed(range(STAGES))]
    full = simulate(chain, costs, Schedule(tuple(ops)))
    least_bytes, _ = least_budget(chain, costs)

    rows, results = [], []
    before = resident_bytes()
    for share in (0.05, 0.1, 0.3, 0.6, 0.9):
        budget_bytes = int(full.peak_bytes * share)
        wall, cpu, found = repeated(chain, costs, budget_bytes, SLOTS, repeats)
        check(Problem(chain, costs, budget_bytes), found.schedule)
        rss_bytes = most_resident_bytes() - before
        entry = {
            "share_of_full_peak": share,
            "seconds": vars_of(wall),
            "cpu_seconds": vars_of(cpu),
            "overhead": found.makespan_s / full.makespan_s - 1,
            "operations": len(found.schedule),
            "peak_rss_above_before_bytes": rss_bytes,
        }
        results.append(entry)
        rows.append(
            [
                f"rotor, {share:.2f} of the full peak",
                wall.text(digits=2),
                cpu.text(digits=2),
                f"{rss_bytes / MIB:.0f}",
                f"{found.makespan_s / full.makespan_s - 1:.1%}",
            ]
        )
    load = os.getloadavg()
    plain_s = plain_seconds(chain, costs, budget_bytes, SLOTS, found)
    rows.append([f"plain numpy, {share:.2f}, once", f"{plain_s:.0f}", "", "", ""])
    title = (
        f"{STAGES} stages x {SLOTS} slots, warm; least budget "
        f"{least_bytes / full.peak_bytes:.3f} of the full peak; load {load[0]:.1f}"
    )
    columns = ["", "seconds, median (low … high)", "cpu s", "MiB above before", "recomputation"]
    show(title, columns, rows)
    save(
        "solver_speed_rotor",
        {
            "stages": STAGES,
            "slots": SLOTS,
            "repeats": repeats,
            "load_average": load,
            "rotor": results,
            "plain_numpy_seconds": plain_s,
        },
    )


def repeated(
    chain: Chain, costs: Costs, budget_bytes: int, slots: int, repeats: int
) -> tuple[Spread, Spread, Solved]:
    """Wall and processor time of a table and the schedule at its greatest budget."""
    wall, cpu = [], []
    for _ in range(repeats):
        gc.collect()
        start, start_cpu = time.perf_counter(), cpu_seconds()
        table = RotorTable.build(chain, costs, max_budget_bytes=budget_bytes, slots=slots)
        found = table.schedule(budget_bytes)
        wall.append(time.perf_counter() - start)
        cpu.append(cpu_seconds() - start_cpu)
        del table  # before the next one is built
    assert isinstance(found, Solved)
    return Spread.of(wall), Spread.of(cpu), found


def plain_seconds(
    chain: Chain, costs: Costs, budget_bytes: int, slots: int, found: Solved
) -> float:
    """Seconds of plain numpy, which must find the same optimum."""
    table = RotorTable.build(chain, costs, max_budget_bytes=budget_bytes, slots=slots)
    quantum, slots = table.quantum_bytes, table.slots
    del table
    start = time.perf_counter()
    plain = plain_rotor(chain, costs, quantum=quantum, slots=slots)
    seconds = time.perf_counter() - start
    assert plain[-1] == found.makespan_s
    return seconds


def vars_of(spread: Spread) -> dict[str, float]:
    return {"median": spread.median, "low": spread.low, "high": spread.high}
