"""What a step asks of the allocator: the sums are the sweep's, and no more is handed out twice."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.fx import Node

from fxremat.passes.emit.program import Program, keep_all
from fxremat.passes.emit.travel import Move
from fxremat.planner import allocations
from fxremat.planner.allocations import Allocations, replay_requests, requests_of_step, settings_of
from fxremat.planner.footprint import Request
from fxremat.planner.moves import Movable, swept
from fxremat.planner.sweep import Surroundings, Sweep
from fxremat.simulate.allocator import AllocatorSettings
from tests.harness import Captured, captured, periodic, random_schedule

models = pytest.mark.parametrize("name", ["gpt_logits", "siamese", "unet", "buffers"])
GROWING = AllocatorSettings(expandable_segments=True)


def programs(step: Captured) -> list[Program]:
    count = len(step.line.stages)
    schedules = [keep_all(count), periodic(count, 2)]
    schedules += [random_schedule(count, seed) for seed in range(4)]
    return [step.program(schedule) for schedule in schedules]


def around(step: Captured) -> Surroundings:
    """With a loss that needs something, something reserved, and a copy at the end."""
    found = step.surroundings
    return replace(
        found,
        given_bytes=found.given_bytes + 12_345,
        turn_bytes=found.turn_bytes + 5_000_000,
        end_bytes=54_321,
    )


def sums(requests: tuple[Request, ...], now: int) -> tuple[int, int]:
    """The most at any instant, and what is left."""
    peak = now
    for _, nbytes in requests:
        now += nbytes
        peak = max(peak, now)
    return peak, now


def check(program: Program, sweep: Sweep, found: Surroundings, step: Captured, moves=()) -> None:
    asked = requests_of_step(program, found, step.sweeper, moves)
    now = sum(asked.given_bytes) + asked.unplaced_bytes
    assert now == found.given_bytes
    peaks, held = [], []
    for index, requests in enumerate(asked.calls):
        if index == asked.turn_index:
            turn, now = sums(asked.turn, now)
            if not moves:
                assert turn == sweep.turn_bytes
        peak, now = sums(requests, now)
        peaks.append(peak)
        held.append(now)
    assert held == list(sweep.held_bytes)
    assert sums(asked.end, now) == (sweep.end_bytes, sweep.end_bytes - found.end_bytes)
    assert sums(tuple(asked), found.given_bytes)[0] == sweep.peak_bytes
    if not moves:
        # A call's peak may be before its first operation: then it is what was held before.
        assert [max(p, h) for p, h in zip(peaks, held, strict=True)] == [
            max(p, h) for p, h in zip(sweep.peaks_bytes, sweep.held_bytes, strict=True)
        ]


@models
def test_the_sums_of_requests_are_the_sweep(name: str):
    step = captured(name)
    found = around(step)
    for program in programs(step):
        check(program, step.sweeper.sweep(program, found), found, step)


def moved(program: Program, sweep: Sweep, share: float) -> tuple[Move, ...]:
    """Transfers that lower the peak by a share of what they can."""
    joint, line = program.line.joint, program.line
    returned = (n for n in (*joint.forward_outputs, *joint.backward_outputs) if isinstance(n, Node))
    fixed = joint.storages.of((*joint.given, *joint.tangents, *line.pinned, *returned))
    movable = Movable.of(program, sweep, fixed)
    budget = sweep.peak_bytes - int(share * (sweep.peak_bytes - movable.least_bytes))
    return movable.moves(budget) or ()


@models
@pytest.mark.parametrize("share", [0.3, 1.0])
def test_the_sums_of_requests_are_the_sweep_with_what_travels(name: str, share: float):
    step = captured(name)
    found = around(step)
    travelling = 0
    for program in programs(step):
        sweep = step.sweeper.sweep(program, found)
        moves = moved(program, sweep, share)
        travelling += len(moves)
        check(program, swept(sweep, moves), found, step, moves)
    assert travelling


@models
@pytest.mark.parametrize("rules", [AllocatorSettings(), GROWING], ids=["usual", "growing"])
def test_more_is_handed_out_than_asked_for_and_a_third_step_takes_no_more(
    name: str, rules: AllocatorSettings, monkeypatch: pytest.MonkeyPatch
):
    step = captured(name)
    found = around(step)
    for program in programs(step):
        sweep = step.sweeper.sweep(program, found)
        for moves in ((), moved(program, sweep, 1.0)):
            peak = swept(sweep, moves).peak_bytes
            asked = requests_of_step(program, found, step.sweeper, moves)
            taken = replay_requests(asked, rules)
            assert peak <= taken.allocated_bytes <= taken.reserved_bytes
            with monkeypatch.context() as patch:
                patch.setattr(allocations, "STEPS", 4)
                assert replay_requests(asked, rules) == taken


def on_cuda(patch: pytest.MonkeyPatch, backend: str, told: dict[str, object]) -> None:
    """A device whose allocator tells of itself."""
    patch.setattr(torch.cuda, "get_allocator_backend", lambda: backend)
    patch.setattr(torch.cuda.memory, "_snapshot", lambda: {"allocator_settings": told})


def test_the_rules_are_those_of_the_device(monkeypatch: pytest.MonkeyPatch):
    assert settings_of(torch.device("cpu")) is None
    on_cuda(monkeypatch, "native", {"expandable_segments": True, "max_split_size": -1})
    assert settings_of(torch.device("cuda")) == GROWING
    assert settings_of(torch.device("cpu")) is None


def test_an_allocator_that_is_not_torchs_is_told_of(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    on_cuda(monkeypatch, "cudaMallocAsync", {})
    assert settings_of(torch.device("cuda:1")) is None
    assert "cuda:1" in caplog.text
    assert "512" in caplog.text


def test_an_allocator_without_rules_hands_out_what_is_asked_for():
    step = captured("gpt_logits")
    program = programs(step)[0]
    sweep = step.sweeper.sweep(program, step.surroundings)
    plain = Allocations(step.sweeper, step.surroundings)
    assert plain.of(program, sweep).allocated_bytes == sweep.peak_bytes
    assert plain.of(program, sweep).reserved_bytes == sweep.peak_bytes


def test_the_budget_is_for_what_is_allocated_or_for_what_is_reserved():
    step = captured("gpt_logits")
    program = programs(step)[0]
    sweep = step.sweeper.sweep(program, step.surroundings)
    rules = AllocatorSettings()
    counted = [
        Allocations(step.sweeper, step.surroundings, rules, on).counted_bytes(program, sweep)
        for on in ("allocated", "reserved")
    ]
    taken = Allocations(step.sweeper, step.surroundings, rules).of(program, sweep)
    assert counted == [taken.allocated_bytes, taken.reserved_bytes]
    assert counted[0] < counted[1]
