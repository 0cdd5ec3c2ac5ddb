"""Random problems for hypothesis: small chains with every kind of irregularity."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import strategies as st

from fxremat.ir import Chain, Costs, SaveOption, Stage, StageCosts, Storage
from tests.paper_terms import costs_from_paper

SIZES = st.one_of(st.just(0), st.integers(0, 3), st.integers(0, 9))
"""Bytes, so small that budgets are met by many different sums of them."""

SECONDS = st.integers(0, 9).map(lambda quarters: quarters / 4)
"""Multiples of a power of two: sums are exact in any order, so times can be compared."""


@st.composite
def chains(draw: st.DrawFn, *, most: int = 6, sizes: st.SearchStrategy[int] = SIZES) -> Chain:
    """Chains of up to ``most`` stages whose boundaries share storages.

    Boundaries may be empty; saved sets may be, and may list storages of either boundary.
    """
    count = draw(st.integers(1, most))
    storages: list[Storage] = []
    boundaries: list[list[int]] = [[] for _ in range(count + 1)]
    for begin in range(count + 1):
        for run in draw(st.lists(st.sampled_from([1, 1, 1, 2, 3]), max_size=2)):
            storages.append(Storage(draw(sizes)))
            for boundary in boundaries[begin : begin + run]:
                boundary.append(len(storages) - 1)
    stages = []
    for i in range(count):
        around = sorted({*boundaries[i], *boundaries[i + 1]})
        saved = draw(st.lists(st.sampled_from(around), max_size=2)) if around else []
        for nbytes in draw(st.lists(sizes, max_size=2)):
            storages.append(Storage(nbytes))
            saved.append(len(storages) - 1)
        stages.append(Stage(f"stage{i}", tuple(saved), i))
    return Chain(tuple(storages), tuple(map(tuple, boundaries)), tuple(stages))


def stage_costs(
    sizes: st.SearchStrategy[int], seconds: st.SearchStrategy[float]
) -> st.SearchStrategy[StageCosts]:
    """Sizes and seconds that nothing relates to each other."""
    return st.builds(
        StageCosts,
        forward_s=seconds,
        backward_s=seconds,
        rebuild_s=seconds,
        gradient_bytes=sizes,
        forward_extra_bytes=sizes,
        keep_extra_bytes=sizes,
        backward_extra_bytes=sizes,
        rebuild_bytes=sizes,
    )


@st.composite
def any_costs(
    draw: st.DrawFn,
    chain: Chain,
    *,
    sizes: st.SearchStrategy[int] = SIZES,
    seconds: st.SearchStrategy[float] = SECONDS,
) -> Costs:
    """Costs that nothing relates to each other."""
    stages = draw(st.tuples(*[stage_costs(sizes, seconds)] * len(chain)))
    return Costs(stages, draw(sizes))


@st.composite
def costs_with_options(draw: st.DrawFn, chain: Chain) -> Costs:
    """Costs with up to two save options a stage, which need not be worth having."""
    costs = draw(any_costs(chain))
    stages = []
    for i, stage in enumerate(costs.stages):
        around = {*chain.stages[i].saved, *chain.boundaries[i], *chain.boundaries[i + 1]}
        kept = st.lists(st.sampled_from(sorted(around)), max_size=2) if around else st.just([])
        option = st.builds(
            SaveOption,
            kept=kept.map(tuple),
            recompute_s=SECONDS,
            keep_extra_bytes=SIZES,
            backward_extra_bytes=SIZES,
        )
        options = draw(st.lists(option, max_size=2))
        stages.append(replace(stage, options=tuple(options)))
    return Costs(tuple(stages), costs.fixed_bytes)


@st.composite
def paper_costs(draw: st.DrawFn, chain: Chain) -> Costs:
    """Costs as the papers have them."""
    count = len(chain)

    def entries(values: st.SearchStrategy[float], length: int = count) -> list[float]:
        return draw(st.lists(values, min_size=length, max_size=length))

    return costs_from_paper(
        forward_s=entries(SECONDS),
        backward_s=entries(SECONDS),
        gradient_bytes=entries(SIZES, count + 1),
        saved_bytes=[chain.nbytes(chain.saved_set(i)) for i in range(count)],
        forward_extra_bytes=entries(SIZES),
        backward_extra_bytes=entries(SIZES),
        fixed_bytes=draw(SIZES),
    )


@st.composite
def costed_chains(draw: st.DrawFn, *, most: int = 6) -> tuple[Chain, Costs]:
    """Small chains with costs of either kind."""
    chain = draw(chains(most=most))
    return chain, draw(draw(st.sampled_from([any_costs, paper_costs]))(chain))


@st.composite
def chains_with_options(draw: st.DrawFn, *, most: int = 5) -> tuple[Chain, Costs]:
    """Small chains with save options."""
    chain = draw(chains(most=most))
    return chain, draw(costs_with_options(chain))


HUGE_SIZES = st.one_of(st.just(0), st.integers(0, 1 << 20), st.integers(0, 1 << 50))
"""Bytes up to a pebibyte."""

HUGE_SECONDS = st.one_of(st.just(0.0), st.floats(1e-9, 1e-3), st.floats(1.0, 36000.0))
"""Nanoseconds to hours."""


@st.composite
def huge_chains(draw: st.DrawFn, *, most: int = 24) -> tuple[Chain, Costs]:
    """Longer chains with sizes and times of any magnitude."""
    chain = draw(chains(most=most, sizes=HUGE_SIZES))
    return chain, draw(any_costs(chain, sizes=HUGE_SIZES, seconds=HUGE_SECONDS))
