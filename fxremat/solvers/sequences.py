"""What all solvers of chains need to know of a sequence of operations."""

from __future__ import annotations

from collections.abc import Sequence

from fxremat.ir import Backward, Chain, Compute, Costs, Keep


def seconds_of(costs: Costs, ops: Sequence[Compute]) -> float:
    """Time of ``ops``, summed in their order; a pair that is a rebuild takes ``rebuild_s``."""
    ran: set[int] = set()
    rebuilt_s: dict[int, float] = {}  # by the backward, after a save option
    total = 0.0
    for index, op in enumerate(ops):
        cost = costs.stages[op.stage]
        if isinstance(op, Backward):
            total += cost.backward_s + rebuilt_s.pop(op.stage, 0.0)
            continue
        pair = op.keep is Keep.ALL and ops[index + 1] == Backward(op.stage)
        rebuilds = pair and op.stage in ran
        total += cost.rebuild_s if rebuilds else cost.forward_s
        rebuilt_s.pop(op.stage, None)
        if op.option and not rebuilds:
            rebuilt_s[op.stage] = cost.options[op.option - 1].recompute_s
        ran.add(op.stage)
    return total


def base_bytes(chain: Chain, costs: Costs) -> int:
    """What is held whatever the schedule: ``fixed_bytes`` and boundary 0."""
    return costs.fixed_bytes + chain.nbytes(chain.boundaries[0])
