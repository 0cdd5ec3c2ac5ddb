from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from fxremat.ir import Backward, Chain, Costs, Forward, Infeasible, Keep, Problem, Schedule, Solved
from fxremat.solvers import rotor, store_all
from tests.problems import keep_all
from tests.reference.simulate import check, simulate
from tests.strategies import costed_chains, huge_chains


def everything(count: int) -> Schedule:
    ops = [Forward(i, Keep.ALL) for i in range(count)]
    return Schedule((*ops, *(Backward(i) for i in reversed(range(count)))))


def check_peak(chain: Chain, costs: Costs) -> None:
    replayed = simulate(chain, costs, everything(len(chain)))
    problem = Problem(chain, costs, replayed.peak_bytes)
    found = store_all.solve(problem)
    assert isinstance(found, Solved)
    assert found.schedule == everything(len(chain))
    assert check(problem, found.schedule).makespan_s == found.makespan_s
    if replayed.peak_bytes:
        less = Problem(chain, costs, replayed.peak_bytes - 1)
        assert store_all.solve(less) == Infeasible(replayed.peak_bytes)


@given(costed_chains() | huge_chains())
def test_fits_exactly_where_the_one_schedule_does(costed: tuple[Chain, Costs]) -> None:
    check_peak(*costed)


@given(costed_chains(), st.integers(0, 9))
def test_rotor_is_never_slower(costed: tuple[Chain, Costs], spare: int) -> None:
    peak_bytes = simulate(*costed, everything(len(costed[0]))).peak_bytes
    problem = Problem(*costed, peak_bytes + spare)
    found, best = store_all.solve(problem), rotor.solve(problem, slots=peak_bytes + spare + 1)
    assert isinstance(found, Solved)
    assert isinstance(best, Solved)
    assert best.makespan_s <= found.makespan_s


def test_named() -> None:
    named = keep_all()
    found = store_all.solve(named.problem)
    assert isinstance(found, Solved)
    assert found.makespan_s == named.persistent_s
    less = Problem(named.problem.chain, named.problem.costs, named.problem.budget_bytes - 1)
    assert store_all.solve(less) == Infeasible(named.problem.budget_bytes)
