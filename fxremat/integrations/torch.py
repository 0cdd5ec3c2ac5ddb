"""The partitioner of torch.compile with measured costs and an exact choice."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator

import torch
from torch import fx

from fxremat import torch_compat
from fxremat.costs.measured.alone import alone_s
from fxremat.costs.measured.cache import CostCache
from fxremat.effort import USUAL
from fxremat.errors import FxrematError, refuse
from fxremat.planner.decision.save_options import Numbers, Operation, fastest_within
from fxremat.torch_compat import Partition

UNITS = 1 << 40
"""Sizes are integers in units of this part of what a budget of 1 saves: they are rounded up, and
limits are rounded down."""


@contextlib.contextmanager
def activation_memory_budget(share: float) -> Iterator[None]:
    """Return a context in which ``torch.compile`` saves a share of its activations.

    It replaces torch's setting ``activation_memory_budget`` for everything that is compiled in the
    context, which is usually in a model's first call. The operations of the forward are measured.
    It saves those of torch's candidates for saving that minimize the time of recomputing the
    others. Random results are always saved.

    The share applies to the bytes saved between forward and backward. It does not bound the peak: a
    smaller share may take more memory. For a peak in bytes, see :func:`fxremat.compile`.

    Args:
        share: a share in (0, 1] of the bytes that ``torch.compile`` saves by default, without the
            inputs.

    Raises:
        ArgumentError: ``share`` is not a number in (0, 1].
        CostError: an operation of a compiled model cannot be run separately.
        FxrematError: this version of torch does not support another partitioner.
    """
    given: object = share
    if isinstance(given, bool) or not isinstance(given, (int, float)) or not 0 < given <= 1:
        refuse("share", share, "a number in (0, 1], since 0 would draw dropout masks again")
    if not torch_compat.has_partitioner_hooks():
        raise FxrematError(
            f"torch {torch.__version__} does not support other partitioners: use torch 2.13, or "
            "fxremat.compile with a budget in bytes",
            code="FXR801",
        )
    cache = CostCache()

    def seconds_of(node: fx.Node) -> float:
        return alone_s(node, cache)

    def choose(partition: Partition) -> set[fx.Node]:
        return _saved(partition, cache)

    with torch_compat.partitioned_by(choose, seconds_of, budget=float(share)):
        yield


def _saved(partition: Partition, cache: CostCache) -> set[fx.Node]:
    """Return the nodes whose results are saved between forward and backward.

    They are all random results, and, within the limit of bytes, those candidates without which
    recomputing the others takes the least time.

    Args:
        partition: the forward, the candidates with their sizes, and the limit.
        cache: measured times of operations.
    """
    sizes = dict(zip(partition.candidates, partition.sizes, strict=True))
    drawn = {node for node in sizes if torch_compat.draws_random_numbers(node)}
    units = {node: math.ceil(size * UNITS) for node, size in sizes.items()}
    limit = max(0, math.floor(partition.limit * UNITS) - sum(units[node] for node in drawn))
    own = [node for node in partition.forward if node not in drawn]
    bits = {node: i for i, node in enumerate(own)}

    def mask(nodes: list[fx.Node]) -> int:
        return sum(1 << bits[node] for node in nodes if node in bits)

    chosen = fastest_within(
        Numbers(
            tuple(units.get(node, limit + 1) for node in own),  # the others may not be saved
            tuple(
                Operation(1 << bits[node], mask(node.all_input_nodes), alone_s(node, cache))
                for node in own
            ),
            mask([node for node in own if node in partition.required]),
        ),
        limit,
        USUAL,
    )
    return drawn.union(node for node, i in bits.items() if chosen >> i & 1)
