"""Throughput over memory of "Optimal checkpointing for heterogeneous chains", section 5.4.

Run: python -m benchmarks.papers.rotor

Chains of ResNet, DenseNet and Inception v3 with costs derived from their architectures (see
``networks``); the paper measured its own on a V100. The four strategies of section 5.3:
everything kept (*PyTorch*), ``checkpoint_sequential`` with 2 to 2 sqrt(L) segments
(*sequential*), *revolve* and rotor (*optimal*), the last two at ten memory limits up to what
PyTorch takes. Sizes are rounded up to 1/1500th of the memory or less; the paper took 500
slots. Every point is a schedule that was replayed (``tests.reference.simulate``); memory is the
peak of the replay, and throughput is images over its makespan. What the text says about the figures
is checked, and reported beside what was found.
"""

from __future__ import annotations

import math
import statistics
from typing import Any

from benchmarks.common import RESULTS, Stated, pyplot, save, show
from benchmarks.papers.networks import NAMES, Network, network
from fxremat.ir import Problem, Solution, Solved
from fxremat.solvers import store_all
from fxremat.solvers.papers import periodic, revolve
from fxremat.solvers.rotor import RotorTable
from tests.reference.simulate import check, simulate

GIB = 1 << 30
TABLE_BYTES = 1 << 26
LIMITS = 10
MORE = (0, 0.001, 0.002, 0.005, 0.01, 0.02)
SIZES = ((224, 32), (500, 8), (1000, 2))
"""Height and width of an image, and images in a step."""

DRAWN = (
    "resnet101, 1000",
    "resnet152, 224",
    "densenet161, 500",
    "densenet201, 224",
    "inception_v3, 224",
    "resnet18, 224",
)
STYLES = {"PyTorch": "rs", "sequential": "x", "revolve": "o-", "optimal": "^-"}

Point = dict[str, float]


def main() -> None:
    results: dict[str, Any] = {}
    for image, batch in SIZES:
        for name in NAMES:
            found = network(name, image=image, batch=batch)
            results[f"{name}, {image}"] = strategies(found)
    show_chains(results)
    save("papers/rotor", {"chains": results, "stated": stated(results)})
    plot(results)


