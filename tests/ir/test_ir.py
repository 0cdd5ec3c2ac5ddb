from __future__ import annotations

import dataclasses
import math

import pytest

from fxremat.ir import (
    Backward,
    Chain,
    Costs,
    Event,
    Forward,
    Keep,
    Problem,
    Schedule,
    Stage,
    StageCosts,
    Storage,
    Timeline,
)
from tests.paper_terms import chain_from_sizes, costs_from_paper, symmetric_link

COST = StageCosts(1.0, 1.0, 1.0, 1, 1, 1, 1, 1)


def chain(
    sizes: tuple[int, ...] = (1, 2, 3),
    boundaries: tuple[tuple[int, ...], ...] = ((0,), (1,), (2,)),
    saved: tuple[tuple[int, ...], ...] = ((), ()),
) -> Chain:
    stages = tuple(Stage(f"stage{i}", ids, i) for i, ids in enumerate(saved))
    return Chain(tuple(map(Storage, sizes)), boundaries, stages)


@pytest.mark.parametrize(
    ("malformed", "message"),
    [
        (chain(boundaries=(), saved=()), "chain.stages is empty"),
        (chain(boundaries=((0,), (1,))), "chain.boundaries has 2 entries, expected 3"),
        (chain(sizes=(1, -2, 3)), r"chain.storages\[1\].nbytes is -2, must be at least 0"),
        (chain(boundaries=((0,), (7,), (2,))), r"chain.boundaries\[1\] names storage 7, unknown"),
        (chain(boundaries=((0,), (-1,), (2,))), r"chain.boundaries\[1\] names storage -1, unknown"),
        (
            chain(boundaries=((0,), (1,), (0,))),
            r"chain.boundaries\[2\] has storage 0 again after boundary 0",
        ),
        (chain(saved=((), (9,))), r"chain.stages\[1\].saved names storage 9, unknown"),
        (chain(sizes=(1, math.nan, 3)), r"chain.storages\[1\].nbytes is nan, must be a whole"),
        (chain(sizes=(1, 2, math.inf)), r"chain.storages\[2\].nbytes is inf, must be a whole"),
        (chain(sizes=(0.5, 2, 3)), r"chain.storages\[0\].nbytes is 0.5, must be a whole number"),
    ],
)
def test_a_malformed_chain_is_named(malformed: Chain, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Problem(malformed, Costs((COST, COST)), 0)


@pytest.mark.parametrize("field", [field.name for field in dataclasses.fields(StageCosts)])
@pytest.mark.parametrize("value", [-1, math.nan, math.inf])
def test_a_malformed_cost_is_named(field: str, value: float) -> None:
    costs = Costs((COST, dataclasses.replace(COST, **{field: value})))
    with pytest.raises(ValueError, match=rf"costs.stages\[1\].{field} is {value}, must be finite"):
        Problem(chain(), costs, 0)


def test_other_malformed_fields_are_named() -> None:
    with pytest.raises(ValueError, match=r"costs\.stages has 1 entries, expected 2"):
        Problem(chain(), Costs((COST,)), 0)
    with pytest.raises(ValueError, match=r"costs.fixed_bytes is -1, must be at least 0"):
        Problem(chain(), Costs((COST, COST), fixed_bytes=-1), 0)
    with pytest.raises(ValueError, match="budget_bytes is -1, must be at least 0"):
        Problem(chain(), Costs((COST, COST)), -1)


@pytest.mark.parametrize("value", [math.nan, math.inf, 0.5])
def test_sizes_are_whole_numbers(value: float) -> None:
    with pytest.raises(ValueError, match=f"budget_bytes is {value}, must be a whole number"):
        Problem(chain(), Costs((COST, COST)), value)
    with pytest.raises(ValueError, match=f"costs.fixed_bytes is {value}, must be a whole number"):
        Problem(chain(), Costs((COST, COST), fixed_bytes=value), 0)


def test_a_fraction_of_a_byte_is_named() -> None:
    costs = Costs((COST, dataclasses.replace(COST, rebuild_bytes=1.5)))
    with pytest.raises(
        ValueError, match=r"costs.stages\[1\].rebuild_bytes is 1.5, must be a whole"
    ):
        Problem(chain(), costs, 0)


@pytest.mark.parametrize("field", ["offload_bytes_per_s", "prefetch_bytes_per_s"])
@pytest.mark.parametrize("value", [0.0, -1.0, math.nan, math.inf])
def test_a_malformed_link_is_named(field: str, value: float) -> None:
    link = dataclasses.replace(symmetric_link(1.0), **{field: value})
    with pytest.raises(ValueError, match=f"link.{field} is {value}, must be finite and above 0"):
        Problem(chain(), Costs((COST, COST)), 0, link)


def test_saved_set_adds_the_boundary_after_and_leaves_out_the_one_before() -> None:
    shared = chain(
        sizes=(1, 2, 4, 8, 16),
        boundaries=((0, 1), (1, 2), (2,)),
        saved=((0, 3), (2, 4)),
    )
    assert shared.saved_set(0) == {2, 3}
    assert shared.saved_set(1) == {4}
    assert shared.nbytes((2, 3, 3, 2)) == 12


def test_from_sizes() -> None:
    made = chain_from_sizes([1, 2, 3], [5, 3])
    assert [made.nbytes(ids) for ids in made.boundaries] == [1, 2, 3]
    assert [made.nbytes(made.saved_set(i)) for i in range(2)] == [5, 3]


def test_from_paper_counts_the_gradient_that_a_backward_writes_once() -> None:
    costs = costs_from_paper(
        forward_s=[1.0],
        backward_s=[2.0],
        gradient_bytes=[10, 20],
        saved_bytes=[300],
        forward_extra_bytes=[4],
        backward_extra_bytes=[1000],
        fixed_bytes=7,
    )
    assert costs == Costs((StageCosts(1.0, 2.0, 1.0, 20, 4, 4, 1010, 1310),), 7)


def test_schedules_read_as_the_papers_write_them() -> None:
    ops = (Forward(0, Keep.INPUT), Forward(1, Keep.NONE), Forward(2, Keep.ALL), Backward(2))
    schedule = Schedule(ops)
    assert str(schedule) == "F_ck 0, F_none 1, F_all 2, B 2"
    assert tuple(schedule) == ops
    assert len(schedule) == 4


def test_timeline_of_nothing_and_of_something() -> None:
    assert (Timeline(()).makespan_s, Timeline(()).peak_bytes) == (0.0, 0)
    events = (Event(Backward(1), 0.0, 2.0, 9, 3), Event(Backward(0), 2.0, 3.0, 5, 0))
    assert (Timeline(events).makespan_s, Timeline(events).peak_bytes) == (3.0, 9)
