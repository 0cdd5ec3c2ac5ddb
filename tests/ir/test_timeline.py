"""A timeline as a list of actions: calls in their order, each transfer where it is issued."""

from __future__ import annotations

import pytest

import fxremat
from fxremat.ir import Compute, Free, Move, Offload, Part, Prefetch, Wait
from fxremat.report.plan import Plan
from tests.models import ZOO


@pytest.fixture(scope="module")
def plan() -> Plan:
    entry = ZOO["unet"]
    sample = fxremat.Sample(*entry.sample(0))
    return fxremat.plan(entry.build(), sample, "min", offload="only", loss=entry.loss)


def test_each_storage_leaves_and_comes_back_where_the_plan_says(plan: Plan) -> None:
    moves = plan.decision.moves
    assert moves
    places: dict[str, dict[type, int]] = {}
    call = 0
    for op in plan.actions:
        if isinstance(op, Compute):
            call += 1
            continue
        assert op.what.part is Part.SAVED and op.what.name
        assert type(op) not in places.setdefault(op.what.name, {})
        places[op.what.name][type(op)] = call

    def of(move: Move) -> dict[type, int]:
        return dict(
            zip(
                (Offload, Free, Prefetch, Wait),
                (move.offload, move.release, move.prefetch, move.wait),
                strict=True,
            )
        )

    found = sorted(map(sorted, (own.values() for own in places.values())))
    assert found == sorted(sorted(of(move).values()) for move in moves)


def test_calls_are_those_of_the_schedule_and_in_its_order(plan: Plan) -> None:
    ran = list(plan.actions.computations)
    rest = iter(plan.schedule)
    assert all(any(op == other for other in rest) for op in ran)


def test_it_is_printed_and_compared(plan: Plan) -> None:
    text = str(plan.actions)
    first = next(op for op in plan.actions if isinstance(op, Offload))
    assert f"offload {first.what.name}" in text and f"wait {first.what.name}" in text
    assert plan.actions == plan.actions