def strategies(of: Network) -> dict[str, Any]:
    """The points of every strategy on one chain."""
    problem = Problem(of.chain, of.costs, 1 << 60)
    kept = point(of, problem.budget_bytes, store_all.solve(problem))
    full_bytes = int(kept["peak_bytes"])
    slots = slots_for(of)
    table = RotorTable.build(
        of.chain, of.costs, max_budget_bytes=int(full_bytes * 1.03), slots=slots
    )
    most = min(len(of.chain), int(2 * math.sqrt(len(of.chain))))
    sequential = []
    for segments in range(2, most + 1):
        at = point(of, problem.budget_bytes, periodic.solve(problem, segments=segments))
        budget_bytes = min(int(at["peak_bytes"]), full_bytes)
        best = point(of, budget_bytes, rotor_at(of, table, budget_bytes))
        sequential.append(
            {**at, "segments": segments, "optimal_images_per_s": best["images_per_s"]}
        )
    limits = [full_bytes * k // LIMITS for k in range(1, LIMITS + 1)]
    revolved = {n: revolve.solve(Problem(of.chain, of.costs, n), slots=slots) for n in limits}
    optimal = {n: rotor_at(of, table, n) for n in limits if n >= table.least_budget_bytes}
    return {
        "stages": len(of.chain),
        "batch": of.batch,
        "least_bytes": table.least_budget_bytes,
        "PyTorch": [kept],
        "sequential": sequential,
        "revolve": [point(of, n, s) for n, s in revolved.items() if isinstance(s, Solved)],
        "optimal": [point(of, n, s) for n, s in optimal.items()],
    }


def slots_for(of: Network) -> int:
    """As many as make a table of ``TABLE_BYTES``."""
    return TABLE_BYTES // 8 // (len(of.chain) * (len(of.chain) + 1) // 2)


def rotor_at(of: Network, table: RotorTable, budget_bytes: int) -> Solution:
    """The fastest of some plans for a little more whose replay is within the budget.

    Sizes are rounded up, so a plan often takes less than it was made for. ``fxremat.compile``
    chooses by exact peaks, too.
    """
    plans: list[Solution] = [store_all.solve(Problem(of.chain, of.costs, budget_bytes))]
    plans += [table.schedule(int(budget_bytes * (1 + more))) for more in MORE]
    fitting = [
        found
        for found in plans
        if isinstance(found, Solved)
        and simulate(of.chain, of.costs, found.schedule).peak_bytes <= budget_bytes
    ]
    return min(fitting, key=lambda found: found.makespan_s)


def point(of: Network, budget_bytes: int, found: Solution) -> Point:
    """What the replay of a schedule says."""
    assert isinstance(found, Solved)
    replayed = check(Problem(of.chain, of.costs, budget_bytes), found.schedule)
    return {
        "budget_bytes": budget_bytes,
        "peak_bytes": replayed.peak_bytes,
        "makespan_s": replayed.makespan_s,
        "images_per_s": of.batch / replayed.makespan_s,
    }


def best(points: list[Point]) -> Point:
    """Of greatest throughput."""
    return max(points, key=lambda p: p["images_per_s"])


def gain(chain: dict[str, Any]) -> float:
    """Optimal over sequential, at the memory of sequential's greatest throughput."""
    at = best(chain["sequential"])
    return at["optimal_images_per_s"] / at["images_per_s"] - 1


def show_chains(results: dict[str, Any]) -> None:
    rows = []
    for name, chain in results.items():
        kept, sequential = chain["PyTorch"][0], best(chain["sequential"])
        half = next(p for p in chain["optimal"] if p["budget_bytes"] * 2 >= kept["peak_bytes"])
        rows.append(
            [
                name,
                str(chain["stages"]),
                f"{kept['peak_bytes'] / GIB:.2f}",
                f"{chain['least_bytes'] / kept['peak_bytes']:.2f}",
                f"{kept['images_per_s']:.1f}",
                f"{sequential['images_per_s']:.1f} ({sequential['segments']})",
                f"{sequential['optimal_images_per_s']:.1f} ({gain(chain):+.1%})",
                f"{best(chain['revolve'])['images_per_s']:.1f}",
                f"{half['images_per_s'] / kept['images_per_s'] - 1:.1%}",
            ]
        )
    columns = [
        "chain, image",
        "stages",
        "PyTorch GiB",
        "least",
        "images/s",
        "best sequential (segments)",
        "optimal there",
        "best revolve",
        "at half",
    ]
    show("Throughput over memory, simulated", columns, rows)


def stated(results: dict[str, Any]) -> list[dict[str, str | bool]]:
    """What section 5.4 states, and what came out."""
    stated = Stated()
    note = stated.note
    chains = results.values()

    gains = [gain(chain) for chain in chains]
    text = "17.2 % more throughput than the best of sequential, at its memory, on average"
    mean = statistics.mean(gains)
    found = f"{mean:.1%} ({min(gains):.1%} … {max(gains):.1%})"
    note(text, found, 0.1 <= mean <= 0.25 and min(gains) > 0)
    ratios = [
        p["optimal_images_per_s"] / p["images_per_s"] - 1 for c in chains for p in c["sequential"]
    ]
    text = "optimal outperforms sequential for any given memory peak"
    note(text, f"{min(ratios):+.1%} … {max(ratios):+.1%}", min(ratios) >= 0)
    twos = sum(best(chain["sequential"])["segments"] == 2 for chain in chains)
    text = "sequential is fastest with two segments"
    note(text, f"on {twos} of {len(results)} chains", twos == len(results))
    slower = [
        best(c["revolve"])["images_per_s"] / best(c["sequential"])["images_per_s"] for c in chains
    ]
    text = "revolve, every forward twice, is slower than both others at their best"
    note(text, f"{min(slower):.2f} … {max(slower):.2f} of sequential", max(slower) < 1)
    unused = [
        max(p["peak_bytes"] for p in c["revolve"]) / c["PyTorch"][0]["peak_bytes"] for c in chains
    ]
    text = "revolve is unable to make use of larger memory"
    note(text, f"takes at most {max(unused):.2f} of PyTorch's", max(unused) < 1)
    last = [c["optimal"][-1]["images_per_s"] / c["PyTorch"][0]["images_per_s"] for c in chains]
    text = "at PyTorch's memory optimal is as fast as PyTorch"
    note(text, f"{min(last):.3f} … {max(last):.3f} of it", min(last) > 0.99)
    return stated.shown()


def plot(results: dict[str, Any]) -> None:
    """Draw some of the chains, if matplotlib is there."""
    drawing = pyplot()
    if drawing is None:
        return
    figure, axes = drawing.subplots(2, 3, figsize=(15, 8), constrained_layout=True)
    for axis, name in zip(axes.flat, DRAWN, strict=True):
        for strategy, style in STYLES.items():
            points = results[name][strategy]
            axis.plot(
                [p["peak_bytes"] / GIB for p in points],
                [p["images_per_s"] for p in points],
                style,
                label=strategy,
            )
        title = f"{name}, batch {results[name]['batch']}"
        axis.set(title=title, xlabel="peak memory, GiB", ylabel="images per second")
        axis.legend()
    path = RESULTS / "papers" / "rotor.png"
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    print(f"wrote {path}")


if __name__ == "__main__":
    main()
