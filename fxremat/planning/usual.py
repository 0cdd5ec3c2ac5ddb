"""The usual training loop: what its steps hold when they begin, from the second one on."""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import fx

from fxremat.graph.graph import Graph
from fxremat.passes.joint.sizes import Values
from fxremat.planner.context.step_context import StepContext
from fxremat.report.memory import Kind
from fxremat.runtime.steps import SCALAR_BYTES


@dataclass(frozen=True, slots=True)
class UsualLoop:
    """Contexts of later steps of the usual training loop, by when it clears gradients.

    In each of them the previous step's outputs are held until the new ones replace them.

    Attributes:
        cleared: gradients are ``None`` when a forward begins: they are cleared before the forward,
            or after the optimizer's step.
        between: gradients exist during the forward, and are cleared before the backward.
        zeros: gradients exist throughout, set to zero or accumulated.
    """

    cleared: StepContext
    between: StepContext
    zeros: StepContext


def usual_loop(graph: Graph, context: StepContext) -> UsualLoop:
    """Return the contexts of later steps of the usual training loop.

    Args:
        graph: the captured graph.
        context: the context of its first call.
    """
    kept_bytes = max(context.kept_bytes, held_output_bytes(graph, context.sizes))
    first = replace(context, kept_bytes=kept_bytes, released=True)
    gradients = frozenset(_parameters_with_gradient(graph)) - context.taken
    existing, added = context.existing | gradients, context.added | gradients
    return UsualLoop(
        first,
        replace(first, existing=existing, cleared=not context.existing),
        replace(first, existing=existing, added=added),
    )


def held_output_bytes(graph: Graph, values: Values) -> int:
    """Return the bytes of a step's outputs that a loop's variables hold into the next step.

    One scalar is left out: every plan has room for the last loss.
    """
    joint = graph.traced(values).line.joint
    table = joint.storages
    outputs = [joint.forward_outputs[index] for index in graph.made_outputs]
    sizes = [table.total(table.of((own,))) for own in outputs if isinstance(own, fx.Node)]
    scalars = [nbytes for nbytes in sizes if nbytes <= SCALAR_BYTES]
    return sum(sizes) - sum(scalars[:1])


def _parameters_with_gradient(graph: Graph) -> list[int]:
    gradients = enumerate(graph.joint.backward_outputs)
    made = (primal for primal, gradient in gradients if isinstance(gradient, fx.Node))
    return [i for i in made if graph.roles.get(i, Kind.PARAMETERS) is Kind.PARAMETERS]
