"""Formulas of the tensors of a graph that follow from positions.

Nothing is run, so formulas exist for every device, and hold at all sizes of the graph. What reads
data, an input of the graph, a constant of the graph, a random number or memory that is only
allocated has no formula.
"""

from __future__ import annotations

import torch
from torch import fx

from fxremat import torch_compat
from fxremat.passes.joint.masks.positions import EVERYWHERE, Box, Value, expression_of
from fxremat.passes.joint.masks.rules import RULES, Call, Rule, filled, pointwise
from fxremat.passes.joint.sizes import Sizes, layouts_of

_NAMESPACES = ("aten", "prims")
"""Operators of the user, or of other libraries, may read or do anything."""


class Formulas:
    """Formulas of the tensors of a graph, each derived when it is first asked for.

    Args:
        sizes: the symbols of the graph.
    """

    def __init__(self, sizes: Sizes) -> None:
        bounds = zip(sizes.names, sizes.most, strict=True)
        self._most = {name: most for name, most in bounds if most is not None}
        self._known: dict[fx.Node, Value | None] = {}

    def of(self, node: fx.Node) -> Value | None:
        """Return what the elements of the tensor that ``node`` returns are; ``None``: unknown."""
        waiting = [node]
        while waiting:
            latest = waiting[-1]
            rule = None if latest in self._known else _rule_of(latest)
            # Tensors that are filled with a number have only the shape of what they read.
            sources = [] if rule in (None, filled) else latest.all_input_nodes
            unknown = any(self._known.get(n, EVERYWHERE) is None for n in sources)
            missing = [n for n in sources if n not in self._known]
            if missing and not unknown:
                waiting.extend(missing)
                continue
            waiting.pop()
            if latest not in self._known:
                ruled = rule is not None and not unknown
                self._known[latest] = rule(Call(latest, self)) if ruled else None  # type: ignore[misc]
        return self._known[node]

    def box(self, node: fx.Node) -> Box:
        """Return the positions of the tensor that ``node`` returns."""
        (layout,) = layouts_of(node)
        return Box(tuple(map(expression_of, layout.shape)), self._most)


def _rule_of(node: fx.Node) -> Rule | None:
    """Return the rule of an operator that returns one tensor; ``None`` if it has none."""
    target = node.target
    if not isinstance(target, torch._ops.OpOverload) or target.namespace not in _NAMESPACES:
        return None
    if not isinstance(node.meta.get("val"), torch.Tensor) or len(layouts_of(node)) != 1:
        return None
    if torch_compat.draws_random_numbers(node):
        return None
    is_pointwise = torch.Tag.pointwise in target.tags
    name = target._schema.name.partition("::")[2]
    return RULES.get(name, pointwise if is_pointwise else None)
