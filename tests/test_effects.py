"""What holding a storage is said to save, held against the exact sweep."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from torch import fx

from fxremat.ir import Schedule
from fxremat.passes.stages.block import Mode
from fxremat.planner.candidate import Candidate, Sweeps
from fxremat.planner.effects import Effect, Operations, effects_of
from fxremat.planner.improve import held_with
from fxremat.planner.search import Search
from fxremat.planner.surroundings import Caller
from tests.harness import captured, silent

NAMES = ("gpt", "resnet50", "siamese_resnet", "hf_llama")


@pytest.fixture(scope="module", params=NAMES)
def search(request: pytest.FixtureRequest) -> Search:
    """All schedules of a model."""
    step = captured(request.param)
    real = {step.joint.primals[i]: tensor for i, tensor in step.real.items()}
    return Search.of(step.joint, real=real, caller=Caller(loss_bytes=0), progress=silent)


def _charged_alike(sweeps: Sweeps) -> Sweeps:
    """As much for an operation in a rebuild as in a forward.

    A forward whose neighbour vanishes may come to stand before its backward. It is a rebuild
    then, and charged by what was measured of those, which is not part of an effect.
    """
    parts = tuple(
        replace(part, charges=replace(part.charges, of_forward=1.0, of_rebuild=1.0))
        for part in sweeps.options.parts
    )
    return replace(sweeps, options=replace(sweeps.options, parts=parts), known_s={})


def _effects(search: Search, schedule: Schedule) -> list[tuple[Effect, float, int]]:
    """Each effect with the seconds and the bytes at the turn that it truly has."""
    operations, sweeps = Operations.of(search.sweeps.line), _charged_alike(search.sweeps)
    start = sweeps.candidate(schedule)
    found = []
    for effect in effects_of(start, sweeps, operations):
        held = held_with({}, [effect], sweeps)
        tried = sweeps.candidate(schedule, start.kept, held)
        more_bytes = tried.sweep.turn_bytes - start.sweep.turn_bytes
        found.append((effect, start.total_s - tried.total_s, more_bytes))
    return found


def _runs(candidate: Candidate) -> Counter[fx.Node]:
    """How often each operation is run again."""
    blocks = [call.block for call in candidate.program.calls]
    return Counter(n for b in blocks for n in b.nodes if b.mode_of(n) is Mode.AGAIN)


def test_effects_are_exact_where_each_operation_runs_again_once(search: Search):
    start = next(c for c in search.solved if all(n == 1 for n in _runs(c).values()))
    found = _effects(search, start.schedule)
    assert len(found) > 5
    exact = 0
    for effect, gained_s, more_bytes in found:
        said_bytes = effect.nbytes - effect.freed_bytes
        assert more_bytes <= said_bytes
        assert gained_s >= effect.gained_s * (1 - 1e-6)
        # More vanishes where the view of an early result is made late, which no tree has, and is
        # freed where what is made again later was held for an earlier reader as well.
        is_exact = gained_s == pytest.approx(effect.gained_s, rel=1e-6)
        exact += is_exact and more_bytes == said_bytes
    assert exact > len(found) / 2


def test_effects_are_at_least_as_said_where_they_run_more_often(search: Search):
    for start in search.solved[:: max(len(search.solved) // 4, 1)]:
        found = _effects(search, start.schedule)
        assert len(found) > 5 or start is not search.solved[0]
        for effect, gained_s, more_bytes in found:
            assert gained_s >= effect.gained_s * (1 - 1e-6)
            assert more_bytes <= effect.nbytes - effect.freed_bytes


def test_what_is_held_for_one_operation_alone_is_freed():
    step = captured("gpt")
    real = {step.joint.primals[i]: tensor for i, tensor in step.real.items()}
    search = Search.of(step.joint, real=real, caller=Caller(loss_bytes=0), progress=silent)
    start = search.solved[len(search.solved) // 2]
    found = effects_of(start, search.sweeps, Operations.of(search.sweeps.line))
    assert any(effect.freed_bytes for effect in found)
