"""Gradients that are handed over in the backward, before the step ends."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

from torch import fx

from fxremat.passes.stages.linearize import Line
from fxremat.planner.context.context_bytes import ContextBytes


def handed_over(line: Line, context_bytes: ContextBytes) -> frozenset[fx.Node]:
    """Return the gradients that are handed over right after their computation.

    They are added to existing ones, or hooks take them away. Their own memory is then released. A
    gradient is left out if a later backward may read its primal: it is handed over only then, and
    is counted as if it were held to the end.
    """
    outputs = line.joint.backward_outputs
    readers = _readers(line) if context_bytes.added else {}
    added = {outputs[i] for i in context_bytes.added if not _is_read_after(line, i, readers)}
    others = (node for i, node in enumerate(outputs) if i not in context_bytes.added)
    return frozenset(n for n in added.difference(others) if isinstance(n, fx.Node))


def staying(line: Line, context_bytes: ContextBytes) -> frozenset[fx.Node]:
    """Return the gradients that are held from their computation to the end of the step."""
    return frozenset(line.joint.gradients) - handed_over(line, context_bytes)


def _readers(line: Line) -> Mapping[tuple[int, ...], set[int]]:
    """Return the stages that read a primal or a view of one, by the ids of its storages."""
    joint = line.joint
    readers: defaultdict[tuple[int, ...], set[int]] = defaultdict(set)
    for node in (*joint.primals, *line.views):
        stages = {line.stage_of[user] for user in node.users if user in line.stage_of}
        readers[joint.storages.of_node[node]] |= stages
    return readers


def _is_read_after(line: Line, index: int, readers: Mapping[tuple[int, ...], set[int]]) -> bool:
    """Return whether a backward may read primal ``index`` after its gradient has been computed.

    Backwards of branches that meet run in any order, one branch after the other or interleaved.
    """
    joint, segments = line.joint, line.segments
    primal, gradient = joint.primals[index], joint.backward_outputs[index]
    if not isinstance(gradient, fx.Node):
        return False
    made = line.sums.get(gradient, frozenset({line.stage_of.get(gradient, 0)}))

    def has_run(reader: int, stage: int) -> bool:
        return reader >= stage and segments.at(reader) in segments.path(segments.at(stage))

    stages = readers[joint.storages.of_node[primal]]
    return not all(any(has_run(reader, stage) for stage in made) for reader in stages)
