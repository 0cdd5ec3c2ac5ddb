"""What holding a storage is said to save, held against the exact evaluation."""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import dataclass, replace

import numpy as np
import pytest
from torch import fx

from fxremat.effort import USUAL
from fxremat.passes.stages.block import Mode
from fxremat.planner.decision.candidates import Candidate
from fxremat.planner.replay.climb import find_effects, mark_results
from fxremat.planner.replay.replay import evaluate
from fxremat.planner.search.evaluator import Evaluator
from tests.harness import Captured, captured, search_of

models = pytest.mark.parametrize("name", ["gpt", "resnet50", "siamese_resnet", "hf_llama"])


@dataclass(frozen=True)
class Effect:
    """What is said, and what it truly comes to."""

    gained_s: float
    more_bytes: int
    freed_bytes: int
    truly_gained_s: float
    truly_more_bytes: int


def charged_alike(step: Captured) -> Evaluator:
    """As much for an operation in a rebuild as in a forward.

    A forward whose neighbour vanishes may come to stand before its backward. It is a rebuild
    then, and charged by what was measured of those, which is not part of an effect.
    """
    parts = tuple(
        replace(part, charges=replace(part.charges, of_forward=1.0, of_rebuild=1.0))
        for part in step.options.parts
    )
    options = replace(step.options, parts=parts)
    return Evaluator.of(step.estimated, step.blocks, options, step.context_bytes)


def effects_of(evaluator: Evaluator, candidate: Candidate) -> list[Effect]:
    """Each effect of holding something more."""
    codes, step, at = candidate.codes, evaluator.arrays, evaluator.arrays.at
    numbers, before = (step.data, step.seconds, at), np.zeros(at.nodes, dtype=np.uint8)
    if candidate.held:
        before = np.unpackbits(np.frombuffer(candidate.held, dtype=np.uint8), count=at.nodes)
    calls, call_s = np.zeros((5, codes.size), dtype=np.int64), np.zeros(codes.size)
    groups, nbytes = np.zeros((2, at.forward_count), dtype=np.int64)
    worth = np.zeros(at.forward_count)
    start_s = evaluate(*numbers, codes, before, calls, call_s)
    count = find_effects(*numbers, codes, calls, groups, nbytes, worth)
    assert (np.diff(worth[:count]) <= 0).all()
    said = []
    for group, size in zip(groups[:count].tolist(), nbytes[:count].tolist(), strict=True):
        held = before.copy()
        mark_results(step.data, at.packed[0], group, held)
        freed = int(step.data[at.freed + group])
        said.append((float(step.seconds[at.gained_s + group]), size - freed, freed, held))
    start = evaluator.evaluation(candidate)
    found = []
    for *effect, held in said:
        tried = evaluator.candidate(codes, np.packbits(held).tobytes())
        loss_point_bytes = evaluator.evaluation(tried).loss_point_bytes
        found.append(
            Effect(*effect, start_s - tried.total_s, loss_point_bytes - start.loss_point_bytes)
        )
    return found


def runs(evaluator: Evaluator, candidate: Candidate) -> Counter[fx.Node]:
    """How often each operation is run again."""
    blocks = [call.block for call in evaluator.program(candidate).calls]
    return Counter(n for b in blocks for n in b.nodes if b.mode_of(n) is Mode.AGAIN)


@models
def test_effects_are_exact_where_each_operation_runs_again_once(name: str):
    evaluator, solved = charged_alike(captured(name)), search_of(name).solved.members[:-1]
    start = next(c for c in solved if all(n == 1 for n in runs(evaluator, c).values()))
    found = effects_of(evaluator, start)
    assert len(found) > 5
    exact = 0
    for effect in found:
        assert effect.truly_more_bytes <= effect.more_bytes
        assert effect.truly_gained_s >= effect.gained_s * (1 - 1e-6)
        # More vanishes where the view of an early result is made late, which no tree has, and is
        # freed where what is made again later was held for an earlier reader as well.
        is_exact = effect.truly_gained_s == pytest.approx(effect.gained_s, rel=1e-6)
        exact += is_exact and effect.truly_more_bytes == effect.more_bytes
    assert exact > len(found) / 2


@models
def test_effects_are_at_least_as_said_where_they_run_more_often(name: str):
    evaluator, solved = charged_alike(captured(name)), search_of(name).solved.members[:-1]
    climbed = evaluator.climb(solved[0], USUAL)
    starts = (*solved[:: max(len(solved) // 4, 1)], climbed[len(climbed) // 2])
    found = {start: effects_of(evaluator, start) for start in starts}
    assert len(found[solved[0]]) > 5
    for effect in itertools.chain.from_iterable(found.values()):
        assert effect.truly_gained_s >= effect.gained_s * (1 - 1e-6)
        assert effect.truly_more_bytes <= effect.more_bytes


def test_what_is_held_for_one_operation_alone_is_freed():
    search = search_of("gpt")
    start = search.solved.members[len(search.solved.members) // 2]
    assert any(effect.freed_bytes for effect in effects_of(search.evaluator, start))


def test_nothing_has_an_effect_where_nothing_runs_again():
    search = search_of("gpt")
    assert effects_of(search.evaluator, search.baseline) == []
