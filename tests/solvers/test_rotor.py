from __future__ import annotations

import dataclasses
import itertools
import math
import random
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from fxremat.ir import Chain, Costs, Forward, Infeasible, Keep, Problem, Solved, StageCosts
from fxremat.solvers import rotor, store_all
from fxremat.solvers.kernels import TILE
from fxremat.solvers.rotor import RotorTable, least_budget
from tests.examples import examples
from tests.paper_terms import chain_from_sizes, costs_from_paper
from tests.problems import NAMED, Named, figure_2, keep_all, second_way
from tests.reference import brute
from tests.reference.plain_rotor import plain_rotor
from tests.reference.simulate import check, check_equal, simulate
from tests.strategies import chains_with_options, costed_chains, huge_chains


def exact(problem: Problem) -> Solved | Infeasible:
    """Solve with slots of one byte."""
    solution = rotor.solve(problem, slots=max(1, problem.budget_bytes))
    assert isinstance(solution, Solved | Infeasible)
    return solution


@examples(2)
@given(costed_chains(), st.integers(-1, 20))
@example((figure_2(3).problem.chain, figure_2(3).problem.costs), 1)
@example((second_way().problem.chain, second_way().problem.costs), 0)
def test_equals_the_exhaustive_search(costed: tuple[Chain, Costs], spare: int) -> None:
    check_optimum(*costed, spare)


@examples(2)
@given(chains_with_options(), st.integers(-1, 20))
def test_equals_the_exhaustive_search_with_options(costed: tuple[Chain, Costs], spare: int) -> None:
    check_optimum(*costed, spare)


def check_optimum(chain: Chain, costs: Costs, spare: int) -> None:
    least_bytes, _ = least_budget(chain, costs)
    problem = Problem(chain, costs, max(0, least_bytes + spare))
    check_equal(problem, exact(problem), brute.solve(problem))


@given(st.one_of(costed_chains(), chains_with_options()))
def test_least_budget_is_the_least(costed: tuple[Chain, Costs]) -> None:
    chain, costs = costed
    least_bytes, schedule = least_budget(chain, costs)
    assert simulate(chain, costs, schedule).peak_bytes == least_bytes
    if least_bytes:
        assert exact(Problem(chain, costs, least_bytes - 1)) == Infeasible(least_bytes)
        assert brute.solve(Problem(chain, costs, least_bytes - 1)) == Infeasible(least_bytes)


@pytest.mark.parametrize("named", NAMED, ids=lambda named: named.name)
def test_named(named: Named) -> None:
    found = exact(named.problem)
    if named.persistent_s is None:
        assert found == Infeasible(named.least_budget_bytes)
    else:
        assert isinstance(found, Solved)
        assert found.makespan_s == named.persistent_s
        check(named.problem, found.schedule)
    assert least_budget(named.problem.chain, named.problem.costs)[0] == named.least_budget_bytes


def test_a_budget_that_fits_all_recomputes_nothing() -> None:
    problem = keep_all().problem
    found = exact(problem)
    assert isinstance(found, Solved)
    assert all(op.keep is Keep.ALL for op in found.schedule if isinstance(op, Forward))
    less = exact(Problem(problem.chain, problem.costs, problem.budget_bytes - 1))
    assert isinstance(less, Solved)
    assert less.makespan_s > found.makespan_s


@given(huge_chains(), st.integers(1, 60), st.floats(0, 1))
def test_rounding_keeps_the_promise(
    costed: tuple[Chain, Costs], slots: int, position: float
) -> None:
    chain, costs = costed
    least_bytes, least = least_budget(chain, costs)
    assert simulate(chain, costs, least).peak_bytes == least_bytes
    everything = sum(storage.nbytes for storage in chain.storages) + (1 << 51)
    problem = Problem(chain, costs, least_bytes + int(position**8 * everything))
    found = rotor.solve(problem, slots=slots)
    assert isinstance(found, Solved)
    timeline = check(problem, found.schedule)
    assert math.isfinite(found.makespan_s)
    assert timeline.makespan_s == found.makespan_s


