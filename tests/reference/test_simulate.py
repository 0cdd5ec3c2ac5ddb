from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fxremat.errors import ScheduleError
from fxremat.ir import (
    Backward,
    Chain,
    Costs,
    Forward,
    Keep,
    Op,
    Problem,
    Schedule,
    Stage,
    StageCosts,
    Storage,
)
from tests.paper_terms import chain_from_sizes
from tests.reference.simulate import check, simulate
from tests.strategies import costed_chains

KINDS = {"all": Keep.ALL, "ck": Keep.INPUT, "none": Keep.NONE}


def schedule(text: str) -> Schedule:
    """``"ck0 none1 all2 B2"`` and so on."""

    def op(word: str) -> Op:
        kind, stage = re.fullmatch(r"([a-zB]+)(-?\d+)", word).groups()
        return Backward(int(stage)) if kind == "B" else Forward(int(stage), KINDS[kind])

    return Schedule(tuple(map(op, text.split())))


def plain(count: int = 3) -> tuple[Chain, Costs]:
    """Sizes that are powers of ten, so that a peak says what was held.

    Boundary ``i`` has ``10 ** i`` bytes, the rest of saved set ``i`` has twice that.
    """
    sizes = [10**i for i in range(count + 1)]
    chain = chain_from_sizes(sizes, [sizes[i + 1] + 2 * sizes[i] for i in range(count)])
    return chain, Costs((StageCosts(1.0, 2.0, 4.0, 0, 0, 0, 0, 0),) * count)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("none0 all1", r"op 2 before|ends at op 2 before B 2"),
        ("none1", r"op 0 \(F_none 1\): boundary 1 is not in memory"),
        ("ck0 none1 none1", r"op 2 \(F_none 1\): boundary 1 is not in memory"),
        ("none0 none1 all0", r"op 2 \(F_all 0\): boundary 0 is not in memory"),
        ("ck0 ck1 all2 none1 ck0 all1", r"^the schedule ends at op 6 before B 2$"),
        ("ck0 ck1 none1 ck0 ck1 none1 none1", r"op 6 \(F_none 1\): boundary 1 is not in memory"),
        ("ck0 ck1 all2 B1", r"op 3 \(B 1\): the backward of stage 2 is not done"),
        ("ck0 ck1 all2 B2 B2", r"op 4 \(B 2\): it is done already"),
        ("ck0 ck1 ck2 B2", r"op 3 \(B 2\): the saved set of stage 2 is not in memory"),
        ("ck0 none1 all2 none2 B2", r"op 4 \(B 2\): boundary 2 is not in memory"),
        ("ck0 ck1 all2 B2 ck2", r"op 4 \(F_ck 2\): the backward of stage 2 is done"),
        ("ck0 ck1 all2 B2 B1", r"op 4 \(B 1\): the saved set of stage 1 is not in memory"),
        ("all0 all1 all2 B2 B1", r"^the schedule ends at op 5 before B 0$"),
        ("", r"^the schedule ends at op 0 before B 2$"),
        ("all3", r"op 0 \(F_all 3\): there is no such stage"),
        ("all-1", r"op 0 \(F_all -1\): there is no such stage"),
        ("B3", r"op 0 \(B 3\): there is no such stage"),
    ],
)
def test_invalid(text: str, reason: str) -> None:
    with pytest.raises(ScheduleError, match=reason):
        simulate(*plain(), schedule(text))


def test_keeping_all() -> None:
    timeline = simulate(*plain(), schedule("all0 all1 all2 B2 B1 B0"))
    events = timeline.events
    assert [event.start_s for event in events] == [0, 1, 2, 3, 5, 7]
    assert [event.end_s for event in events] == [1, 2, 3, 5, 7, 9]
    assert [event.held_bytes for event in events] == [13, 133, 1333, 133, 13, 0]
    assert [event.peak_bytes for event in events] == [13, 133, 1333, 1333, 133, 13]
    assert timeline.makespan_s == 9
    assert timeline.peak_bytes == 1333


def test_a_forward_frees_what_nobody_holds() -> None:
    text = "ck0 none1 all2 B2 ck0 all1 B1 all0 B0"
    timeline = simulate(*plain(), schedule(text))
    held = [event.held_bytes for event in timeline.events]
    # The last two forwards open rebuilds, of which only the peak is known.
    assert held == [11, 101, 1301, 1, 11, 11, 1, 1, 0]
    assert [event.peak_bytes for event in timeline.events] == [
        *(11, 111, 1301, 1301),
        *(11, 11, 11, 1, 1),
    ]


def test_a_kept_boundary_is_gone_once_consumed_but_not_in_a_saved_set() -> None:
    consumed = schedule("ck0 ck1 none2 none1 none1")
    with pytest.raises(ScheduleError, match=r"op 4 \(F_none 1\): boundary 1"):
        simulate(*plain(), consumed)
    timeline = simulate(*plain(), schedule("all0 none1 none2 none1 all2 B2 all1 B1 B0"))
    assert [event.held_bytes for event in timeline.events][:4] == [13, 113, 1013, 113]


