"""Gradients that were computed together with a loss, before the gradient of the loss existed."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx

from fxremat import torch_compat
from fxremat.passes.parts.parts import Parts
from fxremat.runtime import cuda_graph
from fxremat.runtime.expected import Expected

_counts = threading.local()


class EarlyGradients:
    """An operation that returns gradients which a run in parts has computed together with a loss.

    They were computed for an expected gradient of the loss, and are returned if the expectation was
    right to the last bit. Otherwise they are computed again, and the next forward expects the
    gradient that came.

    On a GPU, the comparison reads one number, and waits for the forward. A step that is captured as
    a CUDA graph always computes the gradients again.

    Args:
        parts: the run.
        place: index of the loss's gradient among the inputs of the run.
        results: indices of the gradients among the results of the run.
        expected: expected gradients of the step's results, from which that of the loss follows.

    A call takes the inputs of the run, the loss's real gradient, those of the step's results, and
    the gradients that were computed before. It returns a tensor, or a list of several.
    """

    def __init__(
        self, parts: Parts, place: int, results: Sequence[int], expected: Sequence[Expected]
    ) -> None:
        self.parts, self.place, self.results = parts, place, tuple(results)
        self.expected = tuple(expected)
        name = "_".join(["early", *parts.__name__.split("_")[1:], *map(str, results)])
        self.__name__ = self.__qualname__ = name
        self.__module__ = "fxremat.parts"

    def __repr__(self) -> str:
        return self.__name__

    @property
    def code(self) -> str:
        """Python code that shows what a call does."""
        read = [n.name for n in self.parts.graph.nodes if n.op == "placeholder"]
        kept = [f"kept{i}" for i in self.results]
        came = [f"came{i}" for i in range(len(self.expected))]
        again = ", ".join("gradient" if i == self.place else n for i, n in enumerate(read))
        made = ", ".join(
            f"out{i}" if i in self.results else "_" for i in range(len(self.parts.outputs))
        )
        return "\n".join(
            [
                f"def {self}({', '.join([*read, 'gradient', *came, *kept])}):",
                f"    if gradient == {read[self.place]}:",
                f"        return {', '.join(kept)}",
                *(f"    {root}.value = {n}" for root, n in zip(self.expected, came, strict=True)),
                f"    {made} = {self.parts}({again})",
                f"    return {', '.join(f'out{i}' for i in self.results)}",
                "",
            ]
        )

    @property
    def _count(self) -> int:
        """How many of a call's arguments, from the first on, are inputs and sizes of the run."""
        return len(self.parts.inputs) + len(self.parts.hints)

    def __call__(self, *args: Any) -> Any:
        """Return the gradients, computed again if the loss's gradient is not the expected one."""
        gradient, *others = args[self._count :]
        if not cuda_graph.is_captured():
            if _same_bits(gradient, args[self.place]):
                return self.as_expected(*args)
            _counts.again = computed_again() + 1
            for root, came in zip(self.expected, others, strict=False):
                root.value = came.item()
        return self.compute_again(*args)

    def compute_again(self, *args: Any) -> Any:
        """Compute the gradients again for the loss's real gradient, and return them.

        The expected gradients do not change.
        """
        given = [*args[: self._count]]
        given[self.place] = args[self._count]
        made = self.parts(*given)
        gradients = [made[i] for i in self.results] if len(self.parts.outputs) > 1 else [made]
        return gradients[0] if len(gradients) == 1 else gradients

    def as_expected(self, *args: Any) -> Any:
        """Return the gradients computed with the loss, which are the last of ``args``."""
        kept = [*args[-len(self.results) :]]
        if torch_compat.keeps_graph():  # whoever gets them may modify them
            kept = [tensor.clone() for tensor in kept]
        return kept[0] if len(kept) == 1 else kept


def parts_of(node: fx.Node) -> Parts | None:
    """Return the run in parts that ``node`` calls, or ``None``.

    :class:`EarlyGradients` call theirs if the gradients must be computed again.
    """
    run = node.target.parts if isinstance(node.target, EarlyGradients) else node.target
    return run if isinstance(run, Parts) else None


def computed_again() -> int:
    """Return how often calls of :class:`EarlyGradients` in this thread computed gradients again.

    Calls in CUDA graphs do not count.
    """
    return getattr(_counts, "again", 0)


def _same_bits(one: Tensor, other: Tensor) -> bool:
    return torch.equal(*(number.cpu().reshape(1).view(torch.uint8) for number in (one, other)))
