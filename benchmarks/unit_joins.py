"""Figure 7 of Beaumont et al. 2019: steps counted in the graphs that are emitted."""

from __future__ import annotations

from typing import Any

from benchmarks.common import show
from tests.harness import measured_peak_bytes
from tests.reference.join_units import least_slots
from tests.unit_joins import (
    budget_bytes,
    captured_join,
    counted_steps,
    optimal_steps,
    unit_search,
)

SIZES = (5, 15)


def figure_7(sizes: tuple[int, ...] = SIZES) -> list[dict[str, Any]]:
    """Makespan over the least, at shares of the slots that this takes; prints a table."""
    points = []
    for size in sizes:
        for name, lengths in {"SNN": (2 * size,) * 3, "CM": (5 * size, size)}.items():
            step = captured_join(lengths)
            search = unit_search(step)
            enough = 6 * size + len(lengths)
            least = least_slots(lengths)
            for slots in sorted({least, least + 2, *(enough * i // 8 for i in range(1, 9))}):
                if slots < least:
                    continue
                chosen = search.fastest_within(budget_bytes(search, slots))
                steps = counted_steps(search, chosen).total()
                points.append(
                    {
                        "network": name,
                        "L": size,
                        "slots": slots,
                        "share": slots / enough,
                        "counted": steps,
                        "optimal": optimal_steps(lengths, slots),
                        "makespan": (steps + 6 * size + 1) / (12 * size + 1),
                        "fits": measured_peak_bytes(step, search.evaluator.program(chosen))
                        <= budget_bytes(search, slots),
                    }
                )
    show(
        "Unit joins: forward steps in the emitted graphs (Figure 7)",
        ["network", "L", "slots", "of all", "steps", "optimum", "makespan", "fits"],
        [
            [
                str(p["network"]),
                str(p["L"]),
                str(p["slots"]),
                f"{p['share']:.2f}",
                str(p["counted"]),
                str(p["optimal"]),
                f"{p['makespan']:.3f}",
                "yes" if p["fits"] else "NO",
            ]
            for p in points
        ],
    )
    return points
