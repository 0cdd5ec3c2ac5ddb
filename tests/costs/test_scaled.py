"""Costs at sizes at which nothing was measured."""

from __future__ import annotations

import functools
from dataclasses import replace

import numpy as np
import pytest

from fxremat.costs.scaled import ScaledCosts, rates_of
from fxremat.ir import RecordedCosts
from tests.sized import at_size, symbolic

HINTS = (3, 24)


def values(batch: int, length: int) -> tuple[int, ...]:
    return (batch, length, batch, length)


@functools.cache
def scaled() -> ScaledCosts:
    """The GPT's, measured at its capture."""
    step = symbolic("gpt", HINTS)
    return ScaledCosts(step.line, step.blocks, step.measured.costs)


def seconds(costs: RecordedCosts) -> np.ndarray:
    stages = [(s.forward_s, s.rebuild_s, s.backward_s) for s in costs.stages]
    return np.array([*np.ravel(stages), *(s for _, s in costs.again_s)])


def test_at_the_size_of_the_capture_they_are_what_was_measured():
    costs = symbolic("gpt", HINTS).measured.costs
    assert scaled().at(values(*HINTS)) is costs


@pytest.mark.parametrize("sizes", [(2, 64), (5, 17), (7, 2)])
def test_storages_are_exact_and_workspaces_enough(sizes: tuple[int, int]):
    at = at_size("gpt", HINTS, sizes)
    found = scaled().at(at.values)
    assert found.storage_bytes == at.costs.storage_bytes
    assert [x[:2] for x in found.workspace_bytes] == [x[:2] for x in at.costs.workspace_bytes]
    for (_, _, mine), (_, _, real) in zip(
        found.workspace_bytes, at.costs.workspace_bytes, strict=True
    ):
        assert mine >= real
        assert (mine == 0) == (real == 0)


def test_more_work_never_takes_less():
    rows = [seconds(scaled().at(values(b, 8 * b))) for b in (2, 3, 4, 5, 7, 8, 20)]
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


def test_workspaces_are_bounded_by_what_has_grown():
    step = symbolic("gpt", HINTS)
    first = step.measured.costs
    index = next(i for i, (_, _, n) in enumerate(first.workspace_bytes) if n)

    def found(nbytes: int, batch: int) -> int:
        own = list(first.workspace_bytes)
        own[index] = (*own[index][:2], nbytes)
        costs = replace(first, workspace_bytes=tuple(own))
        at = ScaledCosts(step.line, step.blocks, costs).at(values(batch, HINTS[1]))
        return at.workspace_bytes[index][2]

    assert found(300, 6) == 600
    assert found(300, 2) == 300  # not less than where less was measured
    assert found(0, 6) == 0


def test_rates_are_found_again():
    draw = np.random.default_rng(0)
    nbytes, flops = draw.uniform(1e3, 1e6, 50), draw.uniform(0, 1e7, 50)
    nbytes[:5] = flops[:5] = 0
    made = 2e-6 + 1e-10 * nbytes + 1e-11 * flops
    call_s, byte_s, flop_s = rates_of(nbytes, flops, made)
    assert call_s == pytest.approx(2e-6)
    assert byte_s == pytest.approx(1e-10)
    assert flop_s == pytest.approx(1e-11)
    assert rates_of(nbytes, flops, made - 3e-11 * flops)[2] == 0
