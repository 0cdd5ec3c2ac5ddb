"""What offloading adds to recomputation: "Efficient combination of rematerialization and
offloading for training DNNs", on measured chains.

Run: python -m benchmarks.papers.pofo [network …] [--stages N] [--chains FOLDER]

Everything here is simulated; nothing was run on a GPU. ``fxremat.compile`` captures real models
and gives their chains. Sizes are exact. Seconds are those of this machine's processor, times
one factor a network and device, so that a step that keeps everything takes what its operations
would: counted by ``torch.utils.flop_counter`` and as the bytes that every operation reads and
writes, at round shares of what the device has at most (``measured.DEVICES``). So the stages' times
have the proportions that they have here.

Two settings: a V100 in float32 behind a link of 12 GB/s, and an H200 in TF32 behind one of
55 GB/s, each way, both at once.

Parameters and one set of their gradients are there during the whole step, as in the papers.
The rest of the peak of a step that keeps everything is called the memory of its activations;
budgets are shares of it. Neighbouring stages are merged (``coarse``), which is safe: what is
planned for groups of stages holds for the stages. Save options are left out, as the papers
have none.

Every schedule is replayed (``tests.reference.simulate``) within the budget, with whole transfers:

* rotor: ``solvers.rotor`` with many slots, no transfers;
* offload-only: the faster one of ``dp`` and ``greedy`` of ``solvers.papers.offload``;
* pofo: the best of ``solvers.papers.pofo`` with a few numbers of slots, for the budget and for
  some a little tighter (whole transfers take more memory than the fluid ones it plans with), and
  the bound that it gives for fluid transfers and sizes in the most slots.

Overheads are over the step that keeps everything. A second table has those of what
``fxremat.compile`` plans (``compiled``).
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.common import RESULTS, pyplot, save, show
from benchmarks.papers import compiled
from benchmarks.papers.coarse import coarsen, refined
from benchmarks.papers.measured import DEVICES, NETWORKS, Captured, Device, captured
from fxremat.ir import Chain, Costs, Infeasible, Problem, Solution, Solved
from fxremat.solvers import rotor, store_all
from fxremat.solvers.papers import pofo
from fxremat.solvers.papers.offload import dp, greedy
from tests.paper_terms import symmetric_link
from tests.reference.simulate import check, simulate

SHARES = (0.5, 0.33, 0.25, 0.2, 0.15, 0.1)
QUARTER = 0.25
LIMIT = 0.2
"""What the paper's abstract calls affordable: 20 % more time."""

TIGHTER = (0.95, 0.9, 0.85, 0.8)
"""Shares of what a budget leaves free, for which pofo plans as well."""

ROTOR_SLOTS = 2000

