"""What a pass is: a function of one signature, and the contract that it keeps."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import fx

from fxremat.effort import USUAL, Effort
from fxremat.errors import FxrematError
from fxremat.ir import TRACED, Form
from fxremat.passes.fuse.unit import Units
from fxremat.passes.joint.layouts import Left
from fxremat.passes.joint.masks.replace import CanReplace
from fxremat.passes.split.rewrite import OtherBits
from fxremat.passes.split.run import Looks
from fxremat.passes.step_graph import StepGraph
from fxremat.progress import Note, Progress, silent, unnoted
from fxremat.runtime.expected import Expected


@dataclass(frozen=True, slots=True)
class PassConfig:
    """What passes are given besides the graph.

    Attributes:
        form: how the operations of the step are to be computed.
        effort: the numbers that decide where the graph is cut, and how many operations are computed
            in parts together.
        units: the table that new units are added to; ``None``: operations run as torch runs them.
        attention_units: the table for units of FlexAttention, which always runs as a unit.
        target: the device that the step is estimated for, where none is present: nothing is run.
        may_break: whether a graph that cannot be planned well is captured in several graphs.
        left: returns how the kernel of an operation leaves its results; ``None``: as traced.
        can_replace: returns whether attention can be called without a mask that follows a rule;
            ``None``: all masks stay.
        other_bits: returns which bits differ where a run of operations is computed in parts, all of
            them for a run that was refused. Only asked where ``form`` keeps bits.
        expected: gradients that losses in parts are computed with, by name; new ones are added.
        looks: counts the work of the search for operations to compute in parts, and limits it.
        progress: reports how many kernels are made.
        note: called with the most bytes that a measurement held at once.
    """

    form: Form = TRACED
    effort: Effort = USUAL
    units: Units | None = None
    attention_units: Units = field(default_factory=Units)
    target: torch.device | None = None
    may_break: bool = False
    left: Left | None = None
    can_replace: CanReplace | None = None
    other_bits: OtherBits | None = None
    expected: dict[str, Expected] = field(default_factory=dict)
    looks: Looks = field(default_factory=Looks)
    progress: Progress = silent
    note: Note = unnoted

    @property
    def is_exact(self) -> bool:
        """Whether passes must keep the bits of the graph; parts may still round differently."""
        return self.form.exact or self.form.has_parts


class Run(Protocol):
    """The function of a pass. The first line of its docstring says what the pass does."""

    def __call__(self, graph: StepGraph, *, config: PassConfig) -> StepGraph:
        """Return the graph that the pass makes of ``graph``, which it does not change."""


Violation = tuple[fx.Node, str]
"""A node that violates a condition, and what is wrong with it: ``"reads a transpose"``."""


class Condition(Protocol):
    """A condition on a graph. The first line of its docstring states it."""

    def __call__(
        self, graph: StepGraph, *, before: StepGraph, config: PassConfig
    ) -> Iterable[Violation]:
        """Return the nodes of ``graph`` that violate the condition, each with what is wrong.

        Args:
            graph: the graph that is checked.
            before: the graph that a pass made ``graph`` of; ``graph`` itself where the pass
                requires the condition.
            config: what passes are given besides the graph.
        """


def always(_config: PassConfig) -> bool:
    """Hold for every configuration.

    Returns ``True``, for passes that run with any ``PassConfig``.
    """
    return True


@dataclass(frozen=True, slots=True)
class Pass:
    """A pass and its contract.

    Attributes:
        name: names the pass in errors, and in the list of passes.
        run: the function that makes a new graph.
        requires: conditions on the graph that it is given.
        ensures: conditions on the graph that it returns, besides those that hold between any two
            passes (:data:`fxremat.passes.check.INVARIANTS`).
        raises: errors that it may raise, and when.
        when: returns whether the pass runs; the first line of its docstring says when.
    """

    name: str
    run: Run
    requires: tuple[Condition, ...] = ()
    ensures: tuple[Condition, ...] = ()
    raises: Mapping[type[FxrematError], str] = field(default_factory=dict)
    when: Callable[[PassConfig], bool] = always


def statement_of(described: object) -> str:
    """Return the first line of the docstring of ``described``, without its full stop."""
    text = inspect.getdoc(described) or ""
    return text.partition("\n")[0].removesuffix(".")
