"""BatchNorm: update its statistics once a step, and rebuild its input from its output.

However often a norm is recomputed, its running statistics are updated by its first run only.

The input of a norm can be rebuilt from the output of the leaky ReLU after it, which is kept in any
case for the convolution that reads it, instead of by the convolution before the norm. This is from
Rota Bulò, Porzi and Kontschieder (In-Place Activated BatchNorm, 2018), and Hascoet et al. after
them. The rebuilt input is equal in exact arithmetic, but not in the last bits.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import fx

from fxremat.passes.joint.graph import is_getitem, values_of
from fxremat.passes.joint.sizes import describe_like
from fxremat.runtime.inverse import invert_batch_norm

aten = torch.ops.aten

FUNCTIONAL = aten._native_batch_norm_legit_functional.default
STATELESS = aten._native_batch_norm_legit.no_stats
NORMALIZED_VALUES = 3
"""Results that BatchNorms with and without statistics share: output, mean, inverse deviation."""

INVERSE = torch.ops.fxremat.invert_batch_norm.default
assert invert_batch_norm is not None  # imported for its registration

DEFAULT_SLOPE = 0.01
"""The slope of torch's leaky ReLU by default."""


def drop_running_statistics(graph: fx.Graph) -> None:
    """Remove running statistics from the arguments of BatchNorm backwards in training mode.

    They do not use them. ``graph`` is changed.
    """
    for node in graph.find_nodes(
        op="call_function", target=aten.native_batch_norm_backward.default
    ):
        *head, train, eps, mask = node.args
        if train is True:
            node.args = (*head[:3], None, None, *head[5:], train, eps, mask)


def updates_statistics(node: fx.Node) -> bool:
    """Return whether ``node`` is a BatchNorm in training mode with running statistics to update."""
    return node.target is FUNCTIONAL and node.args[5] is True


def reads_for_value(node: fx.Node) -> tuple[fx.Node, ...]:
    """Return the input, weight and bias of ``node``, a BatchNorm that updates running statistics.

    The normalized values depend on these nodes only. A weight or bias of ``None`` is left out.
    """
    return tuple(n for n in node.args[:3] if isinstance(n, fx.Node))


def stateless_arguments(node: fx.Node) -> tuple[object, ...]:
    """Return arguments with which :data:`STATELESS` computes the normalized values of ``node``.

    Args:
        node: a BatchNorm that updates running statistics.
    """
    x, weight, bias, _mean, _var, train, momentum, eps = node.args
    return (x, weight, bias, train, momentum, eps)


def is_new_statistic(node: fx.Node) -> bool:
    """Return whether ``node`` picks the new running mean or variance from a BatchNorm."""
    if not is_getitem(node):
        return False
    (source,), index = node.all_input_nodes, node.args[1]
    return source.target is FUNCTIONAL and isinstance(index, int) and index >= NORMALIZED_VALUES


def read_results(graph: fx.Graph) -> None:
    """Make backwards of leaky ReLUs with a positive slope read the output instead of the input.

    ``graph`` is changed. Gradients keep their bits: only the sign is used, which is the same in
    both.
    """
    for node in graph.find_nodes(op="call_function", target=aten.leaky_relu_backward.default):
        gradient, source = node.all_input_nodes
        _, _, slope, of_result = node.args
        results = [n for n in source.users if _is_activation(n) and _slope_of(n) == slope]
        if not of_result and results and _slope_of(results[0]) > 0:
            node.args = (gradient, results[0], slope, True)


def rebuild_norm_inputs(graph: fx.Graph) -> None:
    """Make BatchNorm backwards read an input rebuilt from the output of the leaky ReLU after it.

    ``graph`` is changed.

    Requires: backwards of leaky ReLUs read results (:func:`read_results`).
    Ensures: results of the forward keep their bits; gradients may round differently.
    """
    for pair in list(_norms_to_undo(graph)):
        scale_and_shift = pair.norm.args[1:3]
        slope = _slope_of(pair.activation)
        arguments = (pair.activation, *scale_and_shift, pair.mean, pair.rstd, slope)
        with graph.inserting_after(pair.activation):
            rebuilt = graph.call_function(INVERSE, arguments)
        describe_like(rebuilt, pair.source, torch.empty_like(pair.source.meta["val"]))
        rebuilt.meta["partitioner_tag"] = "is_forward"
        for backward in pair.backwards:
            backward.replace_input_with(pair.source, rebuilt)


def is_inverse(node: fx.Node) -> bool:
    """Return whether ``node`` rebuilds the input of a BatchNorm, which only backwards read."""
    return node.target is INVERSE


@dataclass(frozen=True, slots=True)
class _NormAndActivation:
    """A BatchNorm, the leaky ReLU that is its only reader, and backwards of the BatchNorm."""

    source: fx.Node
    norm: fx.Node
    mean: fx.Node
    rstd: fx.Node
    activation: fx.Node
    backwards: list[fx.Node]


def _norms_to_undo(graph: fx.Graph) -> Iterator[_NormAndActivation]:
    for norm in filter(updates_statistics, graph.nodes):
        values = {n.args[1]: n for n in values_of(norm)}
        source = norm.all_input_nodes[0]
        readers = [n for n in source.users if n is not norm]
        backwards = [n for n in readers if n.target is aten.native_batch_norm_backward.default]
        # Any other reader of the input would keep it in memory.
        if not backwards or len(backwards) < len(readers) or not {0, 1, 2} <= values.keys():
            continue
        activations = [n for n in values[0].users if _is_activation(n)]
        is_only_reader = len(values[0].users) == len(activations) == 1
        same_strides = source.meta["val"].stride() == values[0].meta["val"].stride()
        if is_only_reader and same_strides and _slope_of(activations[0]) > 0:
            yield _NormAndActivation(source, norm, values[1], values[2], activations[0], backwards)


def _is_activation(node: fx.Node) -> bool:
    return node.target is aten.leaky_relu.default


def _slope_of(node: fx.Node) -> float:
    slope = node.args[1] if len(node.args) > 1 else DEFAULT_SLOPE
    assert isinstance(slope, (int, float))
    return float(slope)
