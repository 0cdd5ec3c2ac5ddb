"""What ``fxremat.compile`` plans on the devices of ``pofo``: simulated, nothing ran on a GPU.

The paper's chains have whole stages and values. ``compile`` keeps parts of stages, moves single
storages, and counts every byte of the graphs that it would emit. Seconds are those of this
machine's processor, so links are slowed down by the factor by which the device is faster;
computing is taken to be no slower beside copies. Budgets are what parameters, buffers and one
set of gradients take, and a share of the rest of the peak of a step that keeps everything.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from benchmarks.papers.measured import DEVICES, Device, Work, work_of
from benchmarks.steps import static_bytes
from fxremat.ir import MeasuredLink
from fxremat.planner.search.search import Search
from fxremat.planner.transfers.transfers import HostMemory, Transfers
from fxremat.progress import silent
from tests.harness import capture
from tests.models.zoo import ZooModel

WAYS = ("recomputing", "moving", "both")

Row = dict[str, Any]


def plans(entry: ZooModel, shares: tuple[float, ...]) -> list[Row]:
    """Of one network: what each way takes more than keeping everything; ``None``: does not fit."""
    model = entry.build()
    args, kwargs = entry.sample(0)
    step = capture(model, args, kwargs)
    search = Search.over(step.measured, step.blocks, step.context_bytes, progress=silent)
    static, work = static_bytes(model), work_of(entry)
    both = Transfers.of(search, HostMemory())
    only = Transfers.of(search, HostMemory(only=True))
    rows = []
    for device in DEVICES:
        link = slowed(device, work, search.baseline.total_s)
        found = replace(both, link=link), replace(only, link=link)
        for share in shares:
            budget = static + int(share * (search.baseline.peak_bytes - static))
            rows.append(
                {
                    "network": entry.name,
                    "device": device.name,
                    "share": share,
                    "budget_bytes": budget,
                    **overheads(search, *found, budget),
                }
            )
            print(brief(rows[-1]), flush=True)
    return rows


def slowed(device: Device, work: Work, kept_s: float) -> MeasuredLink:
    """The link of ``device`` where a step that keeps everything takes ``kept_s``."""
    rate = device.link_bytes_per_s * device.seconds(work) / kept_s
    return MeasuredLink(rate, rate, rate, slowdown=1.0, shared=False)


def overheads(search: Search, both: Transfers, only: Transfers, budget: int) -> Row:
    """Predicted, of each way, and the bytes that travel with both."""
    kept_s = search.baseline.total_s
    found: Row = dict.fromkeys((*WAYS, "moved_bytes"))
    if budget >= search.least_bytes:
        found["recomputing"] = search.fastest_within(budget).total_s / kept_s - 1
    if budget >= only.least_bytes:
        found["moving"] = only.fastest_within(budget).total_s / kept_s - 1
    if budget >= both.least_bytes:
        chosen = both.fastest_within(budget)
        assert chosen.evaluation.peak_bytes <= budget
        found["both"] = chosen.total_s / kept_s - 1
        found["moved_bytes"] = sum(move.nbytes for move in chosen.moves)
    return found


def removed(row: Row) -> float | None:
    """The share of the overhead of recomputing that is gone with both."""
    before, after = row["recomputing"], row["both"]
    return None if not before or after is None else 1 - after / before


def behind(row: Row) -> float:
    """By how much of a step both are slower than the faster of the others."""
    others = [row[way] for way in WAYS[:2] if row[way] is not None]
    if row["both"] is None:
        return float("inf") if others else 0.0
    return row["both"] - min(others, default=float("inf"))


def brief(row: Row) -> str:
    """A row in a line."""
    values = ", ".join(f"{way} {'–' if row[way] is None else f'{row[way]:.1%}'}" for way in WAYS)
    return f"compile: {row['network']}, {row['device']}, {row['share']}: {values}"
