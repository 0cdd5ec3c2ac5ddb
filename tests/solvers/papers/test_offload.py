from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from fxremat.ir import (
    Backward,
    Chain,
    Compute,
    Costs,
    Forward,
    Infeasible,
    Keep,
    Link,
    Offload,
    Prefetch,
    Problem,
    Solved,
    Stage,
    StageCosts,
    Storage,
)
from fxremat.solvers.papers.offload import conv, dp, greedy, vdnn
from fxremat.solvers.papers.offload.line import activations, line_of
from fxremat.solvers.papers.offload.phases import plan
from tests.examples import examples
from tests.paper_terms import chain_from_sizes, costs_from_paper, symmetric_link
from tests.reference.brute.offload import Transfers, least_budget, shortest_s
from tests.reference.offload_bounds import lower_bounds
from tests.reference.simulate import check
from tests.strategies import HUGE_SECONDS, HUGE_SIZES, stage_costs

TICK_S = 0.25
"""All times of small problems are multiples of it."""


@st.composite
def problems(draw: st.DrawFn, *, most: int = 5, double: bool = False) -> Problem:
    """Chains whose sizes, times and needs nothing relates; budgets from the least on.

    ``double``: an offload takes half as long as a prefetch, and all sizes are even.
    """
    unit = 2 if double else 1
    small = st.one_of(st.just(0), st.integers(0, 2), st.integers(0, 4)).map(lambda n: n * unit)
    extra = st.one_of(st.just(0), st.just(0), st.integers(0, 7)).map(lambda n: n * unit)
    ticks = st.one_of(st.just(0), st.integers(0, 6)).map(lambda n: n * TICK_S)
    count = draw(st.integers(1, most))

    def entries(values: st.SearchStrategy[float], length: int = count) -> list[float]:
        return draw(st.lists(values, min_size=length, max_size=length))

    sizes = entries(small, count + 1)
    saved = [size + more for size, more in zip(sizes[1:], entries(extra), strict=True)]
    costs = costs_from_paper(
        forward_s=entries(ticks),
        backward_s=entries(ticks),
        gradient_bytes=entries(small, count + 1),
        saved_bytes=saved,
        forward_extra_bytes=entries(extra),
        backward_extra_bytes=entries(extra),
        fixed_bytes=draw(small),
    )
    rate = 1 / TICK_S
    link = Link(rate * unit, rate, shared=draw(st.booleans()))
    chain = chain_from_sizes(sizes, saved)
    spare = draw(st.one_of(st.just(0), st.integers(0, 6))) * unit
    return with_budget(Problem(chain, costs, 0, link), least_bytes(chain, costs) + spare)


def least_bytes(chain: Chain, costs: Costs) -> int:
    """What the computation that needs most needs for itself, counted here once more."""
    before = [chain.nbytes(chain.boundaries[0])]
    before += [chain.nbytes(chain.saved_set(i)) for i in range(len(chain))]
    last = costs.stages[-1].gradient_bytes
    needs = []
    for i, stage in enumerate(costs.stages):
        around = before[i] + before[i + 1] + costs.fixed_bytes
        needs.append(around + last + stage.keep_extra_bytes)
        needs.append(around + stage.gradient_bytes + stage.backward_extra_bytes)
    return max(needs)


def with_budget(problem: Problem, budget_bytes: int) -> Problem:
    return Problem(problem.chain, problem.costs, budget_bytes, problem.link)


def bare(
    sizes: list[int],
    budget: int,
    link: Link,
    *,
    forward_s: list[float],
    backward_s: list[float],
    forward_extra: list[int],
    backward_extra: list[int],
) -> Problem:
    """A chain without gradients whose saved sets are its boundaries."""
    costs = costs_from_paper(
        forward_s=forward_s,
        backward_s=backward_s,
        gradient_bytes=[0] * len(sizes),
        saved_bytes=sizes[1:],
        forward_extra_bytes=forward_extra,
        backward_extra_bytes=backward_extra,
    )
    return Problem(chain_from_sizes(sizes, sizes[1:]), costs, budget, link)


ORDER_COSTS_TIME = bare(
    [1, 5, 5, 5, 3],
    16,
    symmetric_link(4.0, shared=True),
    forward_s=[0.25, 1.5, 2.0, 0.0],
    backward_s=[0.0, 2.0, 0.0, 0.0],
    forward_extra=[0, 1, 0, 0],
    backward_extra=[0, 0, 5, 4],
)
"""While ``F_2`` reads ``x_2``, long copied, the link could bring a byte of ``x_1`` back."""

