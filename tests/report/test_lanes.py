from __future__ import annotations

import itertools
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fxremat.errors import ScheduleError
from fxremat.ir import (
    Activations,
    Backward,
    Chain,
    Compute,
    Costs,
    Event,
    Forward,
    Free,
    Idle,
    Keep,
    Lane,
    Link,
    Offload,
    Op,
    Part,
    Prefetch,
    Problem,
    Schedule,
    Stage,
    StageCosts,
    Storage,
    Timeline,
    Wait,
)
from tests.paper_terms import chain_from_sizes, symmetric_link
from tests.reference.simulate import check, simulate
from tests.strategies import SIZES, paper_costs

COMPUTE = {"all": Keep.ALL, "ck": Keep.INPUT, "none": Keep.NONE}
TRANSFER = {"off": Offload, "pre": Prefetch, "free": Free, "wait": Wait}
EACH = symmetric_link(1.0)
SHARED = symmetric_link(1.0, shared=True)


def schedule(text: str) -> Schedule:
    """``"all0 off:a0 free:a0 all1 B1 pre:a0/3 pre:a0 wait:a0 B0"`` and so on."""

    def op(word: str) -> Op:
        if ":" in word:
            kind, part, stage, nbytes = re.fullmatch(
                r"([a-z]+):([as])(\d+)(?:/([\d.]+))?", word
            ).groups()
            what = Activations(Part.INPUT if part == "a" else Part.SAVED, int(stage))
            return TRANSFER[kind](what, float(nbytes)) if nbytes else TRANSFER[kind](what)
        kind, stage = re.fullmatch(r"([a-zB]+)(\d+)", word).groups()
        return Backward(int(stage)) if kind == "B" else Forward(int(stage), COMPUTE[kind])

    return Schedule(tuple(map(op, text.split())))


def plain(count: int = 3, forward_s: float = 10.0, backward_s: float = 20.0) -> tuple[Chain, Costs]:
    """Boundaries of 4, 5, 6 … bytes; saved sets of 10 more than the boundary after."""
    sizes = [4 + i for i in range(count + 1)]
    chain = chain_from_sizes(sizes, [size + 10 for size in sizes[1:]])
    return chain, Costs((StageCosts(forward_s, backward_s, forward_s, 0, 0, 0, 0, 0),) * count)


def run(text: str, budget: int | None = None, **options: object) -> Timeline:
    options = {"link": EACH, **options}
    return simulate(*plain(), schedule(text), budget_bytes=budget, **options)


def times(timeline: Timeline, *kinds: type) -> list[tuple[float, float]]:
    return [(e.start_s, e.end_s) for e in timeline.events if isinstance(e.op, kinds)]


WHOLE = "all0 off:a0 free:a0 all1 off:s0 free:s0 all2 B2 pre:s0 wait:s0 B1 pre:a0 wait:a0 B0"


def test_whole_transfers_release_at_their_end_and_take_at_their_start() -> None:
    timeline = run(WHOLE)
    assert times(timeline, Offload) == [(0, 4), (10, 25)]
    assert times(timeline, Prefetch) == [(30, 45), (50, 54)]
    assert times(timeline, Compute) == [(0, 10), (10, 20), (20, 30), (30, 50), (50, 70), (70, 90)]
    held = {str(e.op): (e.peak_bytes, e.held_bytes) for e in timeline.events}
    assert held["F_all 0"] == (19, 19)
    assert held["offload a0"] == (19, 19)
    assert held["free a0"] == (15, 15)  # once its reader is done, though copied at 4
    assert held["offload s0"] == (48, 48)
    assert held["free s0"] == (33, 33)  # while stage 2 runs
    assert held["F_all 2"] == (48, 33)
    assert held["B 2"] == (48, 31)  # s0 is back from its start on
    assert held["B 1"] == (35, 19)
    assert held["B 0"] == (19, 0)
    assert timeline.makespan_s == 90
    assert timeline.idle == Idle()
    lanes = [e.lane for e in timeline.events]
    assert lanes[:4] == [Lane.COMPUTE, Lane.D2H, Lane.D2H, Lane.COMPUTE]


