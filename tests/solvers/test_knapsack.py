"""A plan for each region of a step, against trying all of them."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence

import pytest

from fxremat.solvers.knapsack import Call, Choice, least, rooms, solve


def some_calls(rng: random.Random, *, host_bytes: int = 1) -> list[Call]:
    """Calls whose last choices, which keep everything, take nothing of the host."""
    return [
        Call(
            (
                *(some_choice(rng, rng.randrange(host_bytes)) for _ in range(rng.randrange(4))),
                some_choice(rng, 0),
            ),
            *(rng.randrange(-5, 30) for _ in range(4)),
        )
        for _ in range(rng.randrange(1, 6))
    ]


def some_choice(rng: random.Random, host_bytes: int) -> Choice:
    peaks = rng.randrange(40), rng.randrange(40)
    return Choice(rng.randrange(20), *peaks, rng.randrange(1, 9), host_bytes)


def walked(calls: Sequence[Call], chosen: Sequence[int]) -> tuple[int, float]:
    """Peak and seconds, call by call: forwards, then backwards, with what is held listed."""
    picked = [call.choices[i] for call, i in zip(calls, chosen, strict=True)]
    levels, held = [0], []
    for call, choice in zip(calls, picked, strict=True):
        levels.append(sum(held) + call.forward_bytes + choice.forward_bytes)
        held.append(choice.held_bytes)
        levels.append(sum(held) + call.after_bytes)
    for call, choice in zip(reversed(calls), reversed(picked), strict=True):
        held.pop()
        levels.append(sum(held) + call.backward_bytes + choice.backward_bytes)
        levels.append(sum(held) + call.before_bytes)
    return max(levels), sum(choice.seconds for choice in picked)


def every(calls: Sequence[Call]) -> list[tuple[int, float]]:
    indices = (range(len(call.choices)) for call in calls)
    return [walked(calls, chosen) for chosen in itertools.product(*indices)]


@pytest.mark.parametrize("seed", range(300))
def test_as_good_as_trying_all(seed: int) -> None:
    rng = random.Random(seed)
    calls = some_calls(rng)
    tried = every(calls)
    lowest = least(calls, most_states=2048)
    assert lowest.peak_bytes == min(peak for peak, _ in tried)
    assert walked(calls, lowest.chosen) == (lowest.peak_bytes, lowest.seconds)
    for budget_bytes in range(lowest.peak_bytes - 2, max(peak for peak, _ in tried) + 1, 3):
        found = solve(calls, most_states=2048, budget_bytes=budget_bytes)
        fitting = [seconds for peak, seconds in tried if peak <= budget_bytes]
        if not fitting:
            assert found is None
            continue
        assert found is not None
        assert found.seconds == min(fitting)
        assert walked(calls, found.chosen) == (found.peak_bytes, found.seconds)


@pytest.mark.parametrize("seed", range(200))
def test_host_memory_is_never_exceeded_and_whatever_fits_is_found(seed: int) -> None:
    rng = random.Random(seed)
    calls = some_calls(rng, host_bytes=12)
    indices = (range(len(call.choices)) for call in calls)
    tried = [
        (
            *walked(calls, chosen),
            sum(c.choices[i].host_bytes for c, i in zip(calls, chosen, strict=True)),
        )
        for chosen in itertools.product(*indices)
    ]
    for host_bytes in range(0, max(host for *_, host in tried) + 2, 3):
        within = [(peak, seconds) for peak, seconds, host in tried if host <= host_bytes]
        lowest = least(calls, most_states=2048, host_bytes=host_bytes)
        assert lowest.host_bytes <= host_bytes
        for budget_bytes in {min(peak for peak, _ in within) + more for more in (-1, 0, 3, 9)}:
            found = solve(calls, most_states=2048, budget_bytes=budget_bytes, host_bytes=host_bytes)
            fitting = [seconds for peak, seconds in within if peak <= budget_bytes]
            assert (found is not None) == bool(fitting)
            if found is not None:
                assert found.peak_bytes <= budget_bytes and found.host_bytes <= host_bytes
                assert found.seconds >= min(fitting)
        keeping = walked(calls, [len(call.choices) - 1 for call in calls])[0]
        assert lowest.peak_bytes == min(*(peak for peak, _ in within), keeping)


def test_a_byte_of_the_host_goes_where_it_saves_most() -> None:
    saving = (5.0, 1.0, 3.0, 2.0, 4.0)
    calls = [Call((Choice(0, 0, 0, 1.0, 10), Choice(0, 0, 0, 1.0 + s)), 0, 0, 0, 0) for s in saving]
    for count in range(len(saving) + 1):
        found = solve(calls, most_states=2048, budget_bytes=0, host_bytes=10 * count + 9)
        assert found is not None
        assert found.host_bytes == 10 * count
        assert found.seconds == len(saving) + sum(sorted(saving)[: len(saving) - count])


@pytest.mark.parametrize("seed", range(100))
def test_rooms_are_what_comes_between_a_forward_and_its_backward(seed: int) -> None:
    calls = some_calls(random.Random(seed))
    chosen = [0] * len(calls)
    for k, room in enumerate(rooms(calls, chosen)):
        later = [0, *(call.choices[0].held_bytes for call in calls[k + 1 :])]
        so_far = list(itertools.accumulate(later))
        levels = [calls[k].after_bytes, calls[k].backward_bytes]
        levels += [
            call.peak_bytes(call.choices[0], held_bytes)
            for call, held_bytes in zip(calls[k + 1 :], so_far, strict=False)
        ]
        levels += [
            call.backward_bytes + held_bytes
            for call, held_bytes in zip(calls[k + 1 :], so_far[1:], strict=True)
        ]
        assert room == max(levels)


def test_a_step_of_many_regions_is_solved_closely() -> None:
    rng = random.Random(1)
    choices = tuple(Choice(h, 64, 64, 64 - h + rng.random()) for h in range(0, 65, 2))
    calls = [Call(choices, 0, 0, 0, 0) for _ in range(24)]
    whole = solve(calls, budget_bytes=700, most_states=2048)
    thinned = solve(calls, budget_bytes=700, most_states=64)
    assert whole is not None
    assert thinned is not None
    assert thinned.peak_bytes <= 700
    assert whole.seconds <= thinned.seconds <= 1.01 * whole.seconds