TWO_LINKS = bare(
    [3, 3, 0, 5, 2],
    15,
    symmetric_link(4.0),
    forward_s=[0.0, 0.0, 0.0, 0.75],
    backward_s=[0.0] * 4,
    forward_extra=[0] * 4,
    backward_extra=[0, 0, 0, 6],
)
"""``x_1`` could come back while ``x_0`` goes."""

EARLY_RETURN = bare(
    [2, 4, 4, 2, 2],
    16,
    Link(8.0, 4.0, shared=True),
    forward_s=[0.25, 0.0, 0.0, 0.5],
    backward_s=[0.0, 0.0, 0.0, 0.25],
    forward_extra=[0, 6, 2, 8],
    backward_extra=[2, 0, 0, 0],
)
"""Prefetches start while the last forward runs, as far as it leaves room."""

BACKLOG = bare(
    [2, 4, 2, 2, 2],
    16,
    Link(8.0, 4.0, shared=True),
    forward_s=[0.0, 0.5, 0.0, 0.25],
    backward_s=[0.25, 0.25, 0.25, 0.0],
    forward_extra=[2, 0, 6, 4],
    backward_extra=[0, 4, 0, 8],
)
"""Of two choices that keep equally much, the one with less left to prefetch is better."""


def partition(parts: list[int]) -> Problem:
    """Theorem 3: a step of 2 seconds exactly if ``parts`` split into two of equal sum."""
    half = sum(parts) // 2
    count = len(parts) + 3
    seconds = [float(i == len(parts)) for i in range(count)]
    return bare(
        [*parts, 0, 0, half, 0],
        2 * half,
        symmetric_link(float(half), shared=True),
        forward_s=seconds,
        backward_s=seconds,
        forward_extra=[0] * count,
        backward_extra=[0] * count,
    )


@st.composite
def huge(draw: st.DrawFn) -> Problem:
    """Sizes up to a pebibyte, nanoseconds to hours, links of any speed."""
    count = draw(st.integers(1, 12))
    sizes = draw(st.lists(HUGE_SIZES, min_size=count + 1, max_size=count + 1))
    saved = [size + draw(HUGE_SIZES) for size in sizes[1:]]
    chain = chain_from_sizes(sizes, saved)
    stage = stage_costs(HUGE_SIZES, HUGE_SECONDS)
    costs = Costs(draw(st.tuples(*[stage] * count)), draw(HUGE_SIZES))
    rates = st.floats(1e6, 1e12)
    link = Link(draw(rates), draw(rates), shared=draw(st.booleans()))
    spare = int(draw(st.floats(0, 1)) ** 6 * (sum(saved) + sizes[0]))
    problem = Problem(chain, costs, 0, link)
    found = greedy.solve(problem)
    least = found.least_budget_bytes if isinstance(found, Infeasible) else 0
    return with_budget(problem, least + spare)


BYTE_SLOTS = 1 << 20
"""More slots than any small budget has bytes, so that each is one byte."""

WHOLE = (greedy.solve, dp.solve, vdnn.solve, conv.solve)


def solved(problem: Problem, solve: object, *, fluid: bool = False, **options: object) -> Solved:
    """Solve, and replay what comes out: it takes as long as is said."""
    if fluid:
        options["relaxed"] = True
    found = solve(problem, **options)
    assert isinstance(found, Solved)
    timeline = check(problem, found.schedule, fluid=fluid)
    assert timeline.makespan_s == found.makespan_s
    assert timeline.peak_bytes <= problem.budget_bytes
    return found


def check_partial(problem: Problem) -> None:
    found = solved(problem, greedy.solve, fluid=True)
    assert found.makespan_s == shortest_s(problem, Transfers.PARTIAL, tick_s=TICK_S)


def check_interruptible(problem: Problem) -> None:
    found = solved(problem, dp.solve, fluid=True, slots=BYTE_SLOTS)
    ordered = shortest_s(problem, Transfers.INTERRUPTIBLE, tick_s=TICK_S, ordered=True)
    assert found.makespan_s == ordered


