"""Values in the way of a lower peak are those of operations that run above it, and no others."""

from __future__ import annotations

import pytest

from fxremat.planner.candidates import Candidate
from fxremat.planner.crowded import crowded
from fxremat.planner.search import Search
from tests.harness import search_of

by_model = pytest.mark.parametrize("name", ["gpt", "unet", "siamese", "hf_llama"])


def found(search: Search, candidate: Candidate, limit_bytes: int) -> dict[str, int]:
    return crowded(
        search.evaluator.program(candidate),
        search.setting.context_bytes,
        search.allocations.footprints,
        limit_bytes=limit_bytes,
    )


@by_model
def test_nothing_is_in_the_way_of_a_limit_that_is_kept_to(name: str):
    search = search_of(name)
    for candidate in search.pool.thinned(4):
        assert found(search, candidate, candidate.peak_bytes) == {}


@by_model
def test_whoever_runs_at_the_peak_is_in_the_way_of_a_lower_one(name: str):
    search = search_of(name)
    joint = search.measured.line.joint
    for candidate in search.pool.thinned(4):
        evaluation = search.evaluator.evaluation(candidate)
        if max(evaluation.peaks_bytes) == candidate.peak_bytes:  # not the turn's, nor the end's
            assert found(search, candidate, candidate.peak_bytes - 1)
        given = {n.name for n in (*joint.given, *joint.tangents)}
        everything = found(search, candidate, 0)
        assert given.isdisjoint(everything)
        sizes: dict[str, set[int]] = {}
        for owner, nbytes in zip(joint.storages.owner, joint.storages.nbytes, strict=True):
            sizes.setdefault(owner.name, set()).add(nbytes)
        assert all(nbytes in sizes[value] for value, nbytes in everything.items())


@by_model
def test_a_lower_limit_has_more_in_its_way(name: str):
    search = search_of(name)
    peak_bytes = search.least.peak_bytes
    before: set[str] = set()
    for share in (0.99, 0.9, 0.5, 0.0):
        now = set(found(search, search.least, int(share * peak_bytes)))
        assert before <= now
        before = now
