"""What planned offsets in one slab could save of what CUDA's caching allocator reserves.

Each plan's requests, as the allocator's model is given them, are replayed: what is reserved for
them stands beside the most bytes that are live at once, below which no placing can go, and beside
a slab whose offsets are found greedily (the largest first, each at the lowest offset that is free
for as long as it lives), which is one that can be had. Parameters and all else that a step is given
stay where they are: they are in all three as what they take by themselves. The same with every
tensor 64 times as large, as in ``benchmarks.allocator``: there most lie in the large pool, as in a
model that fills a GPU.

Run: python -m benchmarks.slab [model …]
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch

from benchmarks.allocator import RULES, SHARES, larger, search_of
from benchmarks.common import save, show
from fxremat.planner.allocator.allocations import (
    Allocations,
    Requests,
    replay_requests,
    requests_of_step,
)
from fxremat.units import format_bytes

MODELS = ("gpt16", "llama8", "hf_gpt2", "hf_t5", "hf_vit", "resnet50", "unet", "siamese")


@dataclass(frozen=True, slots=True)
class Life:
    """A block of a step: its size, and the requests at which it begins and ends."""

    nbytes: int
    begin: int
    end: int


def lives_of(requests: Iterable[tuple[int, int]]) -> list[Life]:
    """All blocks of a step, rounded as the allocator rounds them."""
    begun: dict[int, list[tuple[int, int]]] = {}
    found, now = [], 0
    for now, (key, nbytes) in enumerate(requests, start=1):
        if nbytes > 0:
            begun.setdefault(key, []).append((-(-nbytes // 512) * 512, now))
        else:
            size, begin = begun[key].pop()
            found.append(Life(size, begin, now))
    return found + [Life(size, begin, now + 1) for own in begun.values() for size, begin in own]


def live_bytes(lives: Iterable[Life]) -> int:
    """The most at once."""
    changes = sorted(
        change for x in lives for change in ((x.begin, 1, x.nbytes), (x.end, 0, -x.nbytes))
    )
    now = most = 0
    for _, _, nbytes in changes:
        now += nbytes
        most = max(most, now)
    return most


def slab_bytes(lives: Iterable[Life]) -> int:
    """Of a slab in which each has an offset of its own for as long as it lives."""
    placed: list[tuple[int, Life]] = []
    most = 0
    for life in sorted(lives, key=lambda x: (-x.nbytes, x.begin)):
        offset = 0
        beside = [
            (at, at + x.nbytes) for at, x in placed if x.begin < life.end and life.begin < x.end
        ]
        for begin, end in sorted(beside):
            if begin - offset >= life.nbytes:
                break
            offset = max(offset, end)
        placed.append((offset, life))
        most = max(most, offset + life.nbytes)
    return most


def row(requests: Requests, rules: str) -> dict[str, Any]:
    """Bytes of one plan."""
    lives = lives_of(requests)
    given = sum(-(-nbytes // 512) * 512 for nbytes in requests.given_bytes)
    given += requests.unplaced_bytes
    reserved = replay_requests(requests, RULES[rules]).reserved_bytes
    live, slab = live_bytes(lives) + given, slab_bytes(lives) + given
    assert live <= slab
    return {
        "reserved_bytes": reserved,
        "live_bytes": live,
        "slab_bytes": slab,
        "saved_at_most": 1 - live / reserved,
        "saved": 1 - slab / reserved,
    }


def measure(name: str) -> list[dict[str, Any]]:
    """One row for each set of rules, budget and size."""
    torch._dynamo.reset()
    plain = search_of(name)
    rows = []
    for rules, settings in RULES.items():
        found = plain.allocations
        allocations = Allocations(found.footprints, found.context_bytes, settings)
        search = replace(plain, allocations=allocations)
        least, full = search.least_bytes, search.counted_bytes(search.baseline)
        for share in SHARES:
            chosen = search.fastest_within(least + int(share * (full - least)))
            program = search.evaluator.program(chosen)
            requests = requests_of_step(program, found.context_bytes, found.footprints)
            about = {"model": name, "rules": rules, "share": share}
            rows.append({**about, "times": 1, **row(requests, rules)})
            rows.append({**about, "times": 64, **row(larger(requests), rules)})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="*", default=MODELS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows: list[dict[str, Any]] = []
    for name in options.models:
        rows += measure(name)
        print(name, flush=True)
    sizes = ("reserved", "live", "slab")
    show(
        "A slab beside what the allocator reserves",
        ("model", "rules", "budget", "times", *sizes, "saved at most", "saved"),
        [
            [
                found["model"],
                found["rules"],
                f"{found['share']:.0%}",
                str(found["times"]),
                *(format_bytes(found[f"{what}_bytes"]) for what in sizes),
                f"{found['saved_at_most']:.1%}",
                f"{found['saved']:.1%}",
            ]
            for found in rows
        ],
    )
    for rules in RULES:
        for times in (1, 64):
            own = [r for r in rows if (r["rules"], r["times"]) == (rules, times)]
            told = ", ".join(
                f"{key} {statistics.median(r[key] for r in own):.1%} "
                f"[{min(r[key] for r in own):.1%} … {max(r[key] for r in own):.1%}]"
                for key in ("saved_at_most", "saved")
            )
            print(f"{rules}, {times} times as large: {told}")
    if options.models == MODELS:
        save("slab", rows)


if __name__ == "__main__":
    main()
