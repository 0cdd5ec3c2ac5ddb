"""The partitioner of torch.compile: what it asks of whoever decides what it saves.

Private names, checked on 2.13: ``torch._functorch.config.activation_memory_budget*``, the two
classes of ``torch._inductor.custom_graph_pass`` that may be given there, and of the ``NodeInfo``
that it hands over, ``required_bw_nodes``.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

from torch import fx


@dataclass(frozen=True, slots=True, eq=False)
class Partition:
    """A joint graph, and what may be saved of it for the backward.

    Attributes:
        forward: operations in order that do not follow from the gradients of the outputs.
        required: those of them whose results the backward reads.
        candidates: those whose results are either saved or computed again. All other results
            are computed again where they are needed, or saved in place of several candidates.
        sizes: of each candidate, as a share of the bytes that a budget of 1 saves beside the
            inputs.
        limit: of the sizes of all that is saved, likewise.
    """

    forward: tuple[fx.Node, ...]
    required: frozenset[fx.Node]
    candidates: tuple[fx.Node, ...]
    sizes: tuple[float, ...]
    limit: float


def has_partitioner_hooks() -> bool:
    """Whether this torch lets others choose what its partitioner saves."""
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
    """A context in which the partitioner asks what to save within a share of the saved bytes.

    What is compiled in it is in none of AOTAutograd's caches: measured seconds bear on it.

    Args:
        choose: the candidates that are saved.
        seconds_of: what computing an operation takes; the partitioner notes it.
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