Row = dict[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(description="pofo beside rotor and offloading alone")
    parser.add_argument("networks", nargs="*", help="beginnings of names; else all")
    parser.add_argument("--stages", type=int, default=24, help="most groups of stages")
    parser.add_argument(
        "--slots", type=int, nargs="+", default=[50, 200], help="of pofo, each tried"
    )
    parser.add_argument("--labels", type=int, default=200, help="of pofo")
    parser.add_argument("--chains", type=Path, help="folder that keeps what was measured")
    options = parser.parse_args()
    networks: list[Row] = []
    rows: list[Row] = []
    plans: list[Row] = []
    wanted = tuple(options.networks) or ("",)
    for entry in (entry for entry in NETWORKS if entry.name.startswith(wanted)):
        found = captured(entry, options.chains)
        chain, costs, cuts = coarsen(found.chain, found.costs, stages=options.stages)
        groups = replace(found, chain=chain, costs=costs)
        for device in DEVICES:
            about, points = curve(found, groups, cuts, device, options.slots, options.labels)
            networks.append(about)
            rows += points
        plans += compiled.plans(entry, SHARES)
    tell(rows)
    tell_plans(plans)
    print("Simulated: sizes from captured models, seconds scaled; nothing ran on a GPU.")
    results = {
        "what": "simulated, not measured on any GPU: sizes of captured models are exact, "
        "seconds are of the machine above, times 'factor'",
        "devices": [
            {name: getattr(d, name) for name in Device.__dataclass_fields__} for d in DEVICES
        ],
        "load_average": os.getloadavg()[0],
        "settings": {"stages": options.stages, "slots": options.slots, "labels": options.labels},
        "networks": networks,
        "points": rows,
        "plans": plans,
        "stated": stated(rows, plans),
    }
    save("papers/pofo", results)
    plot(rows, plans)


def curve(
    fine: Captured,
    groups: Captured,
    cuts: tuple[int, ...],
    device: Device,
    slots: list[int],
    labels: int,
) -> tuple[Row, list[Row]]:
    """All budgets of one network on one device."""
    costs, fine_costs = groups.on(device), fine.on(device)
    everything = store_all.solve(Problem(groups.chain, costs, 1 << 60))
    assert isinstance(everything, Solved)
    kept = simulate(groups.chain, costs, everything.schedule)
    activation_bytes = kept.peak_bytes - costs.fixed_bytes
    about = {
        "network": fine.name,
        "device": device.name,
        "stages": len(fine.chain),
        "groups": len(groups.chain),
        "flop": fine.work.flop,
        "traffic_bytes": fine.work.nbytes,
        "step_s": kept.makespan_s,
        "factor": kept.makespan_s / sum(s.forward_s + s.backward_s for s in fine.costs.stages),
        "fixed_bytes": costs.fixed_bytes,
        "activation_bytes": activation_bytes,
    }
    link = symmetric_link(device.link_bytes_per_s)
    rows = []
    for share in SHARES:
        problem = Problem(
            groups.chain, costs, costs.fixed_bytes + int(activation_bytes * share), link
        )
        row = {
            "network": fine.name,
            "device": device.name,
            "share": share,
            "kept_s": kept.makespan_s,
            **point(problem, slots=slots, labels=labels),
        }
        check_refined(row, problem, fine.chain, fine_costs, cuts)
        rows.append(row)
        print(brief(row), flush=True)
    return about, rows


def point(problem: Problem, *, slots: list[int], labels: int) -> Row:
    """What each solver finds for one problem, replayed."""
    alone = replace(problem, link=None)
    row: Row = {"budget_bytes": problem.budget_bytes}
    row["rotor"] = replayed(alone, [rotor.solve(alone, slots=ROTOR_SLOTS)])
    row["offload"] = replayed(problem, [dp.solve(problem), greedy.solve(problem)])
    start = time.perf_counter()
    found = [pofo.explore(problem, slots=n, labels=labels) for n in slots]
    fixed_bytes = problem.costs.fixed_bytes
    room_bytes = problem.budget_bytes - fixed_bytes
    for share in TIGHTER:
        tighter = replace(problem, budget_bytes=fixed_bytes + int(share * room_bytes))
        more = (pofo.explore(tighter, slots=n, labels=labels) for n in slots)
        found += [each for each in more if isinstance(each, pofo.Outcome)]
    row["search_s"] = time.perf_counter() - start
    row["pofo"] = replayed(
        problem,
        [
            each.whole(problem.budget_bytes) if isinstance(each, pofo.Outcome) else each
            for each in found
        ],
    )
    own = found[: len(slots)]
    outcomes = [each for each in own if isinstance(each, pofo.Outcome)]
    if outcomes:  # bounds hold for sizes in slots: the finest are the nearest to bytes
        row |= {"fluid_s": min(each.seconds for each in outcomes), "bound_s": outcomes[-1].bound_s}
        row["exact"] = outcomes[-1].exact
    return row


def replayed(problem: Problem, solutions: Iterable[Solution]) -> Row:
    """Time and peak of the fastest, as the replay says; or the least budget."""
    best: Row = {}
    for solution in solutions:
        if isinstance(solution, Infeasible):
            least = solution.least_budget_bytes
            best = best or {"least_budget_bytes": least}
            continue
        assert isinstance(solution, Solved)
        timeline = check(problem, solution.schedule)
        assert timeline.peak_bytes <= problem.budget_bytes
        if timeline.makespan_s < best.get("makespan_s", float("inf")):
            best = {"makespan_s": timeline.makespan_s, "peak_bytes": timeline.peak_bytes}
    return best


def check_refined(
    row: Row, problem: Problem, chain: Chain, costs: Costs, cuts: tuple[int, ...]
) -> None:
    """What rotor planned for groups, replayed on the stages: no more memory, as long."""
    solution = rotor.solve(replace(problem, link=None), slots=ROTOR_SLOTS)
    if not isinstance(solution, Solved):
        return
    stages = simulate(chain, costs, refined(solution.schedule.computations, cuts))
    assert stages.peak_bytes <= problem.budget_bytes
    assert abs(stages.makespan_s - row["rotor"]["makespan_s"]) <= 1e-9 * stages.makespan_s


def overhead(row: Row, who: str) -> float | None:
    """Of a solver, if it has a schedule."""
    seconds = row[who].get("makespan_s")
    return None if seconds is None else seconds / row["kept_s"] - 1


def removed(row: Row) -> float | None:
    """The share of rotor's overhead that pofo does not have."""
    before, after = overhead(row, "rotor"), overhead(row, "pofo")
    return None if not before or after is None else 1 - after / before


def behind(row: Row) -> float | None:
    """By how much pofo is slower than the faster of the other two; below 0: it is faster."""
    others = [row[who]["makespan_s"] for who in ("rotor", "offload") if "makespan_s" in row[who]]
    if "makespan_s" not in row["pofo"]:
        return float("inf") if others else None
    return row["pofo"]["makespan_s"] / min(others) - 1 if others else None


def never_slower(row: Row) -> bool:
    """Whether pofo is as fast as both others, but for rounding of sums."""
    late = behind(row)
    return late is None or late <= 1e-9


def percent(value: float | None) -> str:
    return "–" if value is None else f"{value:.1%}"


def brief(row: Row) -> str:
    """A row in a line."""
    values = ", ".join(f"{who} {percent(overhead(row, who))}" for who in SOLVERS)
    return f"{row['network']}, {row['device']}, {row['share']}: {values}; {row['search_s']:.0f} s"


SOLVERS = ("rotor", "offload", "pofo")


def tell(rows: list[Row]) -> None:
    columns = [
        "network",
        "device, link",
        "budget",
        "rotor",
        "offload-only",
        "pofo",
        "bound",
        "removed",
        "pofo <= both",
    ]
    lines = []
    for row in rows:
        bound = row["bound_s"] / row["kept_s"] - 1 if "bound_s" in row else None
        late = behind(row)
        verdict = "yes" if never_slower(row) else f"NO, {late:+.2%}"
        lines.append(
            [
                row["network"],
                row["device"],
                f"{row['share']:.0%}",
                *(percent(overhead(row, who)) for who in SOLVERS),
                percent(bound),
                percent(removed(row)),
                "–" if late is None else verdict,
            ]
        )
    show("Overhead at shares of the activations' memory, simulated", columns, lines)


def tell_plans(plans: list[Row]) -> None:
    shown = [
        [
            row["network"],
            row["device"],
            f"{row['share']:.0%}",
            *(percent(row[way]) for way in compiled.WAYS),
            percent(compiled.removed(row)),
        ]
        for row in plans
    ]
    columns = ["network", "device, link", "budget", *compiled.WAYS, "removed"]
    show("Overhead of what compile plans, simulated", columns, shown)


def stated(rows: list[Row], plans: list[Row]) -> list[dict[str, str | bool]]:
    """What is promised and what the paper states, and what came out."""
    lines: list[dict[str, str | bool]] = []

    def note(text: str, found: str, holds: bool) -> None:
        lines.append({"stated": text, "found": found, "holds": holds})

    late = [row for row in rows if not never_slower(row)]
    worst = max((behind(row) or 0.0 for row in late), default=0.0)
    found = f"slower at {len(late)} of {len(rows)} points, at most by {worst:.2%}"
    note("pofo is never slower than rotor or offloading alone", found, not late)
    behinds = [compiled.behind(row) for row in plans]
    slower = [value for value in behinds if value > 1e-9]
    found = f"slower at {len(slower)} of {len(plans)} points"
    note("compile: both are never slower than one alone", found, not slower)
    for device in DEVICES:
        mine = [row for row in rows if row["device"] == device.name]
        overheads = {r["network"]: overhead(r, "pofo") for r in mine if r["share"] == QUARTER}
        shares = [s for r in mine if (s := removed(r)) is not None]
        lines += stated_of(device.name, overheads, shares)
        own = [row for row in plans if row["device"] == device.name]
        overheads = {row["network"]: row["both"] for row in own if row["share"] == QUARTER}
        shares = [s for row in own if (s := compiled.removed(row)) is not None]
        lines += stated_of(f"compile, {device.name}", overheads, shares)
    show(
        "What is stated",
        ["stated", "found", ""],
        [[str(x["stated"]), str(x["found"]), "yes" if x["holds"] else "NO"] for x in lines],
    )
    return lines


def stated_of(
    what: str, overheads: dict[str, float | None], shares: list[float]
) -> list[dict[str, str | bool]]:
    """At a quarter of the activations, and on average over all budgets."""
    held = [value is not None and value <= LIMIT for value in overheads.values()]
    found = ", ".join(f"{name} {percent(value)}" for name, value in overheads.items())
    text = f"{what}: a quarter of the activations, at most 20 % more time"
    quarter: dict[str, str | bool] = {"stated": text, "found": found, "holds": all(held)}
    mean = sum(shares) / len(shares) if shares else 0.0
    spread = f", {min(shares):.0%} … {max(shares):.0%}" if shares else ""
    return [
        quarter,
        {
            "stated": f"{what}: a third of the overhead of recomputing is removed, on average",
            "found": f"{mean:.0%}{spread}",
            "holds": mean >= 1 / 3,
        },
    ]


def plot(rows: list[Row], plans: list[Row]) -> None:
    """Draw overhead over memory, if matplotlib is there."""
    drawing = pyplot()
    if drawing is None:
        return
    names = list(dict.fromkeys(row["network"] for row in rows))
    figure, axes = drawing.subplots(
        len(DEVICES), len(names), figsize=(16, 7), squeeze=False, constrained_layout=True
    )
    for line, device in zip(axes, DEVICES, strict=True):
        for axis, name in zip(line, names, strict=True):
            mine = [r for r in rows if (r["network"], r["device"]) == (name, device.name)]
            for who, style in zip(SOLVERS, ("^-", "s-", "o-"), strict=True):
                points = [
                    (r["share"], over) for r in mine if (over := overhead(r, who)) is not None
                ]
                axis.plot([p[0] for p in points], [100 * p[1] for p in points], style, label=who)
            bounds = [(r["share"], r["bound_s"] / r["kept_s"] - 1) for r in mine if "bound_s" in r]
            axis.plot([p[0] for p in bounds], [100 * p[1] for p in bounds], ":", label="bound")
            own = [p for p in plans if (p["network"], p["device"]) == (name, device.name)]
            for way, style in zip(("recomputing", "both"), ("^--", "o--"), strict=True):
                kept = [p for p in own if p[way] is not None]
                label = f"compile, {way}"
                axis.plot(
                    [p["share"] for p in kept], [100 * p[way] for p in kept], style, label=label
                )
            axis.axhline(100 * LIMIT, color="grey", linewidth=0.5)
            axis.set(title=f"{name}\n{device.name}, simulated", ylim=(-2, 102))
    axes[0][0].legend()
    figure.supxlabel("budget, share of the activations' memory")
    figure.supylabel("more time than keeping everything, %")
    path = RESULTS / "papers" / "pofo.png"
    figure.savefig(path, dpi=90)
    print(f"wrote {path}")


if __name__ == "__main__":
    main()
