"""Gradients of a loss that were computed beside it, before its own gradient was known."""

from __future__ import annotations

import operator
import threading
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx

from fxremat import torch_compat
from fxremat.passes.joint.graph import is_getitem
from fxremat.passes.joint.sizes import LAYOUTS, layouts_of
from fxremat.passes.split.parts import Parts
from fxremat.runtime import cuda_graph
from fxremat.runtime.expected import Expected

_counts = threading.local()


def beside(early: Tensor, *_gradients: Tensor) -> Tensor:
    """Stands in a graph that is still made for ``early``, as it is with the loss's real gradient.

    The others are that gradient, the one that ``early`` was computed with, and gradients of the
    step's results from which these follow: all real ones, then those expected; see :class:`Beside`.
    """
    return torch.empty_like(early)


class Beside:
    """Gradients that a run in parts has computed beside a loss, with an expected gradient of the
    loss itself: they are given where that has come true, to the last bit, else computed once more,
    and the next forward expects what has come.

    On a GPU one number is read for that, which waits for the forward; a step that is captured as a
    CUDA graph computes them once more.

    Args:
        parts: the run.
        place: of the loss's gradient among the inputs of the run.
        results: places of what is given among its results.
        expected: gradients of the step's results, from which that of the loss follows.

    It takes what the run does, the loss's gradient, those of the step's results, and what was
    computed before; it returns a tensor, or a list of several.
    """

    def __init__(
        self, parts: Parts, place: int, results: Sequence[int], expected: Sequence[Expected]
    ) -> None:
        self.parts, self.place, self.results = parts, place, tuple(results)
        self.expected = tuple(expected)
        name = "_".join(["beside", *parts.__name__.split("_")[1:], *map(str, results)])
        self.__name__ = self.__qualname__ = name
        self.__module__ = "fxremat.parts"

    def __repr__(self) -> str:
        return self.__name__

    @property
    def code(self) -> str:
        """What it does, as Python reads it."""
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
                *(f"    {own}.value = {n}" for own, n in zip(self.expected, came, strict=True)),
                f"    {made} = {self.parts}({again})",
                f"    return {', '.join(f'out{i}' for i in self.results)}",
                "",
            ]
        )

    @property
    def _count(self) -> int:
        """How many arguments are the run's."""
        return len(self.parts.inputs) + len(self.parts.hints)

    def __call__(self, *args: Any) -> Any:
        """Give the gradients."""
        gradient, *others = args[self._count :]
        if not cuda_graph.is_captured():
            if _are_equal(gradient, args[self.place]):
                return self.as_expected(*args)
            _counts.anew = computed_anew() + 1
            for own, came in zip(self.expected, others, strict=False):
                own.value = came.item()
        return self.anew(*args)

    def anew(self, *args: Any) -> Any:
        """Compute them once more, with the gradient that has come; nothing is learned."""
        given = [*args[: self._count]]
        given[self.place] = args[self._count]
        made = self.parts(*given)
        found = [made[i] for i in self.results] if len(self.parts.outputs) > 1 else [made]
        return found[0] if len(found) == 1 else found

    def as_expected(self, *args: Any) -> Any:
        """Give them where the loss's gradient is as expected."""
        kept = [*args[-len(self.results) :]]
        if torch_compat.keeps_graph():  # what is handed over may be written to
            kept = [tensor.clone() for tensor in kept]
        return kept[0] if len(kept) == 1 else kept


def parts_of(node: fx.Node) -> Parts | None:
    """The run in parts that an operation is, or may be."""
    run = node.target.parts if isinstance(node.target, Beside) else node.target
    return run if isinstance(run, Parts) else None


def computed_anew() -> int:
    """How often this thread has computed such gradients once more, but for CUDA graphs."""
    return getattr(_counts, "anew", 0)


def _are_equal(one: Tensor, other: Tensor) -> bool:
    """Whether two numbers have the same bits."""
    return torch.equal(*(number.cpu().reshape(1).view(torch.uint8) for number in (one, other)))


def gathered(module: fx.GraphModule) -> bool:
    """Let one operation, a :class:`Beside`, give all that one run has computed beside a loss.

    Args:
        module: a graph with runs in parts; it is changed.

    Returns whether all that was computed beside a loss was computed in parts.
    """
    graph = module.graph
    marks: dict[tuple[fx.Node, ...], list[fx.Node]] = {}
    for mark in graph.find_nodes(op="call_function", target=beside):
        early, *gradients = mark.args
        run = early.args[0] if is_getitem(early) else early
        if not isinstance(run.target, Parts) or gradients[1] not in run.args:
            return False
        marks.setdefault((run, *gradients), []).append(mark)
    for (run, *gradients), own in marks.items():
        _give(graph, run, gradients, own)
    graph.lint()
    return True


def _give(
    graph: fx.Graph, run: fx.Node, gradients: Sequence[fx.Node], marks: Sequence[fx.Node]
) -> None:
    """Put one operation in place of ``marks``, whose values ``run`` has computed."""
    early: list[Any] = [mark.args[0] for mark in marks]
    results = [n.args[1] if is_getitem(n) else 0 for n in early]
    gradient, with_which, *others = gradients
    came, expected = others[: len(others) // 2], others[len(others) // 2 :]
    parts: Any = run.target
    targets: list[Any] = [node.target for node in expected]
    with graph.inserting_before(marks[0]):
        target = Beside(parts, run.args.index(with_which), results, targets)
        made = graph.call_function(target, (*run.args, gradient, *came, *early))
    made.meta = {k: v for k, v in marks[0].meta.items() if k != "tensor_meta"}
    if len(marks) == 1:
        marks[0].replace_all_uses_with(made)
    else:
        made.meta["val"] = tuple(mark.meta["val"] for mark in marks)
        made.meta[LAYOUTS] = tuple(layouts_of(mark)[0] for mark in marks)
        for place, mark in reversed([*enumerate(marks)]):
            with graph.inserting_after(made):
                pick = graph.call_function(operator.getitem, (made, place))
            pick.meta = dict(mark.meta)
            mark.replace_all_uses_with(pick)
    for mark in marks:
        graph.erase_node(mark)
