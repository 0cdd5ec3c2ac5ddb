"""Problems of offloading: named ones, and random ones for hypothesis."""

from __future__ import annotations

from hypothesis import strategies as st

from fxremat.ir import Chain, Costs, Infeasible, Link, Problem, StageCosts
from fxremat.solvers.offload import greedy
from tests.strategies import HUGE_SECONDS, HUGE_SIZES

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
    costs = Costs.from_paper(
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
    chain = Chain.from_sizes(sizes, saved)
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
    costs = Costs.from_paper(
        forward_s=forward_s,
        backward_s=backward_s,
        gradient_bytes=[0] * len(sizes),
        saved_bytes=sizes[1:],
        forward_extra_bytes=forward_extra,
        backward_extra_bytes=backward_extra,
    )
    return Problem(Chain.from_sizes(sizes, sizes[1:]), costs, budget, link)


ORDER_COSTS_TIME = bare(
    [1, 5, 5, 5, 3],
    16,
    Link.symmetric(4.0, shared=True),
    forward_s=[0.25, 1.5, 2.0, 0.0],
    backward_s=[0.0, 2.0, 0.0, 0.0],
    forward_extra=[0, 1, 0, 0],
    backward_extra=[0, 0, 5, 4],
)
"""While ``F_2`` reads ``x_2``, long copied, the link could bring a byte of ``x_1`` back."""

TWO_LINKS = bare(
    [3, 3, 0, 5, 2],
    15,
    Link.symmetric(4.0),
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
        Link.symmetric(float(half), shared=True),
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
    chain = Chain.from_sizes(sizes, saved)
    stage = st.builds(
        StageCosts,
        forward_s=HUGE_SECONDS,
        backward_s=HUGE_SECONDS,
        rebuild_s=HUGE_SECONDS,
        gradient_bytes=HUGE_SIZES,
        forward_extra_bytes=HUGE_SIZES,
        keep_extra_bytes=HUGE_SIZES,
        backward_extra_bytes=HUGE_SIZES,
        rebuild_bytes=HUGE_SIZES,
    )
    costs = Costs(draw(st.tuples(*[stage] * count)), draw(HUGE_SIZES))
    rates = st.floats(1e6, 1e12)
    link = Link(draw(rates), draw(rates), shared=draw(st.booleans()))
    spare = int(draw(st.floats(0, 1)) ** 6 * (sum(saved) + sizes[0]))
    problem = Problem(chain, costs, 0, link)
    found = greedy.solve(problem)
    least = found.least_budget_bytes if isinstance(found, Infeasible) else 0
    return with_budget(problem, least + spare)
