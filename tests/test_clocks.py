"""Vector clocks: what is ordered is no race, and what is not is one."""

from __future__ import annotations

import pytest

from tests.clocks import GRAIN_BYTES, Memory, Timeline

SIZE = 4 * GRAIN_BYTES


def two() -> tuple[Timeline, Timeline]:
    return Timeline("one", index=0, timelines=2), Timeline("two", index=1, timelines=2)


def access(memory: Memory, by: Timeline, kind: str, *, begin: int = 0, end: int = SIZE) -> bool:
    """Whether that is a race."""
    by.tick()
    does = memory.write if kind == "write" else memory.read
    return bool(does(by, begin, end, what="works"))


KINDS = [(a, b) for a in ("read", "write") for b in ("read", "write")]


@pytest.mark.parametrize(("first", "second"), KINDS)
@pytest.mark.parametrize("ordered", [False, True])
def test_two_accesses_race_if_one_writes_and_nothing_orders_them(
    first: str, second: str, ordered: bool
):
    one, other = two()
    memory = Memory("memory", address=0, nbytes=SIZE)
    assert not access(memory, one, first)
    if ordered:
        other.come_after(one.clock)
    race = "write" in (first, second) and not ordered
    assert access(memory, other, second) == race


def test_a_timeline_does_not_race_with_itself_nor_bytes_with_their_neighbours():
    one, other = two()
    memory = Memory("memory", address=0, nbytes=SIZE)
    assert not access(memory, one, "write", end=GRAIN_BYTES)
    assert not access(memory, one, "write", end=GRAIN_BYTES)
    assert not access(memory, other, "write", begin=GRAIN_BYTES)
    assert access(memory, other, "read", end=GRAIN_BYTES)


def test_a_write_must_come_after_every_read():
    """Of two timelines: to have waited for one is not enough."""
    one, other = two()
    memory = Memory("memory", address=0, nbytes=SIZE)
    access(memory, one, "write")
    other.come_after(one.clock)
    assert not access(memory, other, "read")
    assert not access(memory, one, "read")
    assert access(memory, one, "write")


def test_an_order_holds_up_to_the_moment_it_was_made():
    one, other = two()
    memory = Memory("memory", address=0, nbytes=SIZE)
    access(memory, one, "read")
    other.come_after(one.clock)
    assert not memory.reuse(other, what="takes")
    access(memory, one, "read")
    assert memory.reuse(other, what="takes")
    assert access(memory, other, "write")
