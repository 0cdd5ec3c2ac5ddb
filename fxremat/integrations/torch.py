"""torch.compile's own partitioner, with measured seconds and an exact choice."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator

import torch
from torch import fx

from fxremat import torch_compat
from fxremat.costs.alone import alone_s
from fxremat.costs.cache import CostCache
from fxremat.costs.options import Numbers, Operation, fastest_within
from fxremat.errors import FxrematError, refuse
from fxremat.torch_compat import Partition

UNITS = 1 << 40
"""Sizes are whole numbers of so many parts of what a budget of 1 saves: rounded up, limits down."""


@contextlib.contextmanager
def activation_memory_budget(share: float) -> Iterator[None]:
    """A context in which ``torch.compile`` saves a share of its activations, chosen by fxremat.

    It takes the place of torch's own setting ``activation_memory_budget``, for all that is
    compiled in the context: mostly in the first call of a model, so that has to be inside, too.
    Operations of the forward are measured, and of those results that torch may save or compute
    again, those are saved with which the rest takes the least time to compute, together with
    all that has to be computed for it. Results that are drawn at random are always saved.

    The share is one of bytes saved between forward and backward. No peak follows from it: a
    smaller share may take more memory. For a peak in bytes, see :func:`fxremat.compile`.

    Args:
        share: in (0, 1], of the bytes that ``torch.compile`` saves beside the inputs by default.

    Raises:
        ArgumentError: ``share`` is none.
        CostError: when a model is compiled, an operation that cannot be run alone.
        FxrematError: this version of torch lets nobody else choose.
    """
    given: object = share
    if isinstance(given, bool) or not isinstance(given, (int, float)) or not 0 < given <= 1:
        refuse("share", share, "a number in (0, 1]: 0 would draw dropout's masks anew")
    if not torch_compat.has_partitioner_hooks():
        raise FxrematError(
            f"torch {torch.__version__} lets nobody else choose what its partitioner saves: use "
            "torch 2.13, or fxremat.compile with a budget in bytes"
        )
    cache = CostCache()

    def seconds_of(node: fx.Node) -> float:
        return alone_s(node, cache)

    def choose(partition: Partition) -> set[fx.Node]:
        return _saved(partition, cache)

    with torch_compat.partitioned_by(choose, seconds_of, budget=float(share)):
        yield


def _saved(partition: Partition, cache: CostCache) -> set[fx.Node]:
    """The candidates with which all that the backward reads is rebuilt soonest, and all draws."""
    sizes = dict(zip(partition.candidates, partition.sizes, strict=True))
    drawn = {node for node in sizes if torch_compat.draws_random_numbers(node)}
    units = {node: math.ceil(size * UNITS) for node, size in sizes.items()}
    limit = max(0, math.floor(partition.limit * UNITS) - sum(units[node] for node in drawn))
    own = [node for node in partition.forward if node not in drawn]
    bits = {node: i for i, node in enumerate(own)}

    def mask(nodes: list[fx.Node]) -> int:
        return sum(1 << bits[node] for node in nodes if node in bits)

    found = fastest_within(
        Numbers(
            tuple(units.get(node, limit + 1) for node in own),  # no others may be saved
            tuple(
                Operation(1 << bits[node], mask(node.all_input_nodes), alone_s(node, cache))
                for node in own
            ),
            mask([node for node in own if node in partition.required]),
        ),
        limit,
    )
    return drawn.union(node for node, i in bits.items() if found >> i & 1)