def check_whole(problem: Problem) -> None:
    shortest = shortest_s(problem, Transfers.WHOLE, tick_s=TICK_S)
    bounds = lower_bounds(problem)
    assert bounds.makespan_s <= shortest
    sizes = {activations(i): size for i, size in enumerate(line_of(problem).sizes)}
    for solve in WHOLE:
        found = solved(problem, solve)
        assert found.makespan_s >= shortest
        moved = [op.what for op in found.schedule if isinstance(op, Offload)]
        assert sum(map(sizes.__getitem__, moved)) >= bounds.offloaded_bytes
        assert moved == [op.what for op in reversed(found.schedule.ops) if isinstance(op, Prefetch)]
    relaxed = solved(problem, greedy.solve, fluid=True).makespan_s
    interruptible = solved(problem, dp.solve, fluid=True, slots=BYTE_SLOTS).makespan_s
    assert bounds.makespan_s <= relaxed <= min(interruptible, shortest)


def check_recurrence(problem: Problem) -> None:
    """Algorithm 1 finds the idle time of the best of all subsets, by its own account."""
    line = line_of(problem)
    found = dp.search(line, 1)
    assert found is not None
    times = []
    for moves in itertools.product((True, False), repeat=len(line.movable)):
        chosen = {i for i, move in zip(line.movable, moves, strict=True) if move}
        amounts = [size if i in chosen else 0 for i, size in enumerate(line.sizes)]
        planned = plan(line, amounts, whole=False)
        times += [planned.makespan_s] if planned is not None else []
    assert found[0] == min(times) - line.compute_s


def check_least(problem: Problem) -> None:
    least = least_bytes(problem.chain, problem.costs)
    for transfers in Transfers:
        for ordered in (False, True):
            assert least_budget(problem, transfers, ordered=ordered) == least
    for solve in WHOLE:
        solved(with_budget(problem, least), solve)
        if least:
            assert solve(with_budget(problem, least - 1)) == Infeasible(least)


CHECKS = {
    "partial": check_partial,
    "interruptible": check_interruptible,
    "whole": check_whole,
    "least": check_least,
}


@pytest.mark.parametrize("name", CHECKS)
@given(problem=problems())
@example(problem=ORDER_COSTS_TIME)
@example(problem=TWO_LINKS)
def test_equals_the_exhaustive_search(name: str, problem: Problem) -> None:
    CHECKS[name](problem)


@pytest.mark.slow
@pytest.mark.parametrize("name", CHECKS)
@given(problem=problems(most=6))
def test_equals_the_exhaustive_search_often(name: str, problem: Problem) -> None:
    CHECKS[name](problem)


@given(problem=problems(most=8, double=True))
@example(problem=EARLY_RETURN)
@example(problem=BACKLOG)
def test_the_recurrence_equals_all_subsets(problem: Problem) -> None:
    check_recurrence(problem)


@pytest.mark.slow
@given(problem=problems(most=9, double=True))
def test_the_recurrence_equals_all_subsets_often(problem: Problem) -> None:
    check_recurrence(problem)


@given(problem=problems(most=4, double=True))
def test_directions_of_different_speed(problem: Problem) -> None:
    check_partial(problem)
    check_interruptible(problem)


@pytest.mark.slow
@examples(0.4)
@given(problem=problems(double=True))
def test_directions_of_different_speed_often(problem: Problem) -> None:
    check_partial(problem)
    check_interruptible(problem)
    check_whole(problem)


def test_order_costs_time() -> None:
    for problem, any_s in ((ORDER_COSTS_TIME, 8.0), (TWO_LINKS, 2.5)):
        found = solved(problem, dp.solve, fluid=True).makespan_s
        assert shortest_s(problem, Transfers.INTERRUPTIBLE, tick_s=TICK_S) == any_s < found


@pytest.mark.parametrize(
    ("parts", "splits"),
    [
        ([3, 1, 1, 2, 2, 1], True),
        ([5, 5, 4, 3, 3], True),
        ([5, 5, 5, 1], False),
        ([4, 4, 4], False),
    ],
)
def test_two_partition(parts: list[int], splits: bool) -> None:
    found = dp.solve(partition(parts), relaxed=True)
    assert isinstance(found, Solved)
    check(partition(parts), found.schedule, fluid=True)
    assert (found.makespan_s == pytest.approx(2.0)) == splits
    greedily = greedy.solve(partition(parts), relaxed=True)
    assert isinstance(greedily, Solved)
    assert greedily.makespan_s == pytest.approx(2.0)


