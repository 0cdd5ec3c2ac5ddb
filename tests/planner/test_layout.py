"""A line as numbers, and the room that evaluations of it take."""

from __future__ import annotations

import numpy as np
import pytest

from fxremat.effort import USUAL
from fxremat.planner.replay import layout
from fxremat.planner.search.evaluator import Evaluator
from fxremat.planner.search.generators import chain_schedules
from tests.harness import captured, searched


def test_evaluations_are_the_same_however_little_room_there_is(monkeypatch: pytest.MonkeyPatch):
    step = captured("gpt")
    search = searched(step, generators=(chain_schedules,))
    monkeypatch.setattr(layout, "ARENA", 256)
    little = Evaluator.of(
        search.measured, step.blocks, search.evaluator.options, search.setting.context_bytes
    )
    assert little.arrays.data.size < search.evaluator.arrays.data.size
    before = little.arrays.data.size
    for codes in chain_schedules(search.setting):
        candidate, expected = little.candidate(codes), search.evaluator.candidate(codes)
        assert candidate.peak_bytes == expected.peak_bytes
        assert candidate.total_s == expected.total_s
    assert little.arrays.data.size > before
    start = search.solved.members[0]
    climbed = [(c.held, c.peak_bytes, c.total_s) for c in search.evaluator.climb(start, USUAL)]
    assert [(c.held, c.peak_bytes, c.total_s) for c in little.climb(start, USUAL)] == climbed


def test_nodes_are_numbered_stage_by_stage():
    step = captured("siamese")
    number = layout.numbering(step.line)
    for part in ("forward", "backward"):
        found = [number[n] for stage in step.line.stages for n in getattr(stage, part)]
        assert found == list(range(found[0], found[0] + len(found)))
    assert sorted(number.values()) == list(range(len(number)))
    assert np.all(np.diff([number[n] for n in step.joint.primals]) == 1)
