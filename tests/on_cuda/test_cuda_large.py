"""Steps with the widths of a Llama of 8 billion parameters, on a card of 80 GB that is not there.

Two of its 32 layers for most, so that planning takes a minute; ``benchmarks.large_step`` runs more.
"""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.large_step import MORE_TOKENS, Asked, Case, holds, measure
from benchmarks.rows import Row
from fxremat.planner.allocator.allocations import Requests
from tests.on_cuda.stood_in import needs_stand_in

SECONDS = 1500.0


def rows_of(**case: Any) -> list[Row]:
    return measure(Case(layers=2, **case), seconds=SECONDS)


def on_stand_in(test):
    for mark in (pytest.mark.slow, *needs_stand_in):
        test = mark(test)
    return test


@on_stand_in
@pytest.mark.parametrize(
    ("trained", "placement"),
    [
        ("full", "device"),
        ("full", "activations"),
        ("full", "all state"),
        ("lora", "device"),
        ("lora", "activations"),
    ],
)
def test_a_step_allocates_requests_and_pins_what_was_promised(trained: str, placement: str):
    budget = "12 GiB" if trained == "full" else "10 GiB"
    (row,) = rows_of(trained=trained, placement=placement, budget=budget, tokens=8192)
    assert holds(row), row
    assert row["touched_bytes"] < row["allocated_bytes"] // 4, "memory of the device was touched"
    assert (row["promised_host_bytes"] > 0) == (placement != "device")


@on_stand_in
@pytest.mark.parametrize("trained", ["full", "lora"])
def test_the_longest_sequence_trains_and_a_longer_one_is_refused(trained: str):
    longest, refused = rows_of(trained=trained, budget="12 GiB", mask=False)
    assert holds(longest), longest
    assert longest["tokens"] > 8192
    assert holds(refused), refused
    assert refused["tokens"] == longest["tokens"] + MORE_TOKENS
    assert refused["least_bytes"] > longest["budget_bytes"]


@on_stand_in
@pytest.mark.parametrize("trained", ["full", "lora"])
def test_all_layers_train_on_half_a_million_tokens(trained: str):
    """Operations as a whole, such as the product with all words, take more than the device."""
    case = Case(trained=trained, placement="all state", tokens=500_000, mask=False)
    (row,) = measure(case, seconds=SECONDS)
    assert holds(row), row


KEPT: Row = {
    "allocated_bytes": 9, "promised_bytes": 10, "budget_bytes": 10, "is_longest": False,
    "missing": [], "in_order": True, "promised_host_bytes": 4, "pinned_bytes": 4, "faults": [],
}  # fmt: skip


@pytest.mark.parametrize(
    "broken",
    [
        {"allocated_bytes": 11},
        {"promised_bytes": 11},
        {"missing": None},
        {"missing": [1, 2, 3, 4]},
        {"in_order": False, "promised_host_bytes": 0},
        {"pinned_bytes": 3},
        {"faults": ["a copy touches memory that was given back"]},
        {"failed": "BudgetError"},
        {"refused": False},
    ],
)
def test_what_a_row_may_not_have(broken: Row):
    assert holds(KEPT)
    assert not holds({**KEPT, **broken})


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        ([1024, 2048, 4096], Asked((), in_order=True)),
        ([1024, 4096], Asked((2048,), in_order=True)),
        ([2048, 1024, 4096], Asked((), in_order=False)),
        ([1024, 2048, 4096, 8192], Asked(None)),
    ],
)
def test_requests_are_compared_in_order(asked: list[int], expected: Asked):
    calls = (((0, 1024), (1, 2048), (0, -1024)), ((2, 4000), (3, 8)))
    planned = Requests((), calls, (), 1, (), 0)
    assert Asked.of(asked, [planned]) == expected
    assert Asked.of(asked, []) == Asked(None)
