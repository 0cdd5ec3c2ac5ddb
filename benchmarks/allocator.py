"""How much more CUDA's caching allocator hands out than is asked for, in its model.

Each model is planned on the CPU as if torch's allocator of CUDA handed out its memory: at the
least feasible budget, halfway to the peak with everything kept, and there. Told are, beside the
sum of what a step holds, the allocated and the reserved peak, and the same with every tensor of
the plan 64 times as large: the models are small, and most of their tensors lie in the small pool.
All bytes are exact; which schedules are chosen depends on seconds measured here.

Run: python -m benchmarks.allocator [model …]
"""

from __future__ import annotations

import argparse
import time
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch

from benchmarks.common import save, show
from benchmarks.steps import entry_of
from fxremat.planner.allocator import allocations
from fxremat.planner.allocator.allocations import Allocated, Allocations, Requests, requests_of_step
from fxremat.planner.allocator.allocator import AllocatorSettings
from fxremat.planner.decision.candidates import Candidate
from fxremat.planner.search.search import Search
from fxremat.progress import silent
from fxremat.units import format_bytes
from tests.harness import capture
from tests.models.reference import call_without_trace

RULES = {
    "usual": AllocatorSettings(),
    "expandable": AllocatorSettings(expandable_segments=True),
}

SHARES = (0.0, 0.5, 1.0)
"""Of the way from the least feasible budget to the peak with everything kept."""

LARGER = 64
"""Times as many bytes in every request, and in the budget."""

MODELS = (
    "gpt16", "llama8", "hf_gpt2", "hf_t5", "hf_clip", "hf_vit", "resnet50", "densenet121",
    "unet", "wavenet", "gru", "siamese", "coca",
)  # fmt: skip


def search_of(name: str) -> Search:
    """All candidates of a model's step."""
    entry = entry_of(name)
    model = entry.build()
    args, kwargs = entry.sample(0)
    if entry.hooks_at_first_call:
        call_without_trace(entry, model)
    with entry.context("cpu"):
        step = capture(model, args, kwargs)
    return Search.over(step.measured, step.blocks, step.context_bytes, progress=silent)


def larger(requests: Requests) -> Requests:
    """The same, each of more bytes."""

    def scaled(asked: tuple[tuple[int, int], ...]) -> tuple[tuple[int, int], ...]:
        return tuple((key, nbytes * LARGER) for key, nbytes in asked)

    return replace(
        requests,
        given_bytes=tuple(nbytes * LARGER for nbytes in requests.given_bytes),
        calls=tuple(map(scaled, requests.calls)),
        loss_point=scaled(requests.loss_point),
        end=scaled(requests.end),
        cleared=scaled(requests.cleared),
        unplaced_bytes=requests.unplaced_bytes * LARGER,
    )


def replayed(requests: Requests, rules: AllocatorSettings) -> tuple[Allocated, bool, float]:
    """What is taken, whether more steps take no more, and microseconds a request."""
    begin = time.perf_counter()
    taken = allocations.replay_requests(requests, rules)
    seconds = time.perf_counter() - begin
    count = len(requests.given_bytes) + allocations.STEPS * sum(1 for _ in requests)
    with patch.object(allocations, "STEPS", 2 * allocations.STEPS):
        steady = allocations.replay_requests(requests, rules) == taken
    return taken, steady, seconds / count * 1e6


def row(search: Search, chosen: Candidate, rules: str) -> dict[str, Any]:
    """The bytes of one plan."""
    found = search.allocations
    program = search.evaluator.program(chosen)
    requests = requests_of_step(program, found.context_bytes, found.footprints)
    taken, steady, microseconds = replayed(requests, RULES[rules])
    large, large_steady, _ = replayed(larger(requests), RULES[rules])
    held = chosen.peak_bytes
    assert held <= taken.allocated_bytes <= taken.reserved_bytes
    return {
        "held_bytes": held,
        "allocated_bytes": taken.allocated_bytes,
        "reserved_bytes": taken.reserved_bytes,
        "slack": taken.allocated_bytes / held - 1,
        "larger_slack": large.allocated_bytes / (held * LARGER) - 1,
        "larger_reserved_slack": large.reserved_bytes / (held * LARGER) - 1,
        "steady": steady and large_steady,
        "requests": sum(1 for _ in requests),
        "microseconds": microseconds,
    }


def measure(name: str) -> list[dict[str, Any]]:
    """One row for each set of rules and budget."""
    torch._dynamo.reset()
    plain = search_of(name)
    rows = []
    for rules, settings in RULES.items():
        found = plain.allocations
        search = replace(
            plain, allocations=Allocations(found.footprints, found.context_bytes, settings)
        )
        begin = time.perf_counter()
        least, full = search.least_bytes, search.counted_bytes(search.baseline)
        for share in SHARES:
            budget_bytes = least + int(share * (full - least))
            chosen = search.fastest_within(budget_bytes)
            about = {"model": name, "rules": rules, "share": share, "budget_bytes": budget_bytes}
            rows.append({**about, **row(search, chosen, rules)})
        for each in rows[-len(SHARES) :]:
            each["candidates"] = len(search.pool.members)
            each["replayed"] = len(search.allocations.replayed)
            each["choosing_s"] = time.perf_counter() - begin
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="*", default=MODELS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows: list[dict[str, Any]] = []
    for name in options.models:
        rows += measure(name)
        print(name)
    show(
        "CUDA's allocator beside the sum of what a step holds",
        ("model", "rules", "budget", "held", "allocated", "reserved", "slack", "64 ×", "reserved"),
        [
            [
                found["model"],
                found["rules"],
                f"{found['share']:.0%}",
                *(
                    format_bytes(found[f"{what}_bytes"])
                    for what in ("held", "allocated", "reserved")
                ),
                *(
                    f"{found[key]:.2%}"
                    for key in ("slack", "larger_slack", "larger_reserved_slack")
                ),
            ]
            for found in rows
        ],
    )
    steady = sum(found["steady"] for found in rows)
    print(f"two steps take as much as four in {steady} of {len(rows)} plans")
    if options.models == MODELS:
        save("allocator", rows)


if __name__ == "__main__":
    main()
