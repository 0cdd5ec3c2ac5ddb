"""Steps captured with symbols in place of sizes, and the same steps captured at each size."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from fxremat import torch_compat
from fxremat.costs.measured.cache import CostCache
from fxremat.costs.measured.stages import measure_line
from fxremat.ir import RecordedCosts
from fxremat.passes.emit.code import Emitted
from fxremat.passes.emit.program import Program
from fxremat.passes.emit.rewrite import BlockModules, rewrite
from fxremat.passes.joint.sizes import Size, layouts_of
from fxremat.passes.stages.block import BlockCache
from fxremat.passes.stages.linearize import Line
from fxremat.passes.stages.resize import resize
from fxremat.progress import silent
from tests.harness import SEED, Captured, Made, Ran, bare, capture
from tests.models import ZOO
from tests.reference.plain_sweep import sweep

Dims = Sequence[Sequence[int]]
"""Of each tensor of a sample, the dimensions that are symbols."""


def capture_sized(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any] | None = None,
    *,
    dims: Dims,
    **options: Any,
) -> Captured:
    """The step of ``model`` with symbols for ``dims`` of its sample's tensors."""
    args, kwargs = tree_map(fresh, (args, dict(kwargs or {})))
    for leaf, own in zip(tensors_in((args, kwargs)), dims, strict=True):
        for dim in own:
            torch._dynamo.mark_dynamic(leaf, dim)
    return capture(model, args, kwargs, dynamic=None, **options)


def fresh(leaf: Any) -> Any:
    """A copy that nobody has marked."""
    if not isinstance(leaf, Tensor):
        return leaf
    return leaf.detach().clone().requires_grad_(leaf.requires_grad)


def tensors_in(sample: object) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(sample) if isinstance(leaf, Tensor)]


@dataclass
class AtSize:
    """A symbolic step at another size, beside the step captured at that size.

    ``names`` are the sizes by the names that code has.
    """

    step: Captured
    static: Captured
    values: tuple[int, ...]
    primals: list[Any]

    @staticmethod
    def of(step: Captured, static: Captured) -> AtSize:
        """Both must have been captured of one model."""
        tensors = iter(static.primals)
        primals: list[Any] = [
            None if isinstance(n.meta["val"], Size) else next(tensors) for n in step.joint.primals
        ]
        assert next(tensors, None) is None
        found: dict[str, int] = {}
        for node, primal in zip(step.joint.primals, primals, strict=True):
            if primal is not None:
                (layout,) = layouts_of(node)
                for wanted, real in zip(layout.shape, primal.shape, strict=True):
                    found.setdefault(repr(wanted), real)
        for i, node in enumerate(step.joint.primals):
            if primals[i] is None:
                primals[i] = found[repr(node.meta["val"])]
        return AtSize(step, static, step.joint.sizes.values(primals), primals)

    @functools.cached_property
    def names(self) -> dict[str, int]:
        return self.step.joint.sizes.named(self.values)

    @functools.cached_property
    def line(self) -> Line:
        return resize(self.step.line, self.values)

    @functools.cached_property
    def costs(self) -> RecordedCosts:
        """As they are measured at this size."""
        blocks = BlockCache(self.line)
        cache = CostCache()
        return measure_line(self.line, blocks, real={}, cache=cache, progress=silent).costs

    def run(
        self, program: Program, modules: BlockModules | None = None, *, seed: int = SEED
    ) -> Ran:
        """The emitted graphs at this size; gradients of sizes are left out."""
        graphs = self._graphs(program, modules or BlockModules())
        with torch.random.fork_rng(), torch.no_grad():
            torch.manual_seed(seed)
            outputs, gradients = self._call(graphs)
            kept = [
                g
                for g, n in zip(gradients, self.step.joint.primals, strict=True)
                if not isinstance(n.meta["val"], Size)
            ]
            return Ran(outputs, kept, torch.get_rng_state())

    def peak_bytes(self, program: Program) -> int:
        """Most bytes that running the emitted graphs allocates, tangents included."""
        graphs = self._graphs(program, BlockModules())
        with torch.random.fork_rng(), torch.no_grad():
            with torch_compat.AllocationLog() as log:
                results = self._call(graphs)
            del results
        return log.peak_bytes

    def _graphs(self, program: Program, modules: BlockModules) -> list[Emitted]:
        plain = sweep(program, self.step.footprints, bare(self.step.joint))
        return [g.at(self.names) for g in rewrite(program, plain.peaks_bytes, modules)]

    def _call(self, graphs: Sequence[Emitted]) -> tuple[Any, Any]:
        forward, backward = graphs
        count = self.step.output_count
        saved = list(forward([*self.primals]))
        outputs = saved[:count]
        del saved[:count]
        tangents = [t.clone() for t in self.static.tangents]
        made = Made([None] * len(self.primals))
        saved.extend((*tangents, made))
        if torch_compat.releases_tangents():
            tangents.clear()  # as autograd hands them over
        backward(saved)
        return outputs, made.gradients


SIZED: dict[str, Dims] = {
    "gpt": [(0, 1), (0, 1)],
    "hf_llama": [(0, 1), (0, 1)],
    "resnet50": [(0,)],
    "unet": [(0, 2, 3)],
}
"""Zoo models, and the dimensions of their samples that are symbols."""


@functools.cache
def zoo_model(name: str) -> nn.Module:
    return ZOO[name].build()


def sample_of(name: str, sizes: Sequence[int]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """A sample of a zoo model with as many items as the first size; the others cut dimensions."""
    batch, *others = sizes
    each = [ZOO[name].sample(seed) for seed in range(batch)]

    def cut(*leaves: Any) -> Any:
        whole = torch.cat(leaves)[:batch]
        for dim, size in zip(SIZED[name][0][1:], others, strict=True):
            whole = whole.narrow(dim, 0, size)
        return whole.clone(memory_format=torch.contiguous_format)

    return tree_map(cut, each[0], *each[1:])


@functools.cache
def symbolic(name: str, sizes: tuple[int, ...]) -> Captured:
    """The step of a zoo model with symbols, traced at ``sizes``; once a process."""
    args, kwargs = sample_of(name, sizes)
    return capture_sized(zoo_model(name), args, kwargs, dims=SIZED[name])


@functools.cache
def static(name: str, sizes: tuple[int, ...]) -> Captured:
    """The same traced at those sizes alone."""
    args, kwargs = sample_of(name, sizes)
    return capture(zoo_model(name), args, kwargs)


@functools.cache
def at_size(name: str, hints: tuple[int, ...], sizes: tuple[int, ...]) -> AtSize:
    """The symbolic step at those sizes, beside the other; once a process."""
    return AtSize.of(symbolic(name, hints), static(name, sizes))
