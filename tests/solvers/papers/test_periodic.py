from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint_sequential

from fxremat.ir import Chain, Costs, Forward, Infeasible, Keep, Problem, Schedule, Solved
from fxremat.solvers import rotor, store_all
from fxremat.solvers.papers import periodic
from tests.paper_terms import chain_from_sizes, costs_from_paper
from tests.problems import keep_all
from tests.reference.simulate import check, simulate
from tests.strategies import costed_chains, huge_chains

PLENTY = 1 << 60


class Logged(nn.Module):
    """Writes down each of its runs: its stage, and whether the run is recorded for a backward."""

    def __init__(self, stage: int, log: list[tuple[int, bool]]) -> None:
        super().__init__()
        self.stage = stage
        self.log = log

    def forward(self, x: Tensor) -> Tensor:
        self.log.append((self.stage, torch.is_grad_enabled()))
        return x * 2


def run_by_torch(count: int, segments: int) -> list[tuple[int, bool]]:
    log: list[tuple[int, bool]] = []
    stages = [Logged(i, log) for i in range(count)]
    x = torch.ones(1, requires_grad=True)
    checkpoint_sequential(stages, segments, x, use_reentrant=True).sum().backward()
    return log


def solved(chain: Chain, costs: Costs, segments: int) -> Solved:
    found = periodic.solve(Problem(chain, costs, PLENTY), segments=segments)
    assert isinstance(found, Solved)
    return found


@pytest.mark.parametrize("count", range(1, 10))
def test_runs_what_checkpoint_sequential_runs(count: int) -> None:
    chain = chain_from_sizes([1] * (count + 1), [1] * count)
    costs = costs_from_paper(
        forward_s=[1.0] * count,
        backward_s=[1.0] * count,
        gradient_bytes=[1] * (count + 1),
        saved_bytes=[1] * count,
        forward_extra_bytes=[0] * count,
        backward_extra_bytes=[0] * count,
    )
    for segments in range(1, count + 1):
        ops = solved(chain, costs, segments).schedule
        forwards = [(op.stage, op.keep is Keep.ALL) for op in ops if isinstance(op, Forward)]
        assert forwards == run_by_torch(count, segments)


def check_peaks(chain: Chain, costs: Costs) -> None:
    """Every number of segments fits exactly where its replay does."""
    peaks, times = [], []
    for segments in range(1, len(chain) + 1):
        found = solved(chain, costs, segments)
        replayed = simulate(chain, costs, found.schedule)
        assert replayed.makespan_s == found.makespan_s
        exact = Problem(chain, costs, replayed.peak_bytes)
        assert periodic.solve(exact, segments=segments) == found
        if replayed.peak_bytes:
            less = Problem(chain, costs, replayed.peak_bytes - 1)
            least = Infeasible(replayed.peak_bytes)
            assert periodic.solve(less, segments=segments) == least
        peaks.append(replayed.peak_bytes)
        times.append(found.makespan_s)
    for budget_bytes in {*peaks, *(peak + 1 for peak in peaks)}:
        best = periodic.solve(Problem(chain, costs, budget_bytes))
        assert isinstance(best, Solved)
        fitting = [t for t, peak in zip(times, peaks, strict=True) if peak <= budget_bytes]
        assert best.makespan_s == min(fitting)
    if min(peaks):
        least = Infeasible(min(peaks))
        assert periodic.solve(Problem(chain, costs, min(peaks) - 1)) == least


@given(costed_chains() | huge_chains())
def test_fits_exactly_where_the_replay_does(costed: tuple[Chain, Costs]) -> None:
    check_peaks(*costed)


@given(costed_chains(), st.integers(1, 6))
def test_rotor_is_never_slower(costed: tuple[Chain, Costs], segments: int) -> None:
    chain, costs = costed
    found = solved(chain, costs, min(segments, len(chain)))
    peak_bytes = simulate(chain, costs, found.schedule).peak_bytes
    problem = Problem(chain, costs, peak_bytes)
    best = rotor.solve(problem, slots=peak_bytes + 1)
    assert isinstance(best, Solved)
    assert best.makespan_s <= found.makespan_s
    check(problem, best.schedule)


@given(costed_chains(), st.integers(0, 40))
def test_one_segment_keeps_everything(costed: tuple[Chain, Costs], budget_bytes: int) -> None:
    problem = Problem(*costed, budget_bytes)
    assert periodic.solve(problem, segments=1) == store_all.solve(problem)


def test_fewer_segments_among_equals() -> None:
    found = periodic.solve(keep_all().problem)
    assert isinstance(found, Solved)
    ops: Schedule = found.schedule
    forwards = [op.stage for op in ops if isinstance(op, Forward)]
    assert all(a < b for a, b in itertools.pairwise(forwards))


@pytest.mark.parametrize("segments", [0, -1, 4])
def test_malformed_segments_are_refused(segments: int) -> None:
    with pytest.raises(ValueError, match=f"segments is {segments}, must be from 1 to 3"):
        periodic.solve(keep_all().problem, segments=segments)
