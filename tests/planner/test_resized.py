"""A search at another size: what it says holds there."""

from __future__ import annotations

import functools
from dataclasses import replace

import pytest

from fxremat.costs.estimated.scaled import ScaledCosts
from fxremat.costs.measured.cost import Measured
from fxremat.effort import USUAL, Effort
from fxremat.ir.schedule import coded, decoded
from fxremat.passes.stages.block import BlockCache
from fxremat.planner.context.context_bytes import Caller, context_bytes_of
from fxremat.planner.decision.save_options import find_options
from fxremat.planner.search.evaluator import Evaluator
from fxremat.planner.search.resized import least_bytes_at, search_at
from fxremat.planner.search.search import Search
from fxremat.progress import silent
from tests.efforts import QUICK
from tests.harness import bare, random_schedule
from tests.sized import AtSize, at_size, symbolic

SIZES = [("gpt", (3, 24), (5, 17)), ("gpt", (3, 24), (2, 64)), ("unet", (3, 32, 64), (2, 64, 32))]

each_size = pytest.mark.parametrize(("name", "hints", "sizes"), SIZES)


@functools.cache
def search_of(name: str, hints: tuple[int, ...]) -> Search:
    """At the size of the capture."""
    step = symbolic(name, hints)
    return Search.over(
        step.estimated, step.blocks, bare(step.joint), progress=silent, effort=Effort(**QUICK)
    )


def resized(at: AtSize, search: Search, budget_bytes: int) -> Search:
    measured = search.measured.at(at.costs)
    return search_at(search, measured, bare(measured.line.joint), budget_bytes=budget_bytes)


@each_size
def test_evaluations_are_those_of_the_line_at_that_size(name, hints, sizes):
    at = at_size(name, hints, sizes)
    there = Measured.of(at.line, at.costs)
    blocks = BlockCache(at.line)
    context_bytes = bare(there.line.joint)
    truth = Evaluator.of(there, blocks, find_options(there, blocks, USUAL), context_bytes)
    own = search_of(name, hints).evaluator
    other = own.at(search_of(name, hints).measured.at(at.costs), context_bytes)
    for seed in range(8):
        codes = coded(random_schedule(len(at.line.stages), seed))
        before = own.candidate(codes)
        mine, wanted = other.candidate(codes), truth.candidate(codes)
        assert mine.peak_bytes == wanted.peak_bytes
        assert mine.total_s == pytest.approx(wanted.total_s, rel=1e-9)
        after = own.candidate(codes)
        assert (after.peak_bytes, after.total_s) == (before.peak_bytes, before.total_s)


@each_size
def test_what_is_found_takes_what_is_said(name, hints, sizes):
    at, search = at_size(name, hints, sizes), search_of(name, hints)
    whole = resized(at, search, 1 << 60)
    low, high = whole.least_bytes, whole.baseline.peak_bytes
    for budget_bytes in (low, (2 * low + high) // 3, (low + high) // 2, high):
        found = resized(at, search, budget_bytes)
        chosen = found.fastest_within(budget_bytes)
        assert chosen.peak_bytes <= budget_bytes
        assert at.peak_bytes(found.evaluator.program(chosen)) == chosen.peak_bytes
        assert (chosen is found.baseline) == (budget_bytes >= high)
        assert not found.evaluator.evaluation(chosen).peak_bytes > budget_bytes


@each_size
def test_it_is_no_slower_than_any_that_is_known(name, hints, sizes):
    at, search = at_size(name, hints, sizes), search_of(name, hints)
    for share in (0.1, 0.4, 0.8):
        whole = resized(at, search, 1 << 60)
        low, high = whole.least_bytes, whole.baseline.peak_bytes
        budget_bytes = int(low + share * (high - low))
        found = resized(at, search, budget_bytes)
        known = [found.evaluator.candidate(c.codes, c.held) for c in search.pool.members]
        fitting = [c.total_s for c in known if c.peak_bytes <= budget_bytes]
        assert found.fastest_within(budget_bytes).total_s <= 1.02 * min(fitting)


@each_size
def test_the_least_is_known_without_a_budget(name, hints, sizes):
    at, search = at_size(name, hints, sizes), search_of(name, hints)
    measured = search.measured.at(at.costs)
    least = least_bytes_at(search, measured, bare(measured.line.joint))
    nothing_fits = resized(at, search, least - 1)
    assert nothing_fits.least_bytes == least
    assert resized(at, search, least).fastest_within(least).peak_bytes == least


def test_surroundings_follow_the_size():
    step, at = symbolic("gpt", (3, 24)), at_size("gpt", (3, 24), (5, 17))
    costs = ScaledCosts(step.line, step.blocks, step.measured.costs).at(at.values)
    joint = step.measured.at(costs).line.joint
    for caller in (Caller(), Caller(loss_bytes=0, accumulate=True, reserve_bytes=7)):
        found = context_bytes_of(joint, {}, caller, values=at.values)
        assert found == context_bytes_of(at.line.joint, {}, caller)
        assert found != context_bytes_of(step.joint, {}, caller)
        # The static graph has no primals that are sizes.
        of_tensors = tuple(filter(None, found.gradient_each_bytes))
        static = context_bytes_of(at.static.joint, {}, caller)
        assert replace(found, gradient_each_bytes=of_tensors) == static


def test_what_a_search_at_another_size_finds_is_known_from_then_on():
    """Schedules tell save options by their number: it must mean the same at every size."""
    search, at = search_of("gpt", (3, 24)), at_size("gpt", (3, 24), (2, 64))
    measured = search.measured.at(at.costs)
    there = Search.over(
        measured,
        BlockCache(measured.line),
        bare(measured.line.joint),
        progress=silent,
        effort=Effort(**QUICK),
        known=search,
    )
    members = there.pool.members
    low, high = members[0].peak_bytes, members[-1].peak_bytes
    for budget_bytes in (low, (low + high) // 2):
        found = resized(at, search.knowing(there), budget_bytes)
        chosen = found.fastest_within(budget_bytes)
        best_s = there.fastest_within(budget_bytes).total_s
        assert chosen.total_s <= best_s * (1 + 1e-9 if budget_bytes == low else 1.05)
        assert at.peak_bytes(found.evaluator.program(chosen)) == chosen.peak_bytes
    optioned = [op for c in members for op in decoded(c.codes)]
    assert any(getattr(op, "option", 0) for op in optioned)


@each_size
def test_the_least_is_known_where_everything_fits(name, hints, sizes):
    at, search = at_size(name, hints, sizes), search_of(name, hints)
    found = resized(at, search, 1 << 60)
    assert found.least_bytes < found.baseline.peak_bytes
    around = search.setting.context_bytes
    more = replace(around, given_bytes=around.given_bytes + 1024)
    beside = search_at(search, search.measured, more, budget_bytes=None)
    assert len(beside.pool.members) == len(search.pool.members)
    assert beside.least_bytes == search.least_bytes + 1024


def test_pools_of_each_generator_are_there_in_another_context_where_they_are_asked_for():
    search = search_of(*SIZES[0][:2])
    around = search.setting.context_bytes
    more = replace(around, given_bytes=around.given_bytes + 1024)

    def peaks(pools):
        return [[c.peak_bytes for c in pool.members] for pool in pools]

    apart = search_at(search, search.measured, more, budget_bytes=None, separately=True)
    assert len(search.separate) > 1
    assert peaks(apart.separate) == [[n + 1024 for n in own] for own in peaks(search.separate)]
