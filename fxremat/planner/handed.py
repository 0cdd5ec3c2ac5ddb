"""Gradients that are handed over, and what is left of them in the step."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

from torch import fx

from fxremat.passes.stages.linearize import Line
from fxremat.planner.context_bytes import ContextBytes


def handed_over(line: Line, context_bytes: ContextBytes) -> frozenset[fx.Node]:
    """Gradients whose memory is given back by the call that makes them, or right after it.

    They are added to gradients that exist. One whose primal is read by a later backward is
    handed over only then: it counts as if it stayed.
    """
    outputs = line.joint.backward_outputs
    readers = _readers(line) if context_bytes.added else {}
    added = {outputs[i] for i in context_bytes.added if not _is_read_after(line, i, readers)}
    others = (node for i, node in enumerate(outputs) if i not in context_bytes.added)
    return frozenset(n for n in added.difference(others) if isinstance(n, fx.Node))


def staying(line: Line, context_bytes: ContextBytes) -> frozenset[fx.Node]:
    """Gradients that are there from when they are made to the end of the step."""
    return frozenset(line.joint.gradients) - handed_over(line, context_bytes)


def _readers(line: Line) -> Mapping[tuple[int, ...], set[int]]:
    """By storages: the stages that read a primal which lies in them, or a view of it."""
    joint = line.joint
    found: defaultdict[tuple[int, ...], set[int]] = defaultdict(set)
    for node in (*joint.primals, *line.views):
        stages = {line.stage_of[user] for user in node.users if user in line.stage_of}
        found[joint.storages.of_node[node]] |= stages
    return found


def _is_read_after(line: Line, index: int, readers: Mapping[tuple[int, ...], set[int]]) -> bool:
    """Whether a primal may be read by the backward of a stage after what makes its gradient.

    Backwards of branches that meet run in any order, one after the other or mixed.
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