@given(problem=problems(most=6), slots=st.integers(1, 30))
def test_rounding_keeps_the_promise(problem: Problem, slots: int) -> None:
    exact = solved(problem, dp.solve, fluid=True, slots=BYTE_SLOTS)
    rounded = solved(problem, dp.solve, fluid=True, slots=slots)
    assert rounded.makespan_s >= exact.makespan_s
    solved(problem, dp.solve, slots=slots)


@given(problem=huge())
def test_sizes_and_times_of_any_magnitude(problem: Problem) -> None:
    bounds = lower_bounds(problem)
    for solve, fluid in [(s, False) for s in WHOLE] + [(greedy.solve, True), (dp.solve, True)]:
        found = solve(problem, relaxed=True) if fluid else solve(problem)
        assert isinstance(found, Solved)
        timeline = check(problem, found.schedule, fluid=fluid)
        assert math.isfinite(found.makespan_s)
        # Seconds of a step times bytes per second can be beyond what a float resolves.
        rates = (problem.link.offload_bytes_per_s, problem.link.prefetch_bytes_per_s)
        resolved = problem.budget_bytes + 3 * max(rates) * found.makespan_s
        rounding = 2**-43 * resolved if fluid else 0
        off_s = 1e-9 * found.makespan_s + rounding / min(rates)
        assert timeline.makespan_s == pytest.approx(found.makespan_s, rel=0, abs=off_s)
        assert timeline.peak_bytes <= problem.budget_bytes + rounding + (rounding > 0)
        assert found.makespan_s >= bounds.makespan_s * (1 - 1e-12)
        assert all(0 <= e.start_s <= e.end_s for e in timeline.events)


def three_equal(link: Link | None, budget_bytes: int) -> Problem:
    """Three stages of a second each way, activations of 4 bytes."""
    sizes = [4, 4, 4, 0]
    costs = Costs((StageCosts(1.0, 1.0, 1.0, 0, 0, 0, 0, 0),) * 3)
    return Problem(chain_from_sizes(sizes, sizes[1:]), costs, budget_bytes, link)


@pytest.mark.parametrize("solve", WHOLE)
def test_what_fits_stays(solve: object) -> None:
    keep_all = tuple(Forward(i, Keep.ALL) for i in range(3))
    keep_all += tuple(Backward(i) for i in (2, 1, 0))
    for link in (None, symmetric_link(1.0)):
        found = solve(three_equal(link, 12))
        assert isinstance(found, Solved)
        assert (found.schedule.ops, found.makespan_s) == (keep_all, 6.0)
    assert solve(three_equal(None, 11)) == Infeasible(12)
    away = solve(three_equal(symmetric_link(4.0), 8))
    assert isinstance(away, Solved)
    assert any(isinstance(op, Offload) for op in away.schedule)
    assert away.schedule.computations == keep_all
    assert solve(three_equal(symmetric_link(4.0), 7)) == Infeasible(8)


def test_a_prefetch_starts_with_the_backward_before() -> None:
    problem = three_equal(symmetric_link(4.0), 12)
    ops = conv.solve(with_budget(problem, 11)).schedule.ops
    at = next(i for i, op in enumerate(ops) if isinstance(op, Prefetch))
    before = [op for op in ops[:at] if isinstance(op, Compute)][-1]
    assert ops[at].what == next(op.what for op in ops if isinstance(op, Offload))
    assert before == Backward(1 if ops[at].what.part.value == "input" else 2)


def test_activations_of_several_stages_are_refused() -> None:
    chain = Chain(
        storages=(Storage(1), Storage(2)),
        boundaries=((0,), (0, 1), ()),
        stages=(Stage("stage0", (), 0), Stage("stage1", (), 1)),
    )
    costs = Costs((StageCosts(1.0, 1.0, 1.0, 0, 0, 0, 0, 0),) * 2)
    problem = Problem(chain, costs, 10, symmetric_link(1.0))
    for solve in WHOLE:
        with pytest.raises(
            ValueError, match=r"chain.boundaries\[1\] has storage 0 like boundary 0"
        ):
            solve(problem)
    with pytest.raises(ValueError, match="slots is 0"):
        dp.solve(three_equal(None, 12), slots=0)