def test_fluid_transfers_release_and_take_as_they_go() -> None:
    timeline = run(WHOLE, fluid=True)
    held = {str(e.op): (e.peak_bytes, e.held_bytes) for e in timeline.events}
    assert held["F_all 1"] == (31, 31)
    assert held["F_all 2"] == (38, 33)  # 10 of s0's 15 bytes are copied when it begins
    assert held["B 2"] == (48, 31)  # 33 + 15 come in half its time
    assert timeline.makespan_s == 90


def test_computations_wait_for_memory_and_for_data() -> None:
    for budget, fluid, begins in ((40, False, 25), (37, True, 21), (36, True, 22)):
        timeline = run(WHOLE, budget, fluid=fluid)
        forward = timeline.events[6]
        assert str(forward.op) == "F_all 2"
        assert forward.start_s == begins
        assert forward.idle == Idle(memory_s=begins - 20)
        assert timeline.peak_bytes <= budget
    # In 40 bytes s0 comes back beside s2 and s1 only once B 2 is done.
    timeline = run(WHOLE, 40)
    assert times(timeline, Prefetch)[0] == (55, 70)
    assert timeline.events[10].idle == Idle(data_s=15)
    assert timeline.makespan_s == 90 + 5 + 15
    with pytest.raises(ScheduleError, match=r"op 6 \(F_all 2\) peaks at 33 bytes, .* 32 bytes"):
        run(WHOLE, 32)


def test_one_link_for_both_directions() -> None:
    text = "all0 off:a0 free:a0 all1 off:s0 free:s0 all2 pre:a0 B2 pre:s0 wait:s0 B1 wait:a0 B0"
    assert times(run(text), Prefetch) == [(20, 24), (30, 45)]
    assert times(run(text, link=SHARED), Prefetch) == [(25, 29), (30, 45)]
    slow = Link(1.0, 0.5)
    assert times(run(text, link=slow), Prefetch) == [(20, 28), (30, 60)]


def test_a_prefetch_holds_back_what_comes_after_it() -> None:
    text = "all0 off:a0 free:a0 all1 off:s0 pre:a0 all2 B2 B1 wait:a0 B0"
    timeline = run(text, link=SHARED)
    # The link is busy with s0 until 25, so a0 starts then, and so does stage 2.
    assert times(timeline, Prefetch) == [(25, 29)]
    assert timeline.events[6].idle == Idle(lane_s=5)
    assert timeline.idle == Idle(lane_s=5)


def test_a_fluid_prefetch_starts_when_it_can_run_through() -> None:
    # While B 2 runs, 3 bytes are free; a0's fourth fits when it is done.
    text = "all0 off:a0 free:a0 all1 all2 B2 pre:a0 B1 wait:a0 B0"
    assert times(run(text, 15 + 16 + 17 + 3, fluid=True), Prefetch) == [(47, 51)]
    assert times(run(text, 15 + 16 + 17 + 3), Prefetch) == [(50, 54)]
    assert times(run(text, 15 + 16 + 17 + 4), Prefetch) == [(30, 34)]


def test_parts_need_a_fluid_replay() -> None:
    text = "all0 off:a0 all1 off:s0/6 free:s0 all2 B2 pre:s0/2.5 pre:s0 wait:s0 B1 B0"
    timeline = run(text, fluid=True)
    assert times(timeline, Offload) == [(0, 4), (10, 16)]
    assert times(timeline, Prefetch) == [(30, 32.5), (32.5, 36)]
    assert [e.held_bytes for e in timeline.events if str(e.op) == "F_all 2"] == [4 + 9 + 16 + 17]
    with pytest.raises(ScheduleError, match=r"op 3 \(offload s0 6\): 15 bytes are left: parts"):
        run(text)


