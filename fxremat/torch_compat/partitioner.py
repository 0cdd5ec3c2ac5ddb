"""The partitioner of torch.compile, and its hooks for choosing what is saved.

Private names, checked with torch 2.13: ``torch._functorch.config.activation_memory_budget*``, the
two classes of ``torch._inductor.custom_graph_pass`` for these settings, and
``NodeInfo.required_bw_nodes``.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

from torch import fx


@dataclass(frozen=True, slots=True, eq=False)
class Partition:
    """A joint graph that torch's partitioner cuts, and what may be saved of it for the backward.

    Attributes:
        forward: operations, in order, that do not depend on the gradients of the outputs.
        required: operations of the forward whose results the backward reads.
        candidates: operations whose results are either saved or computed again. All other results
            are computed again where needed, or saved in place of several candidates.
        sizes: size of each candidate, as a share of the bytes that a budget of 1 saves besides the
            inputs.
        limit: limit on the total size of what is saved, as such a share.
    """

    forward: tuple[fx.Node, ...]
    required: frozenset[fx.Node]
    candidates: tuple[fx.Node, ...]
    sizes: tuple[float, ...]
    limit: float


def has_partitioner_hooks() -> bool:
    """Return whether this torch allows choosing what its partitioner saves."""
    try:
        from torch._inductor.custom_graph_pass import (  # noqa: F401, PLC0415
            CustomKnapsackSolver,
            CustomRuntimeEstimator,
        )
    except ImportError:
        return False
    return True


def partitioned_by(
    choose: Callable[[Partition], Collection[fx.Node]],
    seconds_of: Callable[[fx.Node], float],
    *,
    budget: float,
) -> contextlib.AbstractContextManager[Any]:
    """Return a context in which ``choose`` decides what the partitioner saves.

    Nothing that is compiled inside is put into AOTAutograd's caches, because it depends on measured
    seconds.

    Args:
        choose: returns the candidates to save.
        seconds_of: returns the seconds of an operation, which the partitioner reports.
        budget: share in [0, 1], as ``activation_memory_budget``.

    Requires: :func:`has_partitioner_hooks`.
    """
    from torch._functorch import config  # noqa: PLC0415
    from torch._inductor.custom_graph_pass import (  # noqa: PLC0415
        CustomKnapsackSolver,
        CustomRuntimeEstimator,
    )

    class Estimator(CustomRuntimeEstimator):
        def __call__(self, node: fx.Node) -> float:
            return seconds_of(node)

        def uuid(self) -> None:
            return None

    class Solver(CustomKnapsackSolver):
        def __call__(
            self,
            memory: Sequence[float],
            joint_graph: fx.Graph,
            max_memory: float,
            node_info: Any,
            all_recomputable_banned_nodes: Sequence[fx.Node],
        ) -> tuple[list[int], list[int]]:
            late = node_info.required_bw_nodes
            calls = (n for n in joint_graph.nodes if n.op == "call_function")
            forward = tuple(n for n in calls if n not in late)
            required = frozenset(n for n in forward if any(user in late for user in n.users))
            nodes = tuple(all_recomputable_banned_nodes)
            saved = choose(Partition(forward, required, nodes, tuple(memory), max_memory))
            kept = [i for i, node in enumerate(nodes) if node in saved]
            return kept, [i for i in range(len(nodes)) if i not in set(kept)]

        def uuid(self) -> None:
            return None

    patched: contextlib.AbstractContextManager[Any] = config.patch(
        activation_memory_budget=budget,
        activation_memory_budget_runtime_estimator=Estimator(),
        activation_memory_budget_solver=Solver(),
    )
    return patched
