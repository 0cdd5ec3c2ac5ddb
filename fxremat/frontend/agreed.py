"""What processes that train one model agree on: budgets by minimum, costs by maximum."""

from __future__ import annotations

import json
import platform
from collections.abc import Mapping
from dataclasses import dataclass, replace

from fxremat.costs.collectives import Speeds
from fxremat.errors import RankError
from fxremat.frontend.arguments import Arguments
from fxremat.frontend.ranks import Budgets, Peers
from fxremat.frontend.store import differences, key_of
from fxremat.ir import Decision, MeasuredLink, Origin, RecordedCosts
from fxremat.options.table import OPTIONS
from fxremat.passes.joint.sizes import Values
from fxremat.planner.context import NO_CORRECTION, Correction
from fxremat.planner.context_bytes import ContextBytes
from fxremat.report.codec import encode
from fxremat.report.plan import Plan
from fxremat.solvers.knapsack import Choice

AGREED = 5
"""The last of the first steps before which processes agree on what was seen."""


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
        structure_digest: of its graph.
        costs: of it.
        around_bytes: ``given_bytes``, ``turn_bytes``, ``tangent_bytes`` and ``end_bytes`` of what
            is around it.
    """

    origin: Origin
    structure_digest: str
    costs: RecordedCosts
    around_bytes: tuple[int, int, int, int]


@dataclass(frozen=True, slots=True)
class Seen:
    """What a process has seen of a step of several calls.

    Attributes:
        base_bytes: what is there when the next one begins.
        calls: what makes its calls those of a step that is known; none: it was not seen.
        profiles: of each of them.
        begins: what makes the first call of the next one that of such a step.
    """

    base_bytes: int
    calls: tuple[str, ...] = ()
    profiles: tuple[tuple[int, ...], ...] = ()
    begins: str = ""


@dataclass(frozen=True, slots=True)
class Chosen:
    """Plans that were chosen together for a step of several calls.

    Attributes:
        choices: one for each call.
        besides: what is beside each.
        budget_bytes: what they keep to.
        least_bytes, full_bytes: peak of those that take least, and that keep everything.
        fitting: none fit, but there are some for so many of its first calls.
    """

    choices: tuple[Choice, ...]
    besides: tuple[Correction, ...]
    budget_bytes: int
    least_bytes: int
    full_bytes: int
    fitting: int = 0


def agreed_arguments(peers: Peers, asked: Arguments) -> Arguments:
    """Return what all processes were asked for, and divide the host memory of a node among them.

    Raises:
        RankError: they were asked for different things.
    """
    budget, host = asked.budget, asked.host
    options = [f"budget={budget.again('...')}"]
    names = (option.name for option in OPTIONS if option.agreed)
    options += (f"{name}={_shown(asked, name)}" for name in names)
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


def _shown(asked: Arguments, option: str) -> str:
    """Return what a process was asked for under the name of an option, for comparison."""
    host, kept, policy = asked.host, asked.kept, asked.policy
    shown: dict[str, object] = {
        "offload": host and (host.only, host.conv, host.limit_bytes),
        "effort": asked.planning,
        "plan": kept and _decided(kept),
        "policy": policy and getattr(policy, "__qualname__", type(policy).__qualname__),
        "regions": "one" if asked.fullgraph else asked.regions or "auto",
    }
    return repr(shown[option] if option in shown else getattr(asked, option))


def _decided(plan: Plan) -> str:
    """A short name of what a plan decides for; constants may be each process's own."""
    origin = plan.origin and replace(plan.origin, code="")
    decided = json.dumps(encode(Decision, plan.decision)), str(plan.schedule)
    told = "" if origin is None else key_of(origin, decided=decided)
    return told[:12]


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
    peers: Peers, origin: Origin, structure_digest: str, costs: RecordedCosts, around: ContextBytes
) -> tuple[RecordedCosts, ContextBytes]:
    """What a captured step costs all, and what most have around it.

    Args:
        peers: the processes.
        origin: of the step that this one has captured.
        structure_digest: of its graph.
        costs: of it.
        around: around it.

    Raises:
        RankError: they captured different ones.
    """
    base = around.given_bytes, around.turn_bytes, around.tangent_bytes, around.end_bytes
    own = _Step(origin, structure_digest, costs, base)
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