def test_a_copy_stays_on_the_host() -> None:
    text = "all0 all1 off:s0 free:s0 pre:s0 wait:s0 all2 free:s0 B2 pre:s0 wait:s0 B1 B0"
    timeline = run(text)
    assert times(timeline, Prefetch) == [(25, 40), (50, 65)]
    assert [e.held_bytes for e in timeline.events if str(e.op) == "F_all 2"] == [4 + 16 + 17]


def test_memory_stays_until_a_copy_of_it_is_done() -> None:
    chain, costs = plain(2, forward_s=1.0, backward_s=1.0)
    timeline = simulate(chain, costs, schedule("all0 all1 off:s0 B1 B0"), link=EACH)
    assert times(timeline, Offload) == [(1, 16)]
    assert timeline.events[-1].held_bytes == 15
    assert timeline.makespan_s == 16


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("all0 off:s1", r"op 1 \(offload s1\): s1 is not kept"),
        ("all0 all1 off:a1", r"op 2 \(offload a1\): a1 is part of other values"),
        ("all0 all1 free:s0", r"op 2 \(free s0\): nothing of it was offloaded"),
        ("all0 all1 pre:s0", r"op 2 \(prefetch s0\): all of it is in device memory"),
        ("all0 all1 off:s0 off:s0/1", r"op 3 \(offload s0 1\): 0 bytes are left"),
        ("all0 off:s0 free:s0 all1", r"op 3 \(F_all 1\): s0 was offloaded and not waited for"),
        ("all0 all1 off:s0 free:s0 off:s0", r"op 4 .*some of it is not in device memory"),
        ("all0 all1 off:s0 free:s0 wait:s0", r"op 4 \(wait s0\): not all of it was prefetched"),
        (
            "all0 all1 off:s0 free:s0 all2 B2 pre:s0 B1",
            r"op 7 \(B 1\): s0 was offloaded and not waited for",
        ),
    ],
)
def test_invalid(text: str, reason: str) -> None:
    with pytest.raises(ScheduleError, match=reason):
        run(text)


def test_more_than_is_left_and_what_was_not_copied() -> None:
    for text, reason in (
        ("all0 all1 off:s0/16", r"op 2 \(offload s0 16\): 15 bytes are left"),
        ("all0 all1 off:s0/5 free:s0 pre:s0/6", r"op 4 \(prefetch s0 6\): 5 bytes are left"),
    ):
        with pytest.raises(ScheduleError, match=reason):
            run(text, fluid=True)
    with pytest.raises(ScheduleError, match="they need a link"):
        run(WHOLE, link=None)


def test_what_passes_through_moves_with_whoever_brought_it_in() -> None:
    """Storage 0 is in both boundaries of stage 1: saved set 0 brings it, saved set 1 has it."""
    chain = Chain(
        storages=tuple(Storage(10**i) for i in range(3)),
        boundaries=((2,), (0,), (0,)),
        stages=(Stage("stage0", (), 0), Stage("stage1", (1,), 1)),
    )
    costs = Costs((StageCosts(1.0, 1.0, 1.0, 0, 0, 0, 0, 0),) * 2)
    text = "all0 all1 off:s1 free:s1 pre:s1 wait:s1 B1 B0"
    assert times(simulate(chain, costs, schedule(text), link=EACH), Offload) == [(2, 12)]
    text = "all0 all1 off:s0 free:s0 B1 B0"
    with pytest.raises(ScheduleError, match=r"op 4 \(B 1\): s0 was offloaded"):
        simulate(chain, costs, schedule(text), link=EACH)


def test_kept_boundaries_move_by_themselves() -> None:
    text = "ck0 ck1 off:a1 free:a1 all2 B2 pre:a1 wait:a1 all1 B1 all0 B0"
    timeline = run(text)
    assert times(timeline, Offload) == [(10, 15)]
    assert [e.held_bytes for e in timeline.events if str(e.op) == "F_all 2"] == [4 + 6 + 17]


