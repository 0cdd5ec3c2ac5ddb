"""Processes that agree, as threads with a store of theirs."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
import torch

import fxremat
from fxremat.errors import ArgumentError, BudgetError, PlanError, RankError
from fxremat.ir import MeasuredLink, Origin, RecordedCosts, StageSeconds
from fxremat.options.agreed import agreed_arguments
from fxremat.options.arguments import Arguments
from fxremat.planner.context.context_bytes import ContextBytes
from fxremat.planner.context.step_context import Correction
from fxremat.ranks.combine import (
    MeasuredStep,
    agreed_context,
    agreed_corrections,
    agreed_costs,
    agreed_graphs,
    agreed_link,
    agreed_profiles,
    agreed_step,
)
from fxremat.ranks.peers import Peers, Ranks
from fxremat.torch_compat import SharedStore

MEMBERS = (3, 5, 8)


def outcomes(
    run: Callable[[Peers, int], Any], *, come: tuple[int, ...] = MEMBERS, timeout_s: float = 20.0
) -> dict[int, Any]:
    """What each of several threads returns, or raises."""
    base = torch.distributed.HashStore()

    def one(rank: int) -> Any:
        peers = Peers(MEMBERS, rank, SharedStore("test", base), timeout_s=timeout_s)
        try:
            return run(peers, rank)
        except fxremat.FxrematError as error:
            return error

    with ThreadPoolExecutor(len(come)) as threads:
        return dict(zip(come, threads.map(one, come), strict=True))


def test_all_take_what_the_first_makes_of_all() -> None:
    def run(peers: Peers, rank: int) -> list[int]:
        return [
            peers.agree("a number", int, rank * k, lambda told: sum(told.values()))
            for k in range(9)
        ]

    assert outcomes(run) == {key: [16 * k for k in range(9)] for key in MEMBERS}


def test_all_follow_the_first() -> None:
    made = []

    def run(peers: Peers, rank: int) -> int | None:
        return peers.follow("a number", int, lambda: made.append(rank) or 7)  # type: ignore[func-returns-value]

    assert outcomes(run) == {3: None, 5: 7, 8: 7}
    assert made == [3]


def test_what_the_first_cannot_do_nobody_can() -> None:
    def refuse() -> int:
        raise BudgetError("too little", least_budget_bytes=12)

    found = outcomes(lambda peers, _: peers.follow("a number", int, refuse))
    assert [type(error) for error in found.values()] == [BudgetError] * 3
    assert [error.least_budget_bytes for error in found.values()] == [12] * 3
    assert {str(error) for error in found.values()} == {"too little"}


@pytest.mark.parametrize("failing", MEMBERS)
def test_who_fails_on_the_way_is_named(failing: int) -> None:
    def run(peers: Peers, rank: int) -> int:
        with peers.reporting_failures():
            if rank == failing:
                raise PlanError("no")
            return peers.agree("a number", int, rank, lambda told: sum(told.values()))

    found = outcomes(run)
    for rank, error in found.items():
        if rank == failing:
            assert isinstance(error, PlanError)
        else:
            assert isinstance(error, RankError) and error.ranks == (failing,)
            assert error.message == f"rank {failing} failed: PlanError: no"
            assert error.code == "FXR734"


@pytest.mark.parametrize("missing", MEMBERS)
def test_who_is_missing_is_named_in_time(missing: int) -> None:
    come = tuple(rank for rank in MEMBERS if rank != missing)
    found = outcomes(
        lambda peers, rank: peers.agree("a number", int, rank, lambda told: sum(told.values())),
        come=come,
        timeout_s=0.3,
    )
    for error in found.values():
        assert isinstance(error, RankError) and error.ranks == (missing,)
        assert f"rank {missing}" in str(error) and "0.3 s" in str(error)


def test_who_agrees_on_something_else_is_named() -> None:
    def run(peers: Peers, rank: int) -> int:
        what = "apples" if rank == 5 else "pears"
        return peers.agree(what, int, rank, lambda told: sum(told.values()))

    for error in outcomes(run).values():
        assert isinstance(error, RankError) and error.ranks == (5,)
        assert "an agreement on apples, but rank 3 for one on pears" in str(error)


def asked(budget: Any, ranks: Ranks | None = None, **options: Any) -> Arguments:
    return Arguments.read(budget, ranks=ranks, **options)


def test_budgets_must_be_the_same_or_the_least_is_taken() -> None:
    budgets: dict[int, Any] = {3: "2 MiB", 5: "1 MiB", 8: 3 << 20}
    errors = outcomes(lambda peers, rank: agreed_arguments(peers, asked(budgets[rank])))
    for error in errors.values():
        assert isinstance(error, RankError) and error.ranks == (5, 8)
        assert error.code == "FXR732"
        assert "'2 MiB' on rank 3, '1 MiB' on rank 5, 3145728 on rank 8" in str(error)
    least = Ranks(budgets="least")
    found = outcomes(lambda peers, rank: agreed_arguments(peers, asked(budgets[rank], least)))
    assert {own.budget.nbytes for own in found.values()} == {1 << 20}
    budgets[8] = 0.5
    mixed = outcomes(lambda peers, rank: agreed_arguments(peers, asked(budgets[rank], least)))
    assert all(isinstance(error, RankError) for error in mixed.values())


def test_other_options_are_refused_and_host_memory_is_shared_out() -> None:
    errors = outcomes(lambda peers, rank: agreed_arguments(peers, asked(1.0, strict=rank == 8)))
    for error in errors.values():
        assert isinstance(error, RankError) and error.ranks == (8,)
        assert "rank 8 has strict=True, but rank 3 has strict=False" in str(error)
    lent = asked(1.0, offload=fxremat.HostMemory("auto", limit=900))
    for own in outcomes(lambda peers, _: agreed_arguments(peers, lent)).values():
        assert own.host.limit_bytes == 300  # all are on this machine


ORIGIN = Origin("ops", "code", ("float32[2]",), "a device", (), (), (), ())


def costs(scale: float) -> RecordedCosts:
    stage = StageSeconds(scale, 2.0, 3.0)
    workspaces = ((1, "first", int(4 * scale)),)
    return RecordedCosts((stage,), ((1, scale),), workspaces, (8, int(16 * scale)), (int(scale),))


def test_costs_and_what_is_around_are_the_most_of_all() -> None:
    def run(peers: Peers, rank: int) -> Any:
        around = ContextBytes(100 - rank, rank, 2, 1)
        origin = replace(ORIGIN, device=str(rank), code=f"with constants of {rank}")
        return agreed_costs(peers, origin, "digest", costs(rank / 4), around)

    for found, around in outcomes(run).values():
        assert found.stages == (StageSeconds(2.0, 2.0, 3.0),)
        assert found.again_s == ((1, 2.0),) and found.workspace_bytes == ((1, "first", 8),)
        assert found.storage_bytes == (8, 32) and found.displaced == (0, 1, 2)
        assert (around.given_bytes, around.loss_point_bytes, around.tangent_bytes) == (97, 8, 2)


def test_the_link_to_host_memory_is_the_slowest() -> None:
    def run(peers: Peers, rank: int) -> Any:
        return agreed_link(peers, MeasuredLink(rank, 9 - rank, 5.0, 1 + rank / 8, rank == 5))

    for link in outcomes(run).values():
        assert link == MeasuredLink(3, 1, 5.0, 2.0, True)


def test_other_steps_are_refused() -> None:
    def run(peers: Peers, rank: int) -> Any:
        inputs = (f"float32[{2 + (rank == 5)}]",)
        return agreed_costs(
            peers, replace(ORIGIN, inputs=inputs), "digest", costs(1), ContextBytes(0, 0, 0, 0)
        )

    for error in outcomes(run).values():
        assert isinstance(error, RankError) and error.ranks == (5,)
        assert error.code == "FXR733"
        assert "input 0 is float32[3], rank 3's was float32[2]" in str(error)


def test_other_numbers_of_threads_are_refused_with_what_sets_them() -> None:
    def run(peers: Peers, rank: int) -> Any:
        settings = (("torch.get_num_threads", str(1 + (rank == 5))),)
        return agreed_costs(
            peers, replace(ORIGIN, settings=settings), "digest", costs(1), ContextBytes(0, 0, 0, 0)
        )

    for error in outcomes(run).values():
        assert isinstance(error, RankError) and error.ranks == (5,)
        assert "torch.get_num_threads is 2, rank 3's was 1" in str(error)
        assert "torch.set_num_threads" in str(error)


def test_another_policy_is_refused() -> None:
    def run(peers: Peers, rank: int) -> Any:
        settings = (("policy", f"{rank == 5} of 3 operations"),)
        return agreed_costs(
            peers, replace(ORIGIN, settings=settings), "digest", costs(1), ContextBytes(0, 0, 0, 0)
        )

    for error in outcomes(run).values():
        assert isinstance(error, RankError) and error.ranks == (5,)
        assert "policy is True of 3 operations, rank 3's was False of 3 operations" in str(error)
        assert "policy=" in str(error)


def test_graphs_that_differ_in_more_than_places_of_shards_are_refused() -> None:
    def run(peers: Peers, rank: int) -> Any:
        return agreed_costs(peers, ORIGIN, f"{rank == 8}", costs(1), ContextBytes(0, 0, 0, 0))

    for error in outcomes(run).values():
        assert isinstance(error, RankError) and error.ranks == (8,)
        assert "not their constants" in str(error)
    for error in outcomes(lambda peers, rank: agreed_graphs(peers, f"{rank == 8}")).values():
        assert isinstance(error, RankError) and error.ranks == (8,)


def test_who_goes_on_as_before_only_says_so() -> None:
    def run(peers: Peers, rank: int) -> Any:
        def step(base_bytes: int, **options: Any) -> Any:
            return agreed_step(peers, MeasuredStep(base_bytes, ("one",), begins="one"), **options)

        found = [step(rank, unchanged=True) for _ in range(3)]
        return found, step(rank, unchanged=rank != 5), step(rank, unchanged=False)

    expected = MeasuredStep(8, ("one",), begins="one")
    assert list(outcomes(run).values()) == [([None] * 3, expected, expected)] * 3


def test_steps_that_go_on_as_before_leave_nothing_behind() -> None:
    def run(peers: Peers, rank: int) -> list[int]:
        kept = []
        for _ in range(40):
            agreed_step(peers, MeasuredStep(rank, ("one",), begins="one"), unchanged=True)
            lists = (own for own in vars(peers).values() if isinstance(own, list))
            kept.append(sum(map(len, lists)))
        return kept

    for kept in outcomes(run).values():
        assert max(kept) < 12  # what a step or two need


def test_what_some_have_seen_of_a_step_all_know() -> None:
    def run(peers: Peers, rank: int) -> Any:
        levels = () if rank == 3 else ((rank, 1, 2, 3),)
        return agreed_step(peers, MeasuredStep(1, ("one",), levels, "one"), unchanged=False)

    assert {found.profiles for found in outcomes(run).values()} == {((8, 1, 2, 3),)}


@pytest.mark.parametrize("settled", [True, False])
@pytest.mark.parametrize("calls", [("one",), ("one", "two")])
def test_other_calls_are_refused_by_all(settled: bool, calls: tuple[str, ...]) -> None:
    def run(peers: Peers, rank: int) -> Any:
        begins = "other" if rank == 5 and len(calls) == 1 else "one"
        own = MeasuredStep(1, calls if rank == 5 else ("one",), begins=begins)
        return agreed_step(peers, own, unchanged=settled)

    for error in outcomes(run).values():
        assert isinstance(error, RankError) and error.ranks == (5,)


def test_nobody_waits_for_one_that_has_something_else_to_say() -> None:
    def run(peers: Peers, rank: int) -> Any:
        if rank == 8:
            return agreed_context(peers, "one")
        return agreed_step(peers, MeasuredStep(1), unchanged=True)

    began = time.monotonic()
    for error in outcomes(run, timeout_s=60.0).values():
        assert isinstance(error, RankError) and error.ranks == (8,)
    assert time.monotonic() - began < 30


def test_who_does_not_come_to_a_step_is_named() -> None:
    def run(peers: Peers, _rank: int) -> Any:
        return agreed_step(peers, MeasuredStep(1), unchanged=True)

    for error in outcomes(run, come=(3, 5), timeout_s=0.5).values():
        assert isinstance(error, RankError) and error.ranks == (8,)


def test_the_most_that_was_seen_of_the_same_calls() -> None:
    def run(peers: Peers, rank: int) -> Any:
        calls = ("one",) if rank != 8 else ("other",)
        alike = agreed_profiles(peers, MeasuredStep(rank, ("one",), ((rank, 1, 2, 3),)))
        return alike, agreed_profiles(peers, MeasuredStep(rank, calls, ((rank, 1, 2, 3),)))

    for alike, unlike in outcomes(run).values():
        assert alike == MeasuredStep(8, ("one",), ((8, 1, 2, 3),))
        assert unlike == MeasuredStep(8)


def test_lessons_of_all_are_learned_by_all() -> None:
    def run(peers: Peers, rank: int) -> Any:
        return agreed_corrections(
            peers, {(rank % 2,): Correction(loss_point_bytes=rank), (7,): Correction(1, rank)}
        )

    expected = {
        (1,): Correction(loss_point_bytes=5),
        (0,): Correction(loss_point_bytes=8),
        (7,): Correction(1, 8),
    }
    assert list(outcomes(run).values()) == [expected] * 3


def test_another_call_is_refused() -> None:
    found = outcomes(lambda peers, rank: agreed_context(peers, "two" if rank == 8 else "one"))
    for error in found.values():
        assert isinstance(error, RankError) and error.ranks == (8,)
    assert set(outcomes(lambda peers, _: agreed_context(peers, "one")).values()) == {None}


def test_who_is_slow_still_finds_what_was_said() -> None:
    """The first one does not wait for those that follow it."""

    def run(peers: Peers, rank: int) -> list[int | None]:
        found = []
        for number in range(12):
            time.sleep(0.02 * (rank == 8))
            found.append(peers.agree("a number", int, number, lambda told: sum(told.values())))
            found += [peers.follow("a number", int, lambda: 7) for _ in range(3)]
        return found

    for rank, found in outcomes(run, timeout_s=5.0).items():
        followed = [None if rank == 3 else 7] * 3
        assert found == [own for number in range(12) for own in (3 * number, *followed)]


def test_what_was_read_by_all_does_not_stay() -> None:
    base = torch.distributed.HashStore()
    barrier = threading.Barrier(len(MEMBERS))

    def one(rank: int) -> None:
        peers = Peers(MEMBERS, rank, SharedStore("test", base), timeout_s=20.0)
        for _ in range(50):
            peers.agree("a number", int, rank, lambda told: sum(told.values()))
        barrier.wait()

    with ThreadPoolExecutor(len(MEMBERS)) as threads:
        list(threads.map(one, MEMBERS))
    assert base.num_keys() <= 3 * (len(MEMBERS) + 1)


@pytest.mark.parametrize(
    "given",
    [
        {"group": "all"},
        {"group": [-1, 2]},
        {"group": []},
        {"budgets": "most"},
        {"timeout": 0},
        {"timeout": float("inf")},
        {"timeout": True},
    ],
)
def test_ranks_that_cannot_be_read(given: dict[str, Any]) -> None:
    with pytest.raises(ArgumentError, match=next(iter(given))):
        Ranks(**given)


def test_ranks_as_they_are_read() -> None:
    ranks = Ranks([2, 0, 2], timeout=timedelta(minutes=1))
    assert ranks.members == (0, 2) and ranks.timeout_s == 60.0 and ranks.budgets == "same"
    with pytest.raises(ArgumentError, match="but got 3"):
        Arguments.read(1.0, ranks=3)  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match=r"before torch\.distributed"):
        Peers.of(torch.nn.Linear(1, 1), ranks)
    assert Peers.of(torch.nn.Linear(1, 1), None) is None