_SAME_STEP = "All have to train the same model, with batches of one size in the first step"

_REMEDIES = {
    "setting": "Set it alike on all of them before they compile, as with torch.set_num_threads(n)",
    "version": "Install the same one on all of them",
}
"""By what a difference begins with."""


def _slowest(told: Mapping[int, _Step]) -> _Step:
    first, *others = told
    one = told[first]
    for rank in others:
        # Costs are the slowest's, and a shard's place is a constant of its own.
        own = replace(told[rank].origin, device=one.origin.device, code=told[rank].structure_digest)
        then = replace(one.origin, code=one.structure_digest)
        for difference in differences(then, own, of=f"rank {first}'s"):
            raise RankError(
                f"rank {rank} has captured another step than rank {first}: on it {difference}. "
                + _REMEDIES.get(difference.partition(" ")[0], _SAME_STEP),
                ranks=(rank,),
            )
    costs = RecordedCosts.slowest([own.costs for own in told.values()])
    around = tuple(map(max, *(own.around_bytes for own in told.values())))
    return replace(one, costs=costs, around_bytes=around)


def agreed_graphs(peers: Peers, structure_digest: str) -> None:
    """Make sure that one plan has led all processes to the same graphs.

    Args:
        peers: the processes.
        structure_digest: of the graphs of this one.

    Raises:
        RankError: another one's run other operations.
    """
    peers.agree("the graphs of a plan", str, structure_digest, _same_graphs)


def _same_graphs(told: Mapping[int, str]) -> str:
    first, *others = told
    differ = [rank for rank in others if told[rank] != told[first]]
    if differ:
        raise RankError(
            f"the plan of rank {first} leads to other operations on {', '.join(map(str, differ))}: "
            "their steps differ in more than constants. Train the same model on all of them, with "
            "one version of fxremat",
            ranks=differ,
        )
    return told[first]


def agreed_context(peers: Peers, found: str) -> None:
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


_Taught = tuple[tuple[Values, Correction], ...]


def agreed_corrections(peers: Peers, own: Mapping[Values, Correction]) -> dict[Values, Correction]:
    """What steps have taught any process, by sizes."""
    found = peers.agree("what steps have taught", _Taught, tuple(own.items()), _all_taught)
    return dict(found)


def _all_taught(told: Mapping[int, _Taught]) -> _Taught:
    found: dict[Values, Correction] = {}
    for taught in told.values():
        for sizes, correction in taught:
            found[sizes] = found.get(sizes, NO_CORRECTION) | correction
    return tuple(found.items())


def agreed_step(peers: Peers, own: Seen, *, settled: bool) -> Seen | None:
    """What most have seen of the step before, and what a step that begins finds.

    Args:
        peers: the processes, which must make the same calls and follow the same plans.
        own: what this one has seen.
        settled: it would go on as it did.

    Returns ``None`` where all are settled, and make the same calls.

    Raises:
        RankError: others make other calls.
    """
    alike = f"{own.calls} {own.begins}" if settled else None
    return peers.agree_unless(alike, "what a step finds", Seen, own, _most_of_same)


def _most_of_same(told: Mapping[int, Seen]) -> Seen:
    first, *_ = told
    one = told[first]
    _the_same({rank: f"calls {', '.join(seen.calls)}" for rank, seen in told.items()})
    _the_same({rank: f"a call {seen.begins}" for rank, seen in told.items()})
    seen = [own.profiles for own in told.values() if own.profiles]
    profiles = tuple(tuple(map(max, zip(*call, strict=True))) for call in zip(*seen, strict=True))
    return replace(one, base_bytes=max(own.base_bytes for own in told.values()), profiles=profiles)


def agreed_profiles(peers: Peers, own: Seen) -> Seen:
    """What most have seen; nothing where they did not see the same calls."""
    return peers.agree("what a step was seen to take", Seen, own, _most)


def _most(told: Mapping[int, Seen]) -> Seen:
    base_bytes = max(seen.base_bytes for seen in told.values())
    calls = {seen.calls for seen in told.values()}
    if len(calls) > 1:
        return Seen(base_bytes)
    each = zip(*(seen.profiles for seen in told.values()), strict=True)
    profiles = tuple(tuple(map(max, *call)) for call in each)
    return Seen(base_bytes, calls.pop(), profiles)
