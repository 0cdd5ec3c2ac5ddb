"""Options of the processes that train one model: the same ones, and the least budget."""

from __future__ import annotations

import json
import platform
from collections.abc import Mapping
from dataclasses import dataclass, replace

from fxremat.cache.origins import key_of
from fxremat.errors import RankError
from fxremat.ir import Decision
from fxremat.options.arguments import Arguments
from fxremat.options.table import OPTIONS
from fxremat.ranks.peers import Budgets, Peers
from fxremat.report.codec import encode
from fxremat.report.plan import Plan


@dataclass(frozen=True, slots=True)
class _Asked:
    """The arguments of one process, in a form that other processes can compare.

    Attributes:
        written: the budget as the user wrote it.
        nbytes: the budget in bytes, or ``None``.
        share: the budget as a share, or ``None``.
        options: the other arguments, as text.
        nodes: the machine of this process; after the agreement, the machine of each process.
    """

    written: str
    nbytes: int | None
    share: float | None
    options: tuple[str, ...]
    nodes: tuple[str, ...]


def agreed_arguments(peers: Peers, asked: Arguments) -> Arguments:
    """Return the arguments on which all processes agree.

    The limit of host memory is divided by the largest number of processes on one machine.

    Raises:
        RankError: the processes have different arguments.
    """
    budget, host = asked.budget, asked.host
    options = [f"budget={budget.again('...')}"]
    names = (option.name for option in OPTIONS if option.agreed)
    options += (f"{name}={_shown(asked, name)}" for name in names)
    node = platform.node()
    own = _Asked(repr(budget.written), budget.nbytes, budget.share, tuple(options), (node,))
    budgets: Budgets = asked.ranks.budgets if asked.ranks else "same"
    agreed = peers.agree(
        "the arguments", _Asked, own, lambda by_rank: _one_of_asked(by_rank, budgets)
    )
    if (agreed.nbytes, agreed.share) != (budget.nbytes, budget.share):
        budget = replace(budget, nbytes=agreed.nbytes, share=agreed.share)
    if host is not None and host.limit_bytes is not None:  # all are to find the same plans
        most = max(map(agreed.nodes.count, agreed.nodes))
        host = replace(host, limit_bytes=host.limit_bytes // most)
    return replace(asked, budget=budget, host=host)


def _shown(asked: Arguments, option: str) -> str:
    """Return the value of an option as text that is equal in processes with equal values."""
    host, kept, policy = asked.host, asked.kept, asked.policy
    shown: dict[str, object] = {
        "offload": host and (host.only, host.conv, host.limit_bytes, host.state, host.all_state),
        "plan": kept and _decided(kept),
        "policy": policy and getattr(policy, "__qualname__", type(policy).__qualname__),
        "regions": "one" if asked.fullgraph else asked.regions or "auto",
    }
    return repr(shown[option] if option in shown else getattr(asked, option))


def _decided(plan: Plan) -> str:
    """Return a short digest of a plan's decisions that is equal in all processes that follow it."""
    origin = plan.origin and replace(plan.origin, code="")
    decided = json.dumps(encode(Decision, plan.decision)), str(plan.schedule)
    text = "" if origin is None else key_of(origin, decided=decided)
    return text[:12]


def _one_of_asked(by_rank: Mapping[int, _Asked], budgets: Budgets) -> _Asked:
    first, *others = by_rank
    one = by_rank[first]
    for rank in others:
        for ours, theirs in zip(one.options, by_rank[rank].options, strict=True):
            if ours != theirs:
                raise RankError(
                    f"rank {rank} has {theirs}, but rank {first} has {ours}: pass the same "
                    "arguments in all processes",
                    ranks=(rank,),
                    code="FXR732",
                )
    named = {rank: (own.nbytes, own.share) for rank, own in by_rank.items()}
    differ = [rank for rank in others if named[rank] != named[first]]
    kinds = {(own.nbytes is None, own.share is None) for own in by_rank.values()}
    if differ and (budgets == "same" or len(kinds) > 1):
        shown = ", ".join(f"{by_rank[rank].written} on rank {rank}" for rank in (first, *differ))
        raise RankError(
            f"processes of one model have different budgets: {shown}. Pass the same budget in all, "
            "or ranks=fxremat.Ranks(budgets='least') if all are in bytes or all are shares",
            ranks=differ,
            code="FXR732",
        )
    least = min(by_rank.values(), key=lambda own: (own.nbytes or 0, own.share or 0.0))
    return replace(least, nodes=tuple(own.nodes[0] for own in by_rank.values()))
