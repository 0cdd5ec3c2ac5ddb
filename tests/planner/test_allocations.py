"""What a step asks of the allocator: the sums are the evaluation's; no more is handed out twice."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace

import pytest
import torch
from torch.fx import Node

from fxremat.effort import USUAL
from fxremat.ir import Move, Request
from fxremat.ir.schedule import coded
from fxremat.passes.emit.program import Program, keep_all
from fxremat.passes.stages.block import Block
from fxremat.planner.allocator import allocations
from fxremat.planner.allocator.allocations import (
    Allocations,
    crowded,
    replay_requests,
    requests_of_step,
    settings_of,
)
from fxremat.planner.allocator.allocator import AllocatorSettings
from fxremat.planner.allocator.footprints import Footprints
from fxremat.planner.context.context_bytes import ContextBytes
from fxremat.planner.decision.candidates import Candidate, Evaluation
from fxremat.planner.decision.moves import Movable, moved
from fxremat.planner.search.search import Search
from tests.harness import Captured, captured, on_release, periodic, random_schedule, search_of

models = pytest.mark.parametrize("name", ["gpt_logits", "siamese", "unet", "buffers"])
GROWING = AllocatorSettings(expandable_segments=True)


@dataclass(frozen=True)
class Carried:
    """A schedule carried out, and what could travel."""

    candidate: Candidate
    program: Program
    evaluation: Evaluation
    movable: Movable

    def moves(self, share: float) -> tuple[Move, ...]:
        """Transfers that lower the peak by a share of what they can."""
        most = self.evaluation.peak_bytes
        return self.movable.moves(most - int(share * (most - self.movable.least_bytes))) or ()


@functools.cache
def carried_out(name: str) -> list[Carried]:
    step = captured(name)
    count = len(step.line.stages)
    schedules = [keep_all(count), periodic(count, 2)]
    schedules += [random_schedule(count, seed) for seed in range(4)]
    evaluator, joint = step.evaluator(around(step)), step.joint
    returned = (n for n in (*joint.forward_outputs, *joint.backward_outputs) if isinstance(n, Node))
    fixed = joint.storages.of((*joint.given, *joint.tangents, *step.line.pinned, *returned))
    found = []
    for schedule in schedules:
        candidate = evaluator.candidate(coded(schedule))
        evaluation = evaluator.evaluation(candidate)
        movable = Movable.of(evaluation, fixed, USUAL.small_share)
        found.append(Carried(candidate, step.program(schedule), evaluation, movable))
    return found


def around(step: Captured) -> ContextBytes:
    """With a loss that needs something, something reserved, and a copy at the end."""
    found = step.context_bytes
    return replace(
        found,
        given_bytes=found.given_bytes + 12_345,
        loss_point_bytes=found.loss_point_bytes + 5_000_000,
        end_bytes=54_321,
    )


def sums(requests: tuple[Request, ...], now: int) -> tuple[int, int]:
    """The most at any instant, and what is left."""
    peak = now
    for _, nbytes in requests:
        now += nbytes
        peak = max(peak, now)
    return peak, now


def check(
    step: Captured,
    carried: Carried,
    moves: tuple[Move, ...] = (),
    found: ContextBytes | None = None,
) -> None:
    found = found or around(step)
    evaluation = moved(carried.evaluation, moves)
    asked = requests_of_step(carried.program, found, step.footprints, moves)
    cleared = sum(nbytes for _, nbytes in asked.cleared)
    now = sum(asked.given_bytes) + asked.unplaced_bytes + cleared
    assert now == found.given_bytes
    peaks, held = [], []
    for index, requests in enumerate(asked.calls):
        if index == asked.loss_point_index:
            loss_point, now = sums(asked.loss_point, now)
            now -= cleared
            if not moves:
                assert loss_point == evaluation.loss_point_bytes
        peak, now = sums(requests, now)
        peaks.append(peak)
        held.append(now)
    assert held == list(evaluation.held_bytes)
    assert sums(asked.end, now) == (evaluation.end_bytes, evaluation.end_bytes - found.end_bytes)
    assert sums(tuple(asked), found.given_bytes - cleared)[0] == evaluation.peak_bytes
    if not moves:
        # A call's peak may be before its first operation: then it is what was held before.
        assert [max(p, h) for p, h in zip(peaks, held, strict=True)] == [
            max(p, h) for p, h in zip(evaluation.peaks_bytes, evaluation.held_bytes, strict=True)
        ]


@models
@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
def test_the_sums_of_requests_are_the_evaluation(name: str, share: float):
    """Whatever travels."""
    step = captured(name)
    travelling = 0
    for carried in carried_out(name):
        moves = carried.moves(share)
        travelling += len(moves)
        check(step, carried, moves)
    assert bool(travelling) == (share > 0)


@on_release
@models
def test_the_sums_of_requests_are_the_evaluation_where_tangents_stay(name: str):
    step = captured(name)
    found = replace(around(step), tangents_stay=True)
    evaluator = step.evaluator(found)
    for carried in carried_out(name):
        candidate = evaluator.candidate(carried.candidate.codes)
        evaluation, program = evaluator.evaluation(candidate), evaluator.program(candidate)
        assert evaluation.held_bytes[-1] > carried.evaluation.held_bytes[-1]
        check(step, replace(carried, program=program, evaluation=evaluation), found=found)


@models
def test_the_sums_of_requests_are_the_evaluation_where_gradients_are_cleared(name: str):
    """Between forward and backward: a replay hands out their memory again, too."""
    step, cleared = captured(name), (30 << 20, 30 << 20, 4096)
    base = around(step)
    found = replace(
        base,
        given_bytes=base.given_bytes + sum(cleared),
        given_each_bytes=(*base.given_each_bytes, *cleared),
        tangent_bytes=base.tangent_bytes - sum(cleared),
        cleared_each_bytes=cleared,
    )
    evaluator = step.evaluator(found)
    for carried in carried_out(name):
        candidate = evaluator.candidate(carried.candidate.codes)
        evaluation, program = evaluator.evaluation(candidate), evaluator.program(candidate)
        before = carried.evaluation
        assert evaluation.held_bytes[-1] == before.held_bytes[-1]
        check(step, replace(carried, program=program, evaluation=evaluation), found=found)
        asked = requests_of_step(program, found, step.footprints)
        taken = replay_requests(asked, GROWING).allocated_bytes
        again = requests_of_step(carried.program, base, step.footprints)
        rounded = replay_requests(again, GROWING).allocated_bytes - before.peak_bytes
        assert taken <= evaluation.peak_bytes + rounded + (1 << 20)


@models
@pytest.mark.parametrize("rules", [AllocatorSettings(), GROWING], ids=["usual", "growing"])
def test_more_is_handed_out_than_asked_for_and_a_third_step_takes_no_more(
    name: str, rules: AllocatorSettings, monkeypatch: pytest.MonkeyPatch
):
    step = captured(name)
    found = around(step)
    for carried in carried_out(name):
        for moves in ((), carried.moves(1.0)):
            peak = moved(carried.evaluation, moves).peak_bytes
            asked = requests_of_step(carried.program, found, step.footprints, moves)
            taken = replay_requests(asked, rules)
            assert peak <= taken.allocated_bytes <= taken.reserved_bytes
            with monkeypatch.context() as patch:
                patch.setattr(allocations, "STEPS", 4)
                assert replay_requests(asked, rules) == taken


def test_what_is_handed_out_is_that_for_a_workspace_in_pieces():
    """As many bytes in all, but other blocks."""
    step = captured("gpt")
    found = around(step)
    (carried, *_) = carried_out("gpt")
    large = 40 << 20

    def asked(node: Node, block: Block) -> tuple[Request, ...]:
        count = len(step.joint.storages.of_node[node])
        results = tuple((i, 0) for i in range(count))
        pieces = ((-1, large // 2), (-2, large // 2), (-2, -large // 2), (-1, -large // 2))
        return (*results, *pieces)

    footprints = Footprints(step.measured.line, lambda _node, _block: large, asked)
    whole, pieces = (
        requests_of_step(carried.program, found, footprints, in_pieces=in_pieces)
        for in_pieces in (False, True)
    )
    assert [sum(n for _, n in call) for call in whole.calls] == [
        sum(n for _, n in call) for call in pieces.calls
    ]
    assert sums(tuple(whole), 0) == sums(tuple(pieces), 0)
    assert len(list(pieces)) > len(list(whole))
    taken = [replay_requests(requests, AllocatorSettings()) for requests in (whole, pieces)]
    assert taken[0] != taken[1]
    told = Allocations(footprints, found, AllocatorSettings())
    handed_out = told.of(carried.candidate, lambda: carried.program)
    assert handed_out == replace(
        taken[1], reserved_bytes=taken[1].reserved_bytes + allocations.SPARE_BYTES
    )


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
    step, carried = captured("gpt_logits"), carried_out("gpt_logits")[0]
    plain = Allocations(step.footprints, around(step))
    taken = plain.of(carried.candidate, lambda: carried.program)
    assert taken.allocated_bytes == taken.reserved_bytes == carried.evaluation.peak_bytes


def test_the_budget_is_for_what_is_allocated_or_for_what_is_reserved():
    step, carried = captured("gpt_logits"), carried_out("gpt_logits")[0]
    found = Allocations(step.footprints, around(step), AllocatorSettings())
    taken = found.of(carried.candidate, lambda: carried.program)
    counted = [taken.counted_bytes(on) for on in ("allocated", "reserved")]
    assert counted == [taken.allocated_bytes, taken.reserved_bytes]
    assert counted[0] < counted[1]


def test_what_is_reserved_leaves_a_segment_for_small_blocks_that_nobody_told_of():
    step, carried = captured("gpt_logits"), carried_out("gpt_logits")[0]
    for settings in (AllocatorSettings(), GROWING):
        found = Allocations(step.footprints, around(step), settings)
        taken = found.of(carried.candidate, lambda: carried.program)
        asked = requests_of_step(carried.program, around(step), step.footprints)
        for more in (512, 8192, 1 << 20):
            beside = replace(asked, given_bytes=(*asked.given_bytes, more))
            assert replay_requests(beside, settings).reserved_bytes <= taken.reserved_bytes


def test_small_blocks_of_a_loss_are_asked_of_the_small_pool():
    step, carried = captured("gpt_logits"), carried_out("gpt_logits")[0]
    plain = replace(around(step), loss_point_bytes=around(step).loss_point_bytes + 40_000_000)
    small = replace(plain, loss_point_small_bytes=30_000_000)
    whole, pieces = (
        requests_of_step(carried.program, each, step.footprints) for each in (plain, small)
    )
    assert sums(pieces.loss_point, 0) == sums(whole.loss_point, 0)
    most = [max(nbytes for _, nbytes in each.loss_point) for each in (whole, pieces)]
    assert most[0] - most[1] <= 30_000_000
    asked = [nbytes for _, nbytes in pieces.loss_point if 0 < nbytes <= 1 << 20]
    assert 29_000_000 <= sum(asked) <= 32_000_000


def test_a_program_is_replayed_once_with_the_same_moves():
    step, carried = captured("gpt_logits"), carried_out("gpt_logits")[0]
    found = Allocations(step.footprints, around(step), AllocatorSettings())
    moves, made = carried.moves(1.0), []

    def program() -> Program:
        made.append(carried.program)
        return carried.program

    plain, travelling, again = (
        found.of(replace(carried.candidate, moves=m), program) for m in ((), moves, ())
    )
    assert len(made) == 2
    assert again == plain != travelling


by_model = pytest.mark.parametrize("name", ["gpt", "unet", "siamese", "hf_llama"])


def crowding(search: Search, candidate: Candidate, limit_bytes: int) -> dict[str, int]:
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
        assert crowding(search, candidate, candidate.peak_bytes) == {}


@by_model
def test_whoever_runs_at_the_peak_is_in_the_way_of_a_lower_one(name: str):
    search = search_of(name)
    joint = search.measured.line.joint
    for candidate in search.pool.thinned(4):
        evaluation = search.evaluator.evaluation(candidate)
        if (
            max(evaluation.peaks_bytes) == candidate.peak_bytes
        ):  # not the loss point's, nor the end's
            assert crowding(search, candidate, candidate.peak_bytes - 1)
        given = {n.name for n in (*joint.given, *joint.tangents)}
        everything = crowding(search, candidate, 0)
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
        now = set(crowding(search, search.least, int(share * peak_bytes)))
        assert before <= now
        before = now