def test_a_rebuild_beside_a_prefetch() -> None:
    chain = chain_from_sizes([4, 4, 4], [4, 4])
    costs = Costs((StageCosts(1.0, 1.0, 2.0, 0, 0, 0, 0, 9),) * 2)
    text = "ck0 off:a0 free:a0 all1 B1 pre:a0 wait:a0 all0 B0"
    timeline = simulate(chain, costs, schedule(text), link=EACH)
    assert times(timeline, Compute) == [(0, 1), (1, 2), (2, 3), (8, 10), (10, 11)]
    assert [e.peak_bytes for e in timeline.events if isinstance(e.op, Compute)][-2:] == [13, 13]
    assert timeline.events[-1].held_bytes == 0


def test_room_for_what_a_computation_leaves() -> None:
    """``B 2`` needs nothing, but 4 bytes of gradients are held once it is done."""
    chain = chain_from_sizes([4, 0, 0, 0], [0, 0, 0])
    costs = Costs(
        tuple(StageCosts(0.0, 1.0, 0.0, nbytes, 0, 0, 0, 0) for nbytes in (0, 4, 0)),
    )
    text = "all0 off:a0 free:a0 all1 all2 B2 B1 pre:a0 wait:a0 B0"
    timeline = simulate(chain, costs, schedule(text), link=EACH, budget_bytes=4)
    assert times(timeline, Backward) == [(3, 4), (4, 5), (9, 10)]
    assert timeline.peak_bytes == 4


@st.composite
def moved(draw: st.DrawFn) -> tuple[Problem, Schedule]:
    """Everything is kept; some values go after their forward and come back before a backward."""
    count = draw(st.integers(1, 5))
    sizes = draw(st.lists(SIZES, min_size=count + 1, max_size=count + 1))
    chain = chain_from_sizes(sizes, [size + draw(SIZES) for size in sizes[1:]])
    costs = draw(paper_costs(chain))
    ops: list[Op] = []
    back: list[list[Op]] = [[] for _ in range(count)]
    for i in range(count):
        value = Activations(Part.SAVED, i - 1) if i else Activations(Part.INPUT, 0)
        ops.append(Forward(i, Keep.ALL))
        if draw(st.booleans()):
            ops += [Offload(value), Free(value)]
            back[draw(st.integers(i, count - 1))].append(Prefetch(value))
            back[i].append(Wait(value))
    for i in reversed(range(count)):
        ops += [*back[i], Backward(i)]
    rates = st.sampled_from([2.0, 4.0, 8.0])
    link = Link(draw(rates), draw(rates), draw(st.booleans()))
    return Problem(chain, costs, 0, link), Schedule(tuple(ops))


def recount(problem: Problem, events: list[Event], now: float, *, fluid: bool) -> float:
    """Memory at ``now``, an instant at which nothing begins or ends."""
    chain, costs = problem.chain, problem.costs
    forwards = {e.op.stage: e for e in events if isinstance(e.op, Forward)}
    backwards = {e.op.stage: e for e in events if isinstance(e.op, Backward)}
    ways = {(type(e.op), e.op.what): e for e in events if not isinstance(e.op, Compute)}

    def share(event: Event) -> float:
        """How much of a transfer is done."""
        if event.end_s <= now:
            return 1.0
        return (now - event.start_s) / (event.end_s - event.start_s) if event.start_s < now else 0.0

    level = min((i for i, e in backwards.items() if e.end_s <= now), default=len(chain))
    total = costs.fixed_bytes + (costs.stages[level - 1].gradient_bytes if level else 0)
    for i in range(len(chain) + 1):
        part, value = (chain.boundaries[0], Activations(Part.INPUT, 0))
        if i:
            part, value = chain.saved_set(i - 1), Activations(Part.SAVED, i - 1)
            if now < forwards[i - 1].start_s:
                continue
        if now > backwards[max(i - 1, 0)].end_s:
            continue
        held = 1.0
        if (Free, value) in ways and now > forwards[i].end_s:
            off, back = share(ways[Offload, value]), share(ways[Prefetch, value])
            held = 1.0 - off + back if fluid else float(off < 1.0 or back > 0.0)
        total += held * chain.nbytes(part)
    for event in (*forwards.values(), *backwards.values()):
        if event.start_s < now < event.end_s:
            cost = costs.stages[event.op.stage]
            forward = isinstance(event.op, Forward)
            total += cost.keep_extra_bytes if forward else cost.backward_extra_bytes
    return total


