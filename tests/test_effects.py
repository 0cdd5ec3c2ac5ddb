"""What holding a storage is said to save, held against the exact sweep."""

from __future__ import annotations

from collections import Counter

import pytest
from torch import fx

from fxremat.passes.block import Mode
from fxremat.passes.candidate import Candidate
from fxremat.passes.effects import Effect, Operations, effects_of
from fxremat.passes.improve import held_with
from fxremat.passes.surroundings import Caller
from fxremat.search import Search
from tests.harness import captured, silent

NAMES = ("gpt", "resnet50", "siamese_resnet", "hf_llama")


@pytest.fixture(scope="module", params=NAMES)
def search(request: pytest.FixtureRequest) -> Search:
    """All schedules of a model."""
    step = captured(request.param)
    real = {step.joint.primals[i]: tensor for i, tensor in step.real.items()}
    return Search.of(step.joint, real=real, caller=Caller(loss_bytes=0), progress=silent)


def _effects(search: Search, start: Candidate) -> list[tuple[Effect, float, int]]:
    """Each effect with the seconds and the bytes at the turn that it truly has."""
    operations = Operations.of(search.sweeps.line)
    found = []
    for effect in effects_of(start, search.sweeps, operations):
        held = held_with({}, [effect], search.sweeps)
        tried = search.sweeps.candidate(start.schedule, start.kept, held)
        more_bytes = tried.sweep.turn_bytes - start.sweep.turn_bytes
        found.append((effect, start.total_s - tried.total_s, more_bytes))
    return found


def _runs(candidate: Candidate) -> Counter[fx.Node]:
    """How often each operation is run again."""
    blocks = [call.block for call in candidate.program.calls]
    return Counter(n for b in blocks for n in b.nodes if b.mode_of(n) is Mode.AGAIN)


def test_effects_are_exact_where_each_operation_runs_again_once(search: Search):
    start = next(c for c in search.solved if all(n == 1 for n in _runs(c).values()))
    found = _effects(search, start)
    assert len(found) > 5
    exact = 0
    for effect, gained_s, more_bytes in found:
        assert more_bytes == effect.nbytes - effect.freed_bytes
        # A call whose neighbour vanishes may be charged otherwise.
        exact += gained_s == pytest.approx(effect.gained_s, rel=1e-6)
    assert exact > len(found) / 2


def test_effects_are_at_least_as_said_where_they_run_more_often(search: Search):
    found = _effects(search, search.solved[0])
    assert len(found) > 5
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
