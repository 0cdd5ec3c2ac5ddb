"""Figures 4 to 11 of "Optimal GPU-CPU offloading strategies": makespan over memory.

Run: python -m benchmarks.papers.offloading [--quick]

The chains are those of ``benchmarks.papers.networks``: derived from the architectures, where the
paper measured. The link is the paper's, 12.2 GB/s, one transfer at a time. Memory goes from the
least with which there is a schedule (0 %) to what keeps everything (100 %). Every makespan is
that of a replay of whole transfers on three lanes (``tests.reference.simulate``), over the lower
bound of Proposition 3. What the text says about the figures is checked, and reported beside what
was found.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from statistics import mean

from benchmarks.common import RESULTS, Stated, pyplot, save, show
from benchmarks.papers.networks import LINK_BYTES_PER_S, NAMES, Network, network
from fxremat.ir import Infeasible, Problem, Solution, Solved
from fxremat.solvers.papers.offload import conv, dp, greedy, vdnn
from fxremat.solvers.store_all import solve as store_all
from tests.paper_terms import symmetric_link
from tests.reference.offload_bounds import lower_bounds
from tests.reference.simulate import check

SOLVERS: dict[str, Callable[[Problem], Solution]] = {
    "GREEDY": greedy.solve,
    "DYNPROG": dp.solve,
    "VDNN": vdnn.solve,
    "inputs of heavy stages": conv.solve,
}
SETTINGS = ((224, 32), (500, 8), (1000, 2))
"""Height and width of an image, and images in a step."""

SHARES = tuple(percent / 100 for percent in (0, 2, 5, 10, 15, 20, 30, 40, 50, 60, 70, 80, 90, 100))
LOW = 0.2
"""Up to this share, memory is called low."""

Point = dict[str, float]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="only images of 224 x 224")
    options = parser.parse_args()
    curves: dict[str, list[Point]] = {}
    for image, batch in SETTINGS[:1] if options.quick else SETTINGS:
        for name in NAMES:
            start = time.perf_counter()
            chain = network(name, image=image, batch=batch)
            curves[f"{name} {image}"] = [ratios(chain, share) for share in SHARES]
            print(f"{name} {image}: {time.perf_counter() - start:.1f} s")
    tell(curves)
    save("papers/offloading", {"curves": curves, "stated": stated(curves)})
    plot(curves)


def problem_of(chain: Network, budget_bytes: int) -> Problem:
    """A budget on the paper's link."""
    link = symmetric_link(LINK_BYTES_PER_S, shared=True)
    return Problem(chain.chain, chain.costs, budget_bytes, link)


def ratios(chain: Network, share: float) -> Point:
    """Makespans over the lower bound at a share of the memory between least and all."""
    refused, kept = greedy.solve(problem_of(chain, 0)), store_all(problem_of(chain, 0))
    assert isinstance(refused, Infeasible)
    assert isinstance(kept, Infeasible)
    least, most = refused.least_budget_bytes, kept.least_budget_bytes
    problem = problem_of(chain, least + round(share * (most - least)))
    bound_s = lower_bounds(problem).makespan_s
    found: Point = {
        "memory": share,
        "budget_bytes": problem.budget_bytes,
        "bound_s": bound_s,
        "images_per_s_at_bound": chain.batch / bound_s,
    }
    for name, solve in SOLVERS.items():
        found[name] = replayed_s(problem, solve(problem)) / bound_s
    relaxed = greedy.solve(problem, relaxed=True)
    found["partial transfers"] = replayed_s(problem, relaxed, fluid=True) / bound_s
    return found


def replayed_s(problem: Problem, solution: Solution, *, fluid: bool = False) -> float:
    """Time of a schedule within the budget, as the replay finds it."""
    assert isinstance(solution, Solved)
    makespan_s = check(problem, solution.schedule, fluid=fluid).makespan_s
    assert abs(makespan_s - solution.makespan_s) <= 1e-9 * makespan_s
    return makespan_s


def low(curve: list[Point], name: str) -> float:
    """Mean ratio at low memory."""
    return mean(p[name] for p in curve if p["memory"] <= LOW)


def tell(curves: dict[str, list[Point]]) -> None:
    columns = ["network, image", *SOLVERS, "partial transfers"]
    for title, value in (
        (f"makespan over the lower bound, mean up to {LOW:.0%} of the memory", low),
        ("the same, mean over all memory", lambda curve, name: mean(p[name] for p in curve)),
        ("the same, most", lambda curve, name: max(p[name] for p in curve)),
    ):
        rows = [
            [label, *(f"{value(curve, name):.3f}" for name in columns[1:])]
            for label, curve in curves.items()
        ]
        show(title, columns, rows)


def stated(curves: dict[str, list[Point]]) -> list[dict[str, str | bool]]:
    """What section 6.2 states, and what came out."""
    stated = Stated()
    note = stated.note

    for other in ("GREEDY", "DYNPROG"):
        worse = [
            label for label, curve in curves.items() if low(curve, "VDNN") >= low(curve, other)
        ]
        text = f"VDNN is worse than {other} at low memory"
        note(text, f"on {len(worse)} of {len(curves)} networks", len(worse) == len(curves))
        points = [p for curve in curves.values() for p in curve]
        better = sum(p[other] <= p["VDNN"] for p in points)
        text = f"{other} outperforms VDNN in most cases"
        note(text, f"not slower at {better} of {len(points)} points", better > len(points) / 2)
    deep = [label for label in curves if label.startswith(("densenet161", "densenet201"))]
    behind = [
        label for label in deep if low(curves[label], "DYNPROG") > low(curves[label], "GREEDY")
    ]
    text = "on the largest DenseNets DYNPROG suffers from rounding"
    note(text, f"behind GREEDY at low memory on {len(behind)} of {len(deep)}", bool(behind))
    most = max(p["DYNPROG"] for label in deep for p in curves[label])
    note("still, it remains below 1.3 there", f"at most {most:.2f}", most < 1.3)
    return stated.shown()


def plot(curves: dict[str, list[Point]]) -> None:
    drawing = pyplot()
    if drawing is None:
        return
    rows = -(-len(curves) // 5)
    figure, axes = drawing.subplots(rows, 5, figsize=(18, 2.8 * rows), squeeze=False)
    for axis, (label, curve) in zip(axes.flat, curves.items(), strict=False):
        for name in (*SOLVERS, "partial transfers"):
            style = ":" if name == "partial transfers" else "-"
            axis.plot([p["memory"] for p in curve], [p[name] for p in curve], style, label=name)
        axis.set_title(label)
        axis.set_ylim(bottom=1.0)
    axes[0][0].legend(fontsize=7)
    figure.supxlabel("memory: 0 the least, 1 keeps everything")
    figure.supylabel("makespan / lower bound")
    figure.tight_layout()
    path = RESULTS / "papers" / "offloading.png"
    figure.savefig(path, dpi=80)
    print(f"wrote {path}")


if __name__ == "__main__":
    main()
