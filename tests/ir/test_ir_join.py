from __future__ import annotations

import math
import re
from dataclasses import replace

import pytest

from fxremat.ir import (
    Chain,
    Join,
    JoinCosts,
    JoinProblem,
    Stage,
    StageCosts,
    Storage,
)
from tests.joins import two_towers

COST = StageCosts(1.0, 1.0, 1.0, 1, 1, 1, 1, 1)


def test_stages_are_numbered_branch_after_branch() -> None:
    join = two_towers().join
    assert len(join) == 7
    assert join.first_stages == (0, 2, 5, 7)


def test_from_sizes_shares_nothing_but_the_ends() -> None:
    join = two_towers().join
    assert [join.nbytes(b) for b in join.trunk.boundaries] == [43, 100, 0]
    assert [join.nbytes(tuple(join.branches[1].saved_set(i))) for i in range(3)] == [50, 60, 70]
    ids = [i for line in join.branches for b in line.boundaries for i in b]
    assert len(set(ids)) == len(ids)


def line(
    storages: tuple[Storage, ...], *boundaries: tuple[int, ...], saved: tuple[int, ...] = ()
) -> Chain:
    stages = tuple(Stage("stage", saved, 0) for _ in boundaries[1:])
    return Chain(storages, boundaries, stages)


FOUR = tuple(Storage(1) for _ in range(6))
LEFT, RIGHT = line(FOUR, (0,), (1,)), line(FOUR, (2,), (3,))
TRUNK = line(FOUR, (1, 3), (4,))


@pytest.mark.parametrize(
    ("malformed", "message"),
    [
        (Join((), TRUNK), "join.branches is empty"),
        (
            Join((LEFT, RIGHT), line(FOUR, (3, 1), (4,))),
            r"is \(3, 1\), .* in \(1, 3\)",
        ),
        (Join((LEFT, RIGHT), line(FOUR, (1,), (4,))), r"join.trunk.boundaries\[0\] is \(1,\)"),
        (Join((LEFT, line(FOUR, (2,))), TRUNK), r"join.branches\[1\].stages is empty"),
        (Join((LEFT, line(FOUR[1:], (2,), (3,))), TRUNK), r"branches\[1\].storages differs"),
        (
            Join((LEFT, line(FOUR, (0,), (3,))), TRUNK),
            r"join.branches\[1\] has storage 0, which join.branches\[0\] has",
        ),
        (
            Join((LEFT, line(FOUR, (2,), (3,), saved=(5,))), line(FOUR, (1, 3), (5,))),
            r"join.trunk has storage 5, which join.branches\[1\] has",
        ),
        (
            Join((LEFT, line(FOUR, (2,), (9,))), TRUNK),
            r"join.branches\[1\].boundaries\[1\] names storage 9, unknown",
        ),
        (
            Join((line((Storage(-1), *FOUR[1:]), (0,), (1,)),), line(FOUR, (1,), (4,))),
            "differs from join.trunk.storages",
        ),
    ],
)
def test_a_malformed_join_is_named(malformed: Join, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        JoinProblem(malformed, JoinCosts(((COST,), (COST,)), (COST,)), 0)


def test_a_negative_size_is_named() -> None:
    storages = (Storage(1), Storage(-2), *FOUR[2:])
    join = Join((line(storages, (0,), (1,)),), line(storages, (1,), (4,)))
    with pytest.raises(ValueError, match=r"join.branches\[0\].storages\[1\].nbytes is -2"):
        JoinProblem(join, JoinCosts(((COST,),), (COST,)), 0)


@pytest.mark.parametrize(
    ("costs", "message"),
    [
        (JoinCosts(((COST,),), (COST,)), "costs.branches has 1 entries, expected 2"),
        (JoinCosts(((COST,), ()), (COST,)), r"costs.branches\[1\] has 0 entries, expected 1"),
        (JoinCosts(((COST,), (COST,)), ()), "costs.trunk has 0 entries, expected 1"),
        (
            JoinCosts(((COST,), (replace(COST, backward_s=math.nan),)), (COST,)),
            r"costs.branches\[1\]\[0\].backward_s is nan, must be finite",
        ),
        (
            JoinCosts(((COST,), (COST,)), (replace(COST, rebuild_bytes=-1),)),
            r"costs.trunk\[0\].rebuild_bytes is -1",
        ),
        (
            JoinCosts(((COST,), (COST,)), (COST,), done_bytes=(1,)),
            "costs.done_bytes has 1 entries, expected 2",
        ),
        (
            JoinCosts(((COST,), (COST,)), (COST,), done_bytes=(1, -1)),
            r"costs.done_bytes\[1\] is -1",
        ),
        (JoinCosts(((COST,), (COST,)), (COST,), fixed_bytes=-1), "costs.fixed_bytes is -1"),
        (JoinCosts(((COST,), (COST,)), (COST,), trunk_done_bytes=-1), "trunk_done_bytes is -1"),
    ],
)
def test_malformed_costs_are_named(costs: JoinCosts, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        JoinProblem(Join((LEFT, RIGHT), TRUNK), costs, 0)


@pytest.mark.parametrize("value", [-1, math.nan, math.inf, 0.5])
def test_bytes_are_whole_numbers(value: float) -> None:
    with pytest.raises(ValueError, match=f"budget_bytes is {value}"):
        replace(two_towers(), budget_bytes=value)
    join = Join((LEFT, RIGHT), TRUNK)
    plain = JoinCosts(((COST,), (COST,)), (COST,))
    for name, given in (
        ("fixed_bytes", value),
        ("trunk_done_bytes", value),
        ("done_bytes", (1, value)),
    ):
        at = "[1]" if name == "done_bytes" else ""
        with pytest.raises(ValueError, match=rf"costs.{name}{re.escape(at)} is {value}"):
            JoinProblem(join, replace(plain, **{name: given}), 0)
