"""Steps of one operation as they are emitted in parts, and as they were traced."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree as pytree

from fxremat.costs.measured.bits import other_bits as changed_places
from fxremat.costs.measured.cache import CostCache
from fxremat.effort import USUAL
from fxremat.passes.joint.build import build_joint_graph
from fxremat.passes.joint.graph import JointGraph
from fxremat.passes.parts.parts import Changed, Parts
from fxremat.passes.split.rewrite import split
from fxremat.passes.split.run import Looks
from fxremat.passes.split.runs import Large
from tests.passes.split.parts import Alone, same_bits

aten = torch.ops.aten

SPECIAL = (0.0, -0.0, 1.0, -1.0, float("inf"), -float("inf"), float("nan"))

BEFORE: dict[str, Callable[[Tensor], Tensor]] = {
    "given": lambda x: x,
    "made": aten.neg.default,
    "permuted": lambda x: _permuted(aten.neg.default(_permuted(x))),
    "copied": lambda x: aten.clone.default(aten.neg.default(x)),
}
"""How the step comes to what the operation reads."""


def _permuted(x: Tensor) -> Tensor:
    return aten.permute.default(x, list(range(x.dim()))[::-1])


def step_of(op: Alone, before: str) -> tuple[JointGraph, list[Tensor]]:
    """A step that computes ``op`` and a function of its results, and tensors that it takes."""
    target = op.node.target
    tensors = list({id(t): t for t in pytree.tree_leaves(op.arguments) if _is_tensor(t)}.values())
    places = {id(t): i for i, t in enumerate(tensors)}

    def computed(*given: Tensor) -> list[Tensor]:
        made = {i: BEFORE[before](x) if x.is_floating_point() else x for i, x in enumerate(given)}
        args, kwargs = pytree.tree_map(
            lambda x: made[places[id(x)]] if _is_tensor(x) else x, op.arguments
        )
        results = [t for t in pytree.tree_leaves(target(*args, **kwargs)) if _is_tensor(t)]
        return [aten.neg.default(t) if t.is_floating_point() else t for t in results]

    traced = make_fx(computed, tracing_mode="fake")(*tensors)
    for place, node in enumerate(traced.graph.find_nodes(op="placeholder")):
        node.target = node.name = f"primals_{place + 1}"
    (output,) = traced.graph.find_nodes(op="output")
    results = list(output.args[0])
    with traced.graph.inserting_before(output):
        tangent = traced.graph.placeholder("tangents_1")
        tangent.meta["val"] = results[0].meta["val"]
    output.args = ([*results, *([None] * len(tensors))],)
    joint = build_joint_graph(traced, forward_output_count=len(results), mutated_primals=())
    return joint, tensors


def _is_tensor(value: object) -> bool:
    return isinstance(value, Tensor)


def in_parts(joint: JointGraph) -> fx.GraphModule | None:
    """The step with all that can keep its bits in parts."""
    cache = CostCache()

    def changed(parts: Parts, given: Sequence[Tensor]) -> Changed:
        return changed_places(parts, given, tuple(parts.hints.values()), cache=cache)

    return split(
        joint,
        Large(1),
        changed,
        early_gradients=False,
        expected={},
        looks=Looks(),
        most_operations=USUAL.run_operations,
    )


def filled(tensors: Sequence[Tensor], seed: int) -> Iterator[list[Tensor]]:
    """Other numbers in tensors that lie as ``tensors``: random, special ones among them, only
    special ones, only zeros of either sign.
    """
    generator = torch.Generator().manual_seed(seed)
    for share, special in ((0.0, SPECIAL), (0.3, SPECIAL), (1.0, SPECIAL), (1.0, SPECIAL[:2])):
        yield [_filled(t, share, special, generator) for t in tensors]


def _filled(
    tensor: Tensor, share: float, special: Sequence[float], generator: torch.Generator
) -> Tensor:
    if not tensor.is_floating_point():
        return tensor
    base = torch.empty(tensor.untyped_storage().nbytes() // tensor.itemsize, dtype=tensor.dtype)
    base.copy_(torch.randn(len(base), generator=generator))
    chosen = torch.tensor(special)[torch.randint(len(special), base.shape, generator=generator)]
    is_special = torch.rand(base.shape, generator=generator) < share
    base = torch.where(is_special, chosen.to(base.dtype), base)
    return base.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


def other_bits(
    joint: JointGraph, split_graph: fx.GraphModule, tensors: Sequence[Tensor], seed: int
) -> list[str]:
    """Results whose numbers differ from those of the step as it was traced."""
    wrong = []
    for given in filled(tensors, seed):
        tangent = torch.zeros(())
        expected, found = (
            [t for t in module(*given, tangent) if _is_tensor(t)]
            for module in (joint.module, split_graph)
        )
        for place, (one, other) in enumerate(zip(expected, found, strict=True)):
            if not same_bits(one, other):
                wrong.append(f"result {place}: {one} {other}")
    return wrong
