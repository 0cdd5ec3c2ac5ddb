"""What processes that train one model agree on: budgets by minimum, costs by maximum."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from dataclasses import dataclass, replace

from fxremat.costs.collectives import Speeds
from fxremat.errors import RankError
from fxremat.frontend.arguments import Arguments
from fxremat.frontend.origin import differences, key_of
from fxremat.frontend.ranks import Budgets, Peers
from fxremat.ir import MeasuredLink, Origin, RecordedCosts
from fxremat.passes.joint.sizes import Values
from fxremat.planner.situation import NO_LESSON, Lesson
from fxremat.planner.surroundings import Surroundings

AGREED = 5
"""Of the first steps, the last before which processes agree on what was seen."""


@dataclass(frozen=True, slots=True)
class _Asked:
    """What a process was asked for.

    Attributes:
        written: the budget.
        nbytes, share: that it names.
        options: the others, as text.
        nodes: names of the machines, one a process.
    """

    written: str
    nbytes: int | None
    share: float | None
    options: tuple[str, ...]
    nodes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _Step:
    """A captured step, as a process has measured it.

    Attributes:
        origin: what its costs hold for.
        costs: of it.
        around_bytes: ``given_bytes``, ``turn_bytes``, ``tangent_bytes`` and ``end_bytes`` of what
            is around it.
    """

    origin: Origin
    costs: RecordedCosts
    around_bytes: tuple[int, int, int, int]


@dataclass(frozen=True, slots=True)
class Seen:
    """What a process has seen of a step of several calls.

    Attributes:
        base_bytes: what is there when the next one begins.
        calls: what makes its calls those of a step that is known; none: it was not seen.
        levels: of each of them.
    """

    base_bytes: int
    calls: tuple[str, ...] = ()
    levels: tuple[tuple[int, ...], ...] = ()


def agreed_arguments(peers: Peers, asked: Arguments) -> Arguments:
    """What all were asked for, with what is this process's share of a node's host memory.

    Raises:
        RankError: they were asked for different things.
    """
    budget, host = asked.budget, asked.host
    options = [
        f"{name}={getattr(asked, name)!r}"
        for name in (
            "exact",
            "accumulate",
            "budget_on",
            "executor",
            "fullgraph",
            "regions",
            "in_flight",
        )
    ]
    options.append(f"offload={host and (host.only, host.conv, host.limit_bytes)!r}")
    kept = asked.kept and asked.kept.origin and key_of(asked.kept.origin)
    options.append(f"plan={kept and kept[:12]}")
    node = platform.node()
    own = _Asked(repr(budget.written), budget.nbytes, budget.share, tuple(options), (node,))
    budgets: Budgets = asked.ranks.budgets if asked.ranks else "same"
    found = peers.agree("what is asked for", _Asked, own, lambda told: _one_of_asked(told, budgets))
    if (found.nbytes, found.share) != (budget.nbytes, budget.share):
        budget = replace(budget, nbytes=found.nbytes, share=found.share)
    if host is not None and host.limit_bytes is not None:  # all are to find the same plans
        most = max(map(found.nodes.count, found.nodes))
        host = replace(host, limit_bytes=host.limit_bytes // most)
    return replace(asked, budget=budget, host=host)


def _one_of_asked(told: Mapping[int, _Asked], budgets: Budgets) -> _Asked:
    first, *others = told
    one = told[first]
    for rank in others:
        for ours, theirs in zip(one.options, told[rank].options, strict=True):
            if ours != theirs:
                raise RankError(
                    f"rank {rank} was asked for {theirs}, rank {first} for {ours}: ask all of them "
                    "for the same",
                    ranks=(rank,),
                )
    named = {rank: (own.nbytes, own.share) for rank, own in told.items()}
    differ = [rank for rank in others if named[rank] != named[first]]
    kinds = {(own.nbytes is None, own.share is None) for own in told.values()}
    if differ and (budgets == "same" or len(kinds) > 1):
        shown = ", ".join(f"{told[rank].written} on rank {rank}" for rank in (first, *differ))
        raise RankError(
            f"processes of one model have different budgets: {shown}. Give all the same one, or "
            "ranks=fxremat.Ranks(budgets='least') where all name bytes, or all shares",
            ranks=differ,
        )
    least = min(told.values(), key=lambda own: (own.nbytes or 0, own.share or 0.0))
    return replace(least, nodes=tuple(own.nodes[0] for own in told.values()))


def agreed_costs(
    peers: Peers, origin: Origin, costs: RecordedCosts, around: Surroundings
) -> tuple[RecordedCosts, Surroundings]:
    """What a captured step costs all, and what most have around it.

    Raises:
        RankError: they captured different ones.
    """
    base = around.given_bytes, around.turn_bytes, around.tangent_bytes, around.end_bytes
    own = _Step(origin, costs, base)
    found = peers.agree("the captured step", _Step, own, _slowest)
    given_bytes, turn_bytes, tangent_bytes, end_bytes = found.around_bytes
    most = replace(
        around,
        given_bytes=given_bytes,
        turn_bytes=turn_bytes,
        tangent_bytes=tangent_bytes,
        end_bytes=end_bytes,
    )
    return found.costs, most


def agreed_speeds(peers: Peers, speeds: Speeds) -> Speeds:
    """The slowest that any process has found."""
    own = tuple(speeds.values())
    found = peers.agree("collectives", _AllSpeeds, own, _slowest_each)
    return dict(zip(speeds, found, strict=True))


def agreed_link(peers: Peers, own: MeasuredLink) -> MeasuredLink:
    """The slowest to host memory that any process has found."""
    return peers.agree("the link to host memory", MeasuredLink, own, _slowest_link)


def _slowest_link(told: Mapping[int, MeasuredLink]) -> MeasuredLink:
    links = told.values()
    return MeasuredLink(
        min(link.offload_bytes_per_s for link in links),
        min(link.prefetch_bytes_per_s for link in links),
        min(link.both_bytes_per_s for link in links),
        max(link.slowdown for link in links),
        shared=any(link.shared for link in links),
        offload_call_s=max(link.offload_call_s for link in links),
        prefetch_call_s=max(link.prefetch_call_s for link in links),
    )


_AllSpeeds = tuple[tuple[float, float], ...]


def _slowest_each(told: Mapping[int, _AllSpeeds]) -> _AllSpeeds:
    each = zip(*told.values(), strict=True)
    return tuple((max(m for m, _ in one), max(b for _, b in one)) for one in each)


def _slowest(told: Mapping[int, _Step]) -> _Step:
    first, *others = told
    one = told[first]
    for rank in others:
        own = replace(told[rank].origin, device=one.origin.device)  # costs are the slowest's
        for difference in differences(one.origin, own, of=f"rank {first}'s"):
            raise RankError(
                f"rank {rank} has captured another step than rank {first}: on it {difference}. "
                "All have to train the same model, with batches of one size in the first step",
                ranks=(rank,),
            )
    costs = RecordedCosts.slowest([own.costs for own in told.values()])
    around = tuple(map(max, *(own.around_bytes for own in told.values())))
    return _Step(one.origin, costs, around)


def agreed_situation(peers: Peers, found: str) -> None:
    """Make sure that all processes are at the same call.

    Args:
        peers: the processes.
        found: what the call of this one finds.

    Raises:
        RankError: another one's finds something else.
    """
    peers.agree("what a call finds", str, found, _the_same)


def _the_same(told: Mapping[int, str]) -> str:
    first, *others = told
    for rank in others:
        if told[rank] != told[first]:
            raise RankError(
                f"rank {rank} is at another call than rank {first}: it finds {told[rank]}, rank "
                f"{first} {told[first]}. Collectives are in the graph: all have to make the same "
                "calls, with batches of one size",
                ranks=(rank,),
            )
    return told[first]


@dataclass(frozen=True, slots=True)
class _Taught:
    """What steps have taught a process, by sizes."""

    lessons: tuple[tuple[Values, Lesson], ...]


def agreed_lessons(peers: Peers, own: Mapping[Values, Lesson]) -> dict[Values, Lesson]:
    """What steps have taught any process, by sizes."""
    taught = _Taught(tuple(own.items()))
    return dict(peers.agree("what steps have taught", _Taught, taught, _all_taught).lessons)


def _all_taught(told: Mapping[int, _Taught]) -> _Taught:
    found: dict[Values, Lesson] = {}
    for taught in told.values():
        for sizes, lesson in taught.lessons:
            found[sizes] = found.get(sizes, NO_LESSON) | lesson
    return _Taught(tuple(found.items()))


def agreed_levels(peers: Peers, own: Seen) -> Seen:
    """What most have seen; nothing where they did not see the same calls."""
    return peers.agree("what a step was seen to take", Seen, own, _most)


def _most(told: Mapping[int, Seen]) -> Seen:
    base_bytes = max(seen.base_bytes for seen in told.values())
    calls = {seen.calls for seen in told.values()}
    if len(calls) > 1:
        return Seen(base_bytes)
    each = zip(*(seen.levels for seen in told.values()), strict=True)
    levels = tuple(tuple(map(max, *call)) for call in each)
    return Seen(base_bytes, calls.pop(), levels)
