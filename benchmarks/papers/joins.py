"""Figures 7, 8 and 9 of "Optimal memory-aware backpropagation of deep join networks".

Run: python -m benchmarks.papers.joins

Every point is a schedule that was replayed step by step (``tests.reference.simulate.join``): the
makespan is the replay's, and the replay would refuse a schedule that needs more slots. SNN
has three branches of 2 L steps, CM two of L and 5 L, RNN one of 6 L; all steps take the same
time. What the text says about the figures is checked, and reported beside what was found.
"""

from __future__ import annotations

from typing import Any

from benchmarks.common import RESULTS, Stated, pyplot, save
from fxremat.ir import JoinProblem, Solved
from tests.reference.join_units import UnitTable, equiv_chain, least_slots, unit_problem
from tests.reference.simulate.join import check

Point = dict[str, float]

MODELS = {
    "SNN": lambda size: (2 * size, 2 * size, 2 * size),
    "CM": lambda size: (size, 5 * size),
    "RNN": lambda size: (6 * size,),
}


def main() -> None:
    results = {
        "figure_7": {f"L={size}": figure_7(size) for size in (5, 15)},
        "figure_8": {f"c={slots}": figure_8(slots, most=40) for slots in (9, 13)},
        "figure_9": {f"c={slots}": figure_9(slots, most=60) for slots in (9, 12, 15)},
    }
    results["stated"] = stated(results)
    save("papers/joins", results)
    plot(results)


def replayed_s(problem: JoinProblem, solved: object) -> float:
    """Time of a schedule within the problem's memory, as the replay finds it."""
    assert isinstance(solved, Solved)
    makespan_s = check(problem, solved.schedule).makespan_s
    assert makespan_s == solved.makespan_s
    return makespan_s


def least_s(size: int) -> int:
    """``Span*``: 6 L forwards, 6 L backwards and the loss point, nothing twice."""
    return 12 * size + 1


def figure_7(size: int) -> dict[str, list[Point]]:
    """Makespan over memory, from the least memory to that which recomputes nothing."""
    curves: dict[str, list[Point]] = {}
    for name, lengths_of in MODELS.items():
        lengths = lengths_of(size)
        enough = sum(lengths) + len(lengths)
        table = UnitTable.build(lengths, enough)
        curves[name] = [
            {
                "slots": slots,
                "memory": slots / enough,
                "makespan": replayed_s(unit_problem(lengths, slots), table.solve(slots=slots))
                / least_s(size),
            }
            for slots in range(least_slots(lengths), enough + 1)
        ]
    return curves


def figure_8(slots: int, *, most: int) -> dict[str, list[Point]]:
    """Makespan over size at fixed memory."""
    curves: dict[str, list[Point]] = {}
    for name, lengths_of in MODELS.items():
        table = UnitTable.build(lengths_of(most), slots)
        curves[name] = []
        for size in range(1, most + 1):
            lengths = lengths_of(size)
            # More slots than are of any use need not be given to the replay.
            makespan_s = replayed_s(unit_problem(lengths, slots), table.solve(lengths, slots))
            curves[name].append({"L": size, "makespan": makespan_s / least_s(size)})
    return curves


def figure_9(slots: int, *, most: int) -> list[Point]:
    """EQUIV-CHAIN over the optimum, on three equal branches of ``2 L`` steps."""
    table = UnitTable.build((most, most, most), slots)
    curve = []
    for size in range(1, most // 2 + 1):
        lengths = (2 * size,) * 3
        problem = unit_problem(lengths, slots)
        optimal_s = replayed_s(problem, table.solve(lengths, slots))
        chain_s = replayed_s(problem, equiv_chain(2 * size, 3, slots))
        curve.append(
            {
                "length": 2 * size + 1,
                "optimal_s": optimal_s,
                "equiv_chain_s": chain_s,
                "ratio": chain_s / optimal_s,
            }
        )
    return curve


def stated(results: dict[str, Any]) -> list[dict[str, str | bool]]:
    """What section 4 states, and what came out."""
    stated = Stated()
    note = stated.note

    for size, curves in results["figure_7"].items():
        for name, least, more in (("CM", 5, 2), ("SNN", 7, 3), ("RNN", 3, 1)):
            first, last = curves[name][0], curves[name][-1]
            if name != "RNN":
                text = f"{name}, {size}: the plot starts at {least} slots"
                note(text, f"{first['slots']}", first["slots"] == least)
            enough = 6 * int(size[2:]) + more
            first_best = next(p["slots"] for p in curves[name] if p["makespan"] == 1)
            text = f"{name}, {size}: least makespan 12 L + 1 from {enough} slots on"
            note(text, f"{first_best}", first_best == enough and last["makespan"] == 1)
            half = min(curves[name], key=lambda p: abs(p["memory"] - 0.5))
            text = f"{name}, {size}: half the memory costs approximately 25 %"
            rise = half["makespan"] - 1
            note(text, f"{rise:.1%} at {half['slots']} slots", 0.2 <= rise <= 0.3)
            small = curves[name][2]
            text = f"{name}, {size}: with c_min + 2 slots less than twice Span*"
            note(text, f"{small['makespan']:.2f}", small["makespan"] < 2)
    for slots, curves in results["figure_8"].items():
        gaps = {
            name: max(
                p["makespan"] / q["makespan"]
                for p, q in zip(curves[name], curves["RNN"], strict=True)
            )
            for name in ("SNN", "CM")
        }
        text = f"{slots}: the gap to RNN, which is the lower bound, is rather small"
        found = ", ".join(f"{name} at most {gap:.2f}" for name, gap in gaps.items())
        note(text, found, min(gaps.values()) >= 1 and max(gaps.values()) < 1.5)
    for slots, curve in results["figure_9"].items():
        text = f"{slots}: EQUIV-CHAIN is robust for small graphs and falls behind with the length"
        short = next(p for p in curve if p["ratio"] > 1)
        found = (
            f"1.00 up to length {short['length'] - 2:.0f}, {curve[-1]['ratio']:.2f} "
            f"at {curve[-1]['length']:.0f}"
        )
        note(text, found, curve[-1]["ratio"] > short["ratio"])
    return stated.shown()


def plot(results: dict[str, Any]) -> None:
    """Draw the three figures, if matplotlib is there."""
    drawing = pyplot()
    if drawing is None:
        return
    figure, axes = drawing.subplots(2, 3, figsize=(15, 8), constrained_layout=True)
    for axis, (size, curves) in zip(axes[0], results["figure_7"].items(), strict=False):
        for name, points in curves.items():
            axis.plot([p["memory"] for p in points], [p["makespan"] for p in points], label=name)
        axis.set(title=f"Figure 7, {size}", xlabel="slots / C_opt", ylabel="makespan / Span*")
        axis.legend()
    for axis, (slots, curves) in zip(axes[1], results["figure_8"].items(), strict=False):
        for name, points in curves.items():
            axis.plot([p["L"] for p in points], [p["makespan"] for p in points], label=name)
        axis.set(title=f"Figure 8, {slots}", xlabel="L", ylabel="makespan / Span*")
        axis.legend()
    for slots, points in results["figure_9"].items():
        axes[0][2].plot([p["length"] for p in points], [p["ratio"] for p in points], label=slots)
    axes[0][2].set(title="Figure 9b", xlabel="length", ylabel="EQUIV-CHAIN / optimal")
    axes[0][2].legend()
    axes[1][2].set_visible(False)
    path = RESULTS / "papers" / "joins.png"
    figure.savefig(path, dpi=110)
    print(f"wrote {path}")


if __name__ == "__main__":
    main()