def test_rebuild_only_where_it_is_one() -> None:
    chain = chain_from_sizes([1, 10, 100], [30, 300])
    costs = Costs(
        (
            StageCosts(1.0, 2.0, 0.5, 1000, 0, 5, 7, 4000),
            StageCosts(8.0, 16.0, 4.0, 2000, 0, 5, 7, 6000),
        )
    )

    def run(text: str) -> list[tuple[float, int]]:
        events = simulate(chain, costs, schedule(text)).events
        return [(event.end_s - event.start_s, event.peak_bytes) for event in events]

    # The first execution is none, even with the backward straight after it.
    assert run("ck0 all1 B1 all0 B0")[1:3] == [(8, 2316), (16, 2318)]
    # The second is, and both operations have its peak.
    assert run("ck0 all1 B1 all0 B0")[3:] == [(0.5, 5001), (2, 5001)]
    assert run("ck0 ck1 all1 B1 all0 B0")[2:4] == [(4, 8011), (16, 8011)]
    # A second execution whose backward comes later is none.
    assert run("ck0 all1 all0 B1 B0")[2:] == [(1, 2346), (16, 2348), (2, 1038)]
    # Nor is any other forward before a backward, which reads the copy of boundary 1 in flight.
    assert run("ck0 all1 ck0 B1 all0 B0")[2:4] == [(1, 2321), (16, 2328)]


def test_extras_gradients_and_fixed_bytes() -> None:
    chain = chain_from_sizes([1, 10, 100], [30, 300])
    cost = StageCosts(1.0, 1.0, 1.0, 1000, 10_000, 20_000, 30_000, 40_000)
    costs = Costs((cost, StageCosts(1.0, 1.0, 1.0, 2000, 50_000, 60_000, 70_000, 80_000)), 100_000)
    events = simulate(chain, costs, schedule("ck0 all1 B1 all0 B0")).events
    assert [event.peak_bytes for event in events] == [
        100_000 + 2000 + 11 + 10_000,
        100_000 + 2000 + 311 + 60_000,
        100_000 + 2000 + 311 + 70_000,
        100_000 + 1000 + 1 + 40_000,
        100_000 + 1000 + 1 + 40_000,
    ]
    assert [event.held_bytes for event in events] == [
        100_000 + 2000 + 11,
        100_000 + 2000 + 311,
        100_000 + 1000 + 1,
        100_000 + 1000 + 1 + 40_000,
        100_000,
    ]


def sharing() -> tuple[Chain, Costs]:
    """Storage 0 crosses all cuts; storage ``i`` begins at boundary ``i``."""
    chain = Chain(
        storages=tuple(Storage(10**i) for i in range(4)),
        boundaries=((0,), (0, 1), (0, 2), (0, 3)),
        stages=tuple(Stage(f"stage{i}", (i + 1,), i) for i in range(3)),
    )
    return chain, Costs((StageCosts(1.0, 1.0, 1.0, 0, 0, 0, 0, 0),) * 3)


def test_a_storage_that_passes_through_is_counted_once() -> None:
    events = simulate(*sharing(), schedule("ck0 ck1 all2 B2 all1 B1 all0 B0")).events
    assert [event.held_bytes for event in events][:4] == [11, 111, 1111, 11]


def test_a_recomputed_storage_is_counted_again_while_the_old_one_is_held() -> None:
    events = simulate(*sharing(), schedule("ck0 ck1 none2 ck0 all1 all2 B2 B1 all0 B0")).events
    held = [event.held_bytes for event in events]
    # Boundary 1 is kept when forward 0 writes it anew; the copy in flight is read and kept
    # by forward 1, which frees the old one.
    assert held[:5] == [11, 111, 1011, 21, 111]


def test_check_holds_the_peak_against_the_budget() -> None:
    chain, costs = plain()
    keep_all = schedule("all0 all1 all2 B2 B1 B0")
    assert check(Problem(chain, costs, 1333), keep_all).peak_bytes == 1333
    with pytest.raises(ScheduleError, match=r"op 2 \(F_all 2\) peaks at 1333 bytes.* 1332 bytes"):
        check(Problem(chain, costs, 1332), keep_all)


@given(costed_chains(), st.data())
def test_random_walks_hold_what_a_recount_says(
    costed: tuple[Chain, Costs], data: st.DataObject
) -> None:
    """Whatever is run: events are back to back, and memory never exceeds a peak or leaks."""
    chain, costs = costed
    count = len(chain)
    words = [f"ck{i}" for i in range(count)]
    for i in reversed(range(count)):
        begin = data.draw(st.integers(0, i))
        words += [f"ck{j}" for j in range(begin, i)] + [f"all{i}", f"B{i}"]
    timeline = simulate(chain, costs, schedule(" ".join(words)))
    now = 0.0
    for event in timeline.events:
        assert event.start_s == now
        assert event.held_bytes <= event.peak_bytes or isinstance(event.op, Backward)
        now = event.end_s
    assert timeline.makespan_s == now
    assert timeline.events[-1].held_bytes == costs.fixed_bytes
