"""Agreements of processes that train one model: how the values of all become one.

Bytes and seconds become the largest of all, speeds the smallest; what must be the same raises.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from fxremat.cache.origins import differences
from fxremat.costs.link.collectives import Speeds
from fxremat.errors import RankError
from fxremat.ir import MeasuredLink, Origin, RecordedCosts
from fxremat.passes.joint.sizes import Values
from fxremat.planner.context.context_bytes import ContextBytes
from fxremat.planner.context.step_context import NO_CORRECTION, Correction
from fxremat.ranks.peers import Peers
from fxremat.solvers.knapsack import Choice

AGREED = 5
"""The number of first steps before each of which processes agree on what they have measured."""


@dataclass(frozen=True, slots=True)
class _Step:
    """A captured step with the costs that one process has measured.

    Attributes:
        origin: the origin of its costs.
        structure_digest: the digest of its graph's structure.
        costs: its costs.
        context_bytes: ``given_bytes``, ``loss_point_bytes``, ``tangent_bytes`` and ``end_bytes`` of
            its step context.
    """

    origin: Origin
    structure_digest: str
    costs: RecordedCosts
    context_bytes: tuple[int, int, int, int]


@dataclass(frozen=True, slots=True)
class MeasuredStep:
    """Measurements by one process of a step that calls several graphs.

    Attributes:
        base_bytes: the bytes that are held when the next step begins.
        calls: descriptions of the calls of the step; empty if it was not measured.
        profiles: the ``CallProfile`` of each call, in bytes.
        begins: the description of the first call of the next step.
    """

    base_bytes: int
    calls: tuple[str, ...] = ()
    profiles: tuple[tuple[int, ...], ...] = ()
    begins: str = ""


@dataclass(frozen=True, slots=True)
class Chosen:
    """Plans that were chosen together for a step of several calls.

    Attributes:
        choices: the plan of each call.
        besides: for each call, the memory allocated meanwhile in addition to its plan.
        budget_bytes: the budget of the step.
        least_bytes: the lowest peak of the step with any plans.
        full_bytes: the peak of the step with plans that keep everything.
        fitting: if no plans fit the whole step, the number of its first calls that plans fit.
    """

    choices: tuple[Choice, ...]
    besides: tuple[Correction, ...]
    budget_bytes: int
    least_bytes: int
    full_bytes: int
    fitting: int = 0


def agreed_costs(
    peers: Peers, origin: Origin, structure_digest: str, costs: RecordedCosts, context: ContextBytes
) -> tuple[RecordedCosts, ContextBytes]:
    """Return the largest costs and context bytes of a captured step, over all processes.

    Args:
        peers: the processes.
        origin: the origin of the costs of this process.
        structure_digest: the digest of its graph's structure.
        costs: its costs.
        context: the bytes of its step context.

    Raises:
        RankError: the processes have captured different steps.
    """
    base = context.given_bytes, context.loss_point_bytes, context.tangent_bytes, context.end_bytes
    own = _Step(origin, structure_digest, costs, base)
    agreed = peers.agree("the captured step", _Step, own, _slowest_step)
    given_bytes, loss_point_bytes, tangent_bytes, end_bytes = agreed.context_bytes
    most = replace(
        context,
        given_bytes=given_bytes,
        loss_point_bytes=loss_point_bytes,
        tangent_bytes=tangent_bytes,
        end_bytes=end_bytes,
    )
    return agreed.costs, most


def agreed_speeds(peers: Peers, speeds: Speeds) -> Speeds:
    """Return the slowest measured speed of each collective, over all processes."""
    own = tuple(speeds.values())
    agreed = peers.agree("collectives", _AllSpeeds, own, _slowest_speeds)
    return dict(zip(speeds, agreed, strict=True))


def agreed_link(peers: Peers, own: MeasuredLink) -> MeasuredLink:
    """Return a link to host memory with the lowest measured speeds, over all processes."""
    return peers.agree("the link to host memory", MeasuredLink, own, _slowest_link)


def _slowest_link(links_by_rank: Mapping[int, MeasuredLink]) -> MeasuredLink:
    links = links_by_rank.values()
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


def _slowest_speeds(speeds: Mapping[int, _AllSpeeds]) -> _AllSpeeds:
    each = zip(*speeds.values(), strict=True)
    return tuple((max(m for m, _ in one), max(b for _, b in one)) for one in each)


_SAME_STEP = "Train the same model in all processes, with batches of one size in the first step"

_REMEDIES = {
    "setting policy": "Give all processes a policy= with the same answers",
    "setting": "Set it to the same value in all processes before compiling, for example with "
    "torch.set_num_threads(n)",
    "version": "Install the same version for all processes",
}
"""Remedies by the beginning of a difference, the most specific first."""


def _remedy_of(difference: str) -> str:
    remedies = (text for begin, text in _REMEDIES.items() if difference.startswith(f"{begin} "))
    return next(remedies, _SAME_STEP)


def _slowest_step(steps: Mapping[int, _Step]) -> _Step:
    first, *others = steps
    one = steps[first]
    for rank in others:
        # Devices may differ in speed, and the place of a shard is a constant of each process.
        step = steps[rank]
        own = replace(step.origin, device=one.origin.device, code=step.structure_digest)
        then = replace(one.origin, code=one.structure_digest)
        for difference in differences(then, own, of=f"rank {first}'s"):
            raise RankError(
                f"rank {rank} has captured another step than rank {first}: {difference}. "
                + _remedy_of(difference),
                ranks=(rank,),
                code="FXR733",
            )
    costs = RecordedCosts.slowest([step.costs for step in steps.values()])
    most = tuple(map(max, *(step.context_bytes for step in steps.values())))
    return replace(one, costs=costs, context_bytes=most)


def agreed_graphs(peers: Peers, structure_digest: str) -> None:
    """Raise ``RankError`` unless a plan has led all processes to graphs of the same operations.

    Args:
        peers: the processes.
        structure_digest: the digest of the structure of this process's graphs.

    Raises:
        RankError: the graphs of another process have other operations.
    """
    peers.agree("the graphs of a plan", str, structure_digest, _same_graphs)


def _same_graphs(digests: Mapping[int, str]) -> str:
    first, *others = digests
    differ = [rank for rank in others if digests[rank] != digests[first]]
    if differ:
        raise RankError(
            f"the plan of rank {first} leads to other operations on ranks "
            f"{', '.join(map(str, differ))}, so their steps differ in more than constants. Train "
            "the same model in all processes, with one version of fxremat",
            ranks=differ,
            code="FXR733",
        )
    return digests[first]


def agreed_context(peers: Peers, context: str) -> None:
    """Raise ``RankError`` unless the present calls of all processes are the same.

    Args:
        peers: the processes.
        context: the description of this process's call.

    Raises:
        RankError: another process is at another call.
    """
    peers.agree("the context of a call", str, context, _same_call)


def _same_call(calls: Mapping[int, str]) -> str:
    first, *others = calls
    for rank in others:
        if calls[rank] != calls[first]:
            raise RankError(
                f"rank {rank} is at another call than rank {first}: the call of rank {rank} has "
                f"{calls[rank]}, that of rank {first} has {calls[first]}. The graph contains "
                "collectives, so all processes must make the same calls, with batches of one size",
                ranks=(rank,),
                code="FXR733",
            )
    return calls[first]


_Corrections = tuple[tuple[Values, Correction], ...]


def agreed_corrections(peers: Peers, own: Mapping[Values, Correction]) -> dict[Values, Correction]:
    """Return, by sizes, the largest corrections of all processes.

    A correction is the memory that measured steps needed beyond their plan.
    """
    agreed: _Corrections
    agreed = peers.agree("the feedback of steps", _Corrections, tuple(own.items()), _merged)
    return dict(agreed)


def _merged(corrections: Mapping[int, _Corrections]) -> _Corrections:
    merged: dict[Values, Correction] = {}
    for sizes, correction in itertools.chain.from_iterable(corrections.values()):
        merged[sizes] = merged.get(sizes, NO_CORRECTION) | correction
    return tuple(merged.items())


def agreed_step(peers: Peers, own: MeasuredStep, *, unchanged: bool) -> MeasuredStep | None:
    """Return the largest measurements of the previous step, over all processes.

    All processes call this when the next step begins.

    Args:
        peers: the processes, which must make the same calls and follow the same plans.
        own: the measurements of this process.
        unchanged: whether this process would follow the same plans as before.

    Returns:
        The measurements, or ``None`` where all processes are unchanged and make the same calls.

    Raises:
        RankError: the processes make different calls.
    """
    alike = f"{own.calls} {own.begins}" if unchanged else None
    return peers.agree_unless(
        alike, "the context of a step", MeasuredStep, own, _most_of_same_calls
    )


def _most_of_same_calls(steps: Mapping[int, MeasuredStep]) -> MeasuredStep:
    first, *_ = steps.values()
    _same_call({rank: f"calls {', '.join(step.calls)}" for rank, step in steps.items()})
    _same_call({rank: f"a call {step.begins}" for rank, step in steps.items()})
    base_bytes = max(step.base_bytes for step in steps.values())
    watched = [step.profiles for step in steps.values() if step.profiles]
    return replace(first, base_bytes=base_bytes, profiles=_largest_profiles(watched))


def agreed_profiles(peers: Peers, own: MeasuredStep) -> MeasuredStep:
    """Return the largest measurements of a step, over all processes.

    They have no profiles if the processes made different calls.
    """
    return peers.agree("the measurements of a step", MeasuredStep, own, _most)


def _most(steps: Mapping[int, MeasuredStep]) -> MeasuredStep:
    base_bytes = max(step.base_bytes for step in steps.values())
    calls = {step.calls for step in steps.values()}
    if len(calls) > 1:
        return MeasuredStep(base_bytes)
    profiles = _largest_profiles([step.profiles for step in steps.values()])
    return MeasuredStep(base_bytes, calls.pop(), profiles)


def _largest_profiles(
    steps: Sequence[tuple[tuple[int, ...], ...]],
) -> tuple[tuple[int, ...], ...]:
    """Return the profiles of each call with the largest bytes of all ``steps``.

    Args:
        steps: for each process, the profiles of the same calls.
    """
    return tuple(tuple(map(max, zip(*call, strict=True))) for call in zip(*steps, strict=True))
