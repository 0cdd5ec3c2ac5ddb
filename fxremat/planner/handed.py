"""Gradients that are handed over, and what is left of them in the step."""

from __future__ import annotations

from torch import fx

from fxremat.passes.stages.linearize import Line
from fxremat.planner.surroundings import Surroundings


def handed_over(line: Line, surroundings: Surroundings) -> frozenset[fx.Node]:
    """Gradients whose memory is given back by the call that makes them, or right after it.

    They are added to gradients that exist. One whose primal is read by a later backward is
    handed over only then: it counts as if it stayed.
    """
    outputs = line.joint.backward_outputs
    added = {outputs[i] for i in surroundings.added if not _is_read_after(line, i)}
    others = (node for i, node in enumerate(outputs) if i not in surroundings.added)
    return frozenset(n for n in added.difference(others) if isinstance(n, fx.Node))


def staying(line: Line, surroundings: Surroundings) -> frozenset[fx.Node]:
    """Gradients that are there from when they are made to the end of the step."""
    made = {n for n in line.joint.backward_outputs if isinstance(n, fx.Node)}
    return frozenset(made - handed_over(line, surroundings))


def _is_read_after(line: Line, index: int) -> bool:
    """Whether a primal is read by the backward of a stage after that which makes its gradient."""
    joint = line.joint
    primal, gradient = joint.primals[index], joint.backward_outputs[index]
    table = joint.storages
    own = table.of_node[primal]
    aliases = [n for n in (*joint.primals, *line.views) if table.of_node[n] == own]
    readers = (line.stage_of[u] for n in aliases for u in n.users if u in line.stage_of)
    made = line.stage_of.get(gradient, 0) if isinstance(gradient, fx.Node) else 0
    return min(readers, default=made) < made