@given(moved(), st.booleans(), st.integers(0, 12))
def test_random_schedules_hold_what_a_recount_says(
    drawn: tuple[Problem, Schedule], fluid: bool, less: int
) -> None:
    problem, ops = drawn
    free = simulate(problem.chain, problem.costs, ops, link=problem.link, fluid=fluid)
    budget = max(0, free.peak_bytes - less)
    problem = Problem(problem.chain, problem.costs, budget, problem.link)
    try:
        timeline = check(problem, ops, fluid=fluid)
    except ScheduleError:
        assert less
        return
    assert timeline.peak_bytes <= budget
    assert timeline.makespan_s >= free.makespan_s
    events = list(timeline.events)
    instants = sorted({t for e in events for t in (e.start_s, e.end_s)})
    for begin, end in itertools.pairwise(instants):
        if end - begin < 1e-6:
            continue
        for now in (begin + 1e-9 * (end - begin), end - 1e-9 * (end - begin)):
            held = recount(problem, events, now, fluid=fluid)
            running = [e.peak_bytes for e in events if e.start_s < now < e.end_s]
            assert held <= min([budget, *running]) + 1e-6
            if fluid or not running:
                continue
            assert held == pytest.approx(round(held))
    for lane in Lane:
        own = [e for e in events if e.lane is lane and not isinstance(e.op, Free | Wait)]
        assert all(a.end_s <= b.start_s for a, b in itertools.pairwise(own))
    both = [e for e in events if isinstance(e.op, Offload | Prefetch)]
    if problem.link.shared:
        assert all(a.end_s <= b.start_s for a, b in itertools.pairwise(both))
    computing = [e for e in events if isinstance(e.op, Compute)]
    busy = sum(e.end_s - e.start_s for e in computing)
    assert computing[-1].end_s == pytest.approx(busy + timeline.idle.total_s)
    assert events[-1].held_bytes == problem.costs.fixed_bytes
    begins = [e.start_s for e in events if isinstance(e.op, Compute | Prefetch)]
    assert begins == sorted(begins)


@given(moved(), st.booleans())
def test_the_peak_is_reached(drawn: tuple[Problem, Schedule], fluid: bool) -> None:
    """An event's peak is the most that the recount finds while it runs."""
    problem, ops = drawn
    timeline = simulate(problem.chain, problem.costs, ops, link=problem.link, fluid=fluid)
    events = list(timeline.events)
    instants = sorted({t for e in events for t in (e.start_s, e.end_s)})
    for event in events:
        if event.end_s - event.start_s < 1e-6 or any(
            e.start_s == e.end_s and event.start_s <= e.start_s <= event.end_s
            for e in events
            if isinstance(e.op, Compute)
        ):
            continue  # the recount does not see what takes no time
        found = [
            recount(problem, events, now, fluid=fluid)
            for begin, end in itertools.pairwise(instants)
            if event.start_s <= begin and end <= event.end_s and end - begin > 1e-6
            for now in (begin + 1e-9 * (end - begin), end - 1e-9 * (end - begin))
        ]
        assert max(found) <= event.peak_bytes + 1e-6
        assert max(found) > event.peak_bytes - 1 - 1e-6
