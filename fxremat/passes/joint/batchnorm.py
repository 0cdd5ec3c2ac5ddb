"""BatchNorm: its statistics move once a step, however often it is recomputed."""

from __future__ import annotations

import operator

import torch
from torch import fx

aten = torch.ops.aten

_FUNCTIONAL = aten._native_batch_norm_legit_functional.default
_STATELESS = aten._native_batch_norm_legit.no_stats
NORMALIZED_VALUES = 3
"""Both return the output, the mean and the inverse deviation first."""


def drop_running_statistics(graph: fx.Graph) -> None:
    """The backward in training mode reads no running statistics: do not save them."""
    for node in graph.find_nodes(
        op="call_function", target=aten.native_batch_norm_backward.default
    ):
        *head, train, eps, mask = node.args
        if train is True:
            node.args = (*head[:3], None, None, *head[5:], train, eps, mask)


def updates_statistics(node: fx.Node) -> bool:
    """Whether ``node`` normalizes by the batch and returns new running statistics."""
    return node.target is _FUNCTIONAL and node.args[5] is True


def reads_for_value(node: fx.Node) -> tuple[fx.Node, ...]:
    """What the normalized values of such a node depend on: not the running statistics."""
    x, weight, bias = node.args[:3]
    return tuple(n for n in (x, weight, bias) if isinstance(n, fx.Node))


def stateless_arguments(node: fx.Node) -> tuple[object, ...]:
    """Arguments of :data:`STATELESS` for the same normalized values."""
    x, weight, bias, _mean, _var, train, momentum, eps = node.args
    return (x, weight, bias, train, momentum, eps)


STATELESS = _STATELESS


def is_new_statistic(node: fx.Node) -> bool:
    """Whether ``node`` is a new running mean or variance."""
    if node.target is not operator.getitem:
        return False
    source, index = node.args
    return (
        isinstance(source, fx.Node)
        and source.target is _FUNCTIONAL
        and isinstance(index, int)
        and index >= NORMALIZED_VALUES
    )