@given(costed_chains(), st.integers(1, 40), st.integers(0, 40))
def test_one_table_answers_every_budget(
    costed: tuple[Chain, Costs], slots: int, spare: int
) -> None:
    chain, costs = costed
    least_bytes, _ = least_budget(chain, costs)
    most_bytes = least_bytes + spare
    table = RotorTable.build(chain, costs, max_budget_bytes=most_bytes, slots=slots)
    assert table.least_budget_bytes == least_bytes
    plain = plain_rotor(chain, costs, quantum=table.quantum_bytes, slots=table.slots)
    distinct = table.distinct_budgets()
    best = [math.inf, *(plain[(b - table.base_bytes) // table.quantum_bytes] for b in distinct)]
    assert all(later < earlier for earlier, later in itertools.pairwise(best))
    for budget_bytes in range(max(0, least_bytes - 2), most_bytes + 1):
        found = table.schedule(budget_bytes)
        if budget_bytes < least_bytes:
            assert found == Infeasible(least_bytes)
            continue
        assert isinstance(found, Solved)
        timeline = check(Problem(chain, costs, budget_bytes), found.schedule)
        assert timeline.makespan_s == found.makespan_s
        reached = sum(b <= budget_bytes for b in distinct)
        assert table.fits(budget_bytes) == (reached > 0)
        if reached:
            assert found.makespan_s == best[reached]


def heterogeneous(count: int, *, seed: int) -> tuple[Chain, Costs]:
    """A chain whose times are multiples of 1/1024 s."""
    draw = random.Random(seed)
    sizes = [draw.randint(0, 50) for _ in range(count + 1)]
    saved = [size + draw.randint(0, 80) for size in sizes[1:]]
    costs = costs_from_paper(
        forward_s=[draw.randint(0, 100) / 1024 for _ in range(count)],
        backward_s=[draw.randint(0, 200) / 1024 for _ in range(count)],
        gradient_bytes=sizes,
        saved_bytes=saved,
        forward_extra_bytes=[draw.randint(0, 20) for _ in range(count)],
        backward_extra_bytes=[draw.randint(0, 20) for _ in range(count)],
    )
    return chain_from_sizes(sizes, saved), costs


def found_as_expected(
    table: RotorTable, expected: np.ndarray, *, quantum: int
) -> Iterator[tuple[int, Solved]]:
    """Budgets of the numbers of slots that fit, with schedules that take what is expected."""
    for slots, seconds in enumerate(expected):
        budget_bytes = table.base_bytes + slots * quantum
        assert table.fits(budget_bytes) == math.isfinite(seconds)
        if math.isfinite(seconds):
            found = table.schedule(budget_bytes)
            assert isinstance(found, Solved)
            assert found.makespan_s == seconds
            yield budget_bytes, found


@pytest.mark.parametrize("count", [TILE - 1, TILE, TILE + 1, 2 * TILE, 3 * TILE + 5])
@pytest.mark.parametrize("times_the_least", [1.1, 3.0, 12.0])
def test_tiles_equal_the_plain_recurrence(count: int, times_the_least: float) -> None:
    chain, costs = heterogeneous(count, seed=count)
    budget_bytes = int(times_the_least * least_budget(chain, costs)[0])
    table = RotorTable.build(chain, costs, max_budget_bytes=budget_bytes, slots=90)
    expected = plain_rotor(chain, costs, quantum=table.quantum_bytes, slots=table.slots)
    assert np.isfinite(expected).any()
    for bytes_here, found in found_as_expected(table, expected, quantum=table.quantum_bytes):
        check(Problem(chain, costs, bytes_here), found.schedule)


@given(costed_chains(), st.integers(30, 140), st.booleans())
def test_rows_of_several_blocks_equal_the_plain_recurrence(
    costed: tuple[Chain, Costs], slots: int, too_large: bool
) -> None:
    """Rows are flat at their end, and with saved sets that never fit nothing else is there."""
    chain, costs = costed
    if too_large:
        costs = dataclasses.replace(
            costs,
            stages=tuple(
                dataclasses.replace(stage, keep_extra_bytes=1 << 40) for stage in costs.stages
            ),
        )
    base_bytes = costs.fixed_bytes + chain.nbytes(chain.boundaries[0])
    table = RotorTable.build(chain, costs, max_budget_bytes=base_bytes + slots, slots=slots)
    expected = plain_rotor(chain, costs, quantum=1, slots=slots)
    for _ in found_as_expected(table, expected, quantum=1):
        pass


@pytest.mark.parametrize("away", [0.0, 0.3, 0.75, 1.0])
@pytest.mark.parametrize("count", [1, 2, TILE + 1, 2 * TILE])
def test_relieved_tables_equal_the_plain_recurrence(count: int, away: float) -> None:
    chain, costs = heterogeneous(count, seed=count)
    budget_bytes = int(1.5 * least_budget(chain, costs)[0])
    table = RotorTable.build(chain, costs, max_budget_bytes=budget_bytes, slots=90)
    relieved = table.relieved(away)
    expected = plain_rotor(chain, costs, quantum=table.quantum_bytes, slots=table.slots, away=away)
    assert np.isfinite(expected).any()
    for bytes_here, found in found_as_expected(relieved, expected, quantum=table.quantum_bytes):
        assert simulate(chain, costs, found.schedule).makespan_s == found.makespan_s
        if table.fits(bytes_here):
            plain = table.schedule(bytes_here)
            assert isinstance(plain, Solved)
            assert found.makespan_s <= plain.makespan_s
            assert found == plain or away


@given(chains_with_options(), st.integers(0, 20))
def test_all_that_is_kept_may_be_away(costed: tuple[Chain, Costs], spare: int) -> None:
    """Then only what a stage needs while it runs counts, and what rebuilds keep."""
    chain, costs = costed
    least_bytes, _ = least_budget(chain, costs)
    table = RotorTable.build(chain, costs, max_budget_bytes=least_bytes + spare, slots=1 << 20)
    before = table.schedule(least_bytes + spare)
    assert isinstance(before, Solved)
    for away in (0.5, 1.0):
        found = table.relieved(away).schedule(least_bytes + spare)
        assert isinstance(found, Solved)
        assert found.makespan_s <= before.makespan_s
        assert simulate(chain, costs, found.schedule).makespan_s == found.makespan_s
        before = found


def test_no_more_than_all_is_away() -> None:
    problem = keep_all().problem
    table = RotorTable.build(problem.chain, problem.costs, max_budget_bytes=20)
    with pytest.raises(ValueError, match=r"away is 1\.5"):
        table.relieved(1.5)


def test_a_table_ends_at_its_greatest_budget() -> None:
    problem = keep_all().problem
    table = RotorTable.build(problem.chain, problem.costs, max_budget_bytes=20)
    with pytest.raises(ValueError, match="budget_bytes is 21, the table ends at 20"):
        table.schedule(21)


def test_sizes_that_do_not_add_up_are_refused() -> None:
    chain = chain_from_sizes([1 << 61, 1 << 61], [1 << 61])
    costs = Costs((StageCosts(1.0, 1.0, 1.0, 0, 0, 0, 0, 1),))
    with pytest.raises(ValueError, match="the sizes add up to"):
        least_budget(chain, costs)


@given(costed_chains() | huge_chains(), st.integers(1, 5))
def test_rounding_does_not_cost_a_budget_that_fits_all(
    costed: tuple[Chain, Costs], slots: int
) -> None:
    chain, costs = costed
    least = store_all.solve(Problem(chain, costs, 0))
    problem = Problem(
        chain, costs, least.least_budget_bytes if isinstance(least, Infeasible) else 0
    )
    found, kept = rotor.solve(problem, slots=slots), store_all.solve(problem)
    assert isinstance(found, Solved)
    assert isinstance(kept, Solved)
    assert found.makespan_s <= kept.makespan_s
    check(problem, found.schedule)


def test_malformed_slots_are_refused() -> None:
    with pytest.raises(ValueError, match="slots is 0"):
        rotor.solve(keep_all().problem, slots=0)
