"""How long rotor takes on a long chain, beside the same recurrence in plain numpy.

Run: python -m benchmarks.solver_speed

The chain has as many stages as ResNet-1001 in the rotor paper. Its times are multiples of
2**-20 s, so that both must find equal optima, which is checked.
"""

from __future__ import annotations

import argparse
import gc
import os
import random
import resource
import time
from pathlib import Path

from benchmarks.common import Spread, save, show
from fxremat.ir import Backward, Chain, Costs, Forward, Keep, Op, Problem, Schedule, Solved
from fxremat.simulate import check, simulate
from fxremat.solvers.rotor import RotorTable, least_budget
from tests.plain_rotor import plain_rotor

MIB = 1 << 20


def heterogeneous(count: int) -> tuple[Chain, Costs]:
    """Boundaries of 1 to 64 MiB, saved sets up to 200 MiB more, forwards of 0.1 to 5 ms."""
    draw = random.Random(0)
    sizes = [draw.randint(MIB, 64 * MIB) for _ in range(count + 1)]
    saved = [size + draw.randint(MIB, 200 * MIB) for size in sizes[1:]]
    forward_s = [draw.randint(100, 5000) / 2**20 for _ in range(count)]
    costs = Costs.from_paper(
        forward_s=forward_s,
        backward_s=[seconds * draw.choice([1.5, 2.0, 2.5]) for seconds in forward_s],
        gradient_bytes=sizes,
        saved_bytes=saved,
        forward_extra_bytes=[draw.randint(0, 32 * MIB) for _ in range(count)],
        backward_extra_bytes=[draw.randint(0, 32 * MIB) for _ in range(count)],
    )
    return Chain.from_sizes(sizes, saved), costs


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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--stages", type=int, default=339)
    parser.add_argument("--slots", type=int, default=500)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--no-plain", action="store_true", help="leave plain numpy out")
    options = parser.parse_args()

    chain, costs = heterogeneous(options.stages)
    least_budget(*heterogeneous(20))  # loads the compiled code
    RotorTable.build(*heterogeneous(20), max_budget_bytes=1 << 30)
    ops: list[Op] = [Forward(i, Keep.ALL) for i in range(options.stages)]
    ops += [Backward(i) for i in reversed(range(options.stages))]
    full = simulate(chain, costs, Schedule(tuple(ops)))
    least_bytes, _ = least_budget(chain, costs)

    rows, results = [], []
    before = resident_bytes()
    for share in (0.05, 0.1, 0.3, 0.6, 0.9):
        budget_bytes = int(full.peak_bytes * share)
        wall, cpu, found = repeated(chain, costs, budget_bytes, options.slots, options.repeats)
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
    plain_s = None
    if not options.no_plain:
        plain_s = plain_seconds(chain, costs, budget_bytes, options.slots, found)
        rows.append([f"plain numpy, {share:.2f}, once", f"{plain_s:.0f}", "", "", ""])
    title = (
        f"{options.stages} stages x {options.slots} slots, warm; least budget "
        f"{least_bytes / full.peak_bytes:.3f} of the full peak; load {load[0]:.1f}"
    )
    columns = ["", "seconds, median (low … high)", "cpu s", "MiB above before", "recomputation"]
    show(title, columns, rows)
    save(
        "solver_speed",
        {
            "stages": options.stages,
            "slots": options.slots,
            "repeats": options.repeats,
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


if __name__ == "__main__":
    main()
