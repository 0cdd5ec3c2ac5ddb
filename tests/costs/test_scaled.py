"""Costs at sizes at which nothing was measured."""

from __future__ import annotations

import functools
from dataclasses import replace

import numpy as np
import pytest

from fxremat.costs.scaled import Anchor, Rates, ScaledCosts
from fxremat.errors import CostError
from fxremat.ir import RecordedCosts, StageSeconds
from tests.sized import at_size, symbolic

HINTS = (3, 24)


def values(batch: int, length: int) -> tuple[int, ...]:
    return (batch, length, batch, length)


@functools.cache
def scaled(*anchors: tuple[int, int]) -> ScaledCosts:
    """The GPT's, measured at its capture and at those sizes."""
    step = symbolic("gpt", HINTS)
    more = [at_size("gpt", HINTS, sizes) for sizes in anchors]
    known = [Anchor(values(*HINTS), step.measured.costs)]
    known += [Anchor(at.values, at.costs) for at in more]
    return ScaledCosts.of(step.line, step.blocks, known)


def seconds(costs: RecordedCosts) -> np.ndarray:
    stages = [(s.forward_s, s.rebuild_s, s.backward_s) for s in costs.stages]
    return np.array([*np.ravel(stages), *(s for _, s in costs.again_s)])


def with_seconds(costs: RecordedCosts, factor: float) -> RecordedCosts:
    return replace(
        costs,
        stages=tuple(
            StageSeconds(factor * s.forward_s, factor * s.rebuild_s, factor * s.backward_s)
            for s in costs.stages
        ),
        again_s=tuple((i, factor * s) for i, s in costs.again_s),
    )


def test_at_an_anchor_they_are_what_was_measured():
    costs = scaled((5, 17))
    for anchor in costs.anchors:
        assert costs.at(anchor.values) is anchor.costs


@pytest.mark.parametrize("sizes", [(2, 64), (5, 17), (7, 2)])
def test_storages_are_exact_and_workspaces_enough(sizes: tuple[int, int]):
    at = at_size("gpt", HINTS, sizes)
    for known in (scaled(), scaled((6, 48))):
        found = known.at(at.values)
        assert found.storage_bytes == at.costs.storage_bytes
        assert [x[:2] for x in found.workspace_bytes] == [x[:2] for x in at.costs.workspace_bytes]
        for (_, _, mine), (_, _, real) in zip(
            found.workspace_bytes, at.costs.workspace_bytes, strict=True
        ):
            assert mine >= real
            assert (mine == 0) == (real == 0)


def test_more_work_never_takes_less():
    step = symbolic("gpt", HINTS)
    first = step.measured.costs
    dear, cheap = (with_seconds(first, factor) for factor in (3.0, 0.1))
    for other in (dear, cheap):
        anchors = [Anchor(values(3, 24), first), Anchor(values(6, 48), other)]
        costs = ScaledCosts.of(step.line, step.blocks, anchors)
        rows = [seconds(costs.at(values(b, 8 * b))) for b in (2, 4, 5, 7, 8, 20)]
        assert np.all(np.array(rows) >= 0)
        assert np.all(np.diff(rows, axis=0) >= -1e-15)


def test_seconds_go_with_the_work():
    step = symbolic("gpt", HINTS)
    costs = scaled()
    first = seconds(step.measured.costs)
    small, large = seconds(costs.at(values(2, 12))), seconds(costs.at(values(30, 24)))
    assert np.all(small <= first * (1 + 1e-9))
    assert np.all(large >= first * (1 - 1e-9))
    assert np.all(large <= 10 * first * (1 + 1e-9))
    assert large.sum() > 2 * first.sum()


def test_between_anchors_they_are_between():
    step = symbolic("gpt", HINTS)
    first = step.measured.costs
    anchors = [Anchor(values(4, 24), first), Anchor(values(8, 24), with_seconds(first, 2.0))]
    costs = ScaledCosts.of(step.line, step.blocks, anchors)
    middle = seconds(costs.at(values(6, 24)))
    assert np.all(middle >= seconds(first) * (1 - 1e-9))
    assert np.all(middle <= 2 * seconds(first) * (1 + 1e-9))


def test_workspaces_follow_what_anchors_agree_on():
    step = symbolic("gpt", HINTS)
    first = step.measured.costs
    index = next(i for i, (_, _, n) in enumerate(first.workspace_bytes) if n)

    def workspaces(nbytes: int) -> RecordedCosts:
        own = list(first.workspace_bytes)
        own[index] = (*own[index][:2], nbytes)
        return replace(first, workspace_bytes=tuple(own))

    def found(one: int, two: int, batch: int) -> int:
        known = [Anchor(values(4, 24), workspaces(one)), Anchor(values(8, 24), workspaces(two))]
        costs = ScaledCosts.of(step.line, step.blocks, known)
        return costs.at(values(batch, 24)).workspace_bytes[index][2]

    assert found(100, 200, 6) == 150  # both say so
    assert found(100, 200, 2) == 100  # not less than at the least size
    assert found(100, 200, 16) == 400
    assert found(100, 100, 6) == 100  # it does not grow
    assert found(100, 500, 6) == 500  # it grows faster: the first anchor is no bound
    assert found(0, 500, 6) == 500
    assert found(0, 0, 6) == 0


def test_costs_of_another_graph_are_refused():
    step = symbolic("gpt", HINTS)
    first = step.measured.costs
    other = replace(first, again_s=first.again_s[1:])
    with pytest.raises(CostError, match="another graph"):
        ScaledCosts.of(
            step.line, step.blocks, [Anchor(values(3, 24), first), Anchor(values(6, 24), other)]
        )


def test_rates_are_found_again():
    draw = np.random.default_rng(0)
    nbytes, flops = draw.uniform(1e3, 1e6, 50), draw.uniform(0, 1e7, 50)
    nbytes[:5] = flops[:5] = 0
    made = 2e-6 + 1e-10 * nbytes + 1e-11 * flops
    rates = Rates.fitted(nbytes, flops, made)
    assert rates.call_s == pytest.approx(2e-6)
    assert rates.byte_s == pytest.approx(1e-10)
    assert rates.flop_s == pytest.approx(1e-11)
    assert Rates.fitted(nbytes, flops, made - 3e-11 * flops).flop_s == 0
