"""State that the calls of one graph share."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from fxremat.graph.compiled_plan import CompiledPlan
from fxremat.passes.joint.sizes import Values
from fxremat.passes.parts.parts import Parts
from fxremat.planner.context.step_context import StepContext
from fxremat.runtime.gradients import Contributors

MOST_PLANS = 512
"""Plans of a graph that are kept; the one used longest ago goes first."""

MOST_FOLLOWED = 8
"""Calls of a region whose plans are looked up first: a step may call it as often."""

MOST_BUFFERS = 256
"""Sizes whose largest input buffers are kept; the oldest go first."""


@dataclass(slots=True)
class Calls:
    """State that the calls of one captured graph share: its plans, and notes for the next call.

    Attributes:
        plans: the cached plans, by the context that each was made for; the one used last is at the
            end.
        contributors: which leaves got their gradient from this graph only, as its backwards have
            shown.
        numbers: numbers of calls, from 1; no two threads get the same.
        on_cuda: whether the graph runs on a CUDA device.
        counts: whether the device's allocator counts bytes.
        returned: indices of the gradients that the backward's caller asks for, with ``None`` for a
            token that orders effects. It is empty if the caller asks for all, in order.
        buffers: by sizes, the most bytes by which storages of inputs exceeded the planned ones.
        latest: of the latest call, the values that identify its context, the context, and its plan.
        region_context: of the latest call of a region, the measured fields of its context, and the
            context.
        followed: contexts and plans of the latest calls of a region, the newest first.
        resolutions: how often the budget was resolved again.
        changed_bits: runs of operations that gave other bits when computed in parts; later plans do
            not use them.
        trained: whether the tensors that the graph computes a gradient of are listed in
            ``Regions.trained``.
    """

    plans: dict[StepContext, CompiledPlan] = field(default_factory=dict)
    contributors: Contributors = field(default_factory=Contributors)
    numbers: Iterator[int] = field(default_factory=lambda: itertools.count(1))
    on_cuda: bool = False
    counts: bool = True
    returned: tuple[int | None, ...] = ()
    buffers: dict[Values, int] = field(default_factory=dict)
    latest: tuple[Any, StepContext, CompiledPlan] | None = None
    region_context: tuple[tuple[Any, ...], StepContext] | None = None
    followed: tuple[tuple[StepContext, CompiledPlan], ...] = ()
    resolutions: int = 0
    changed_bits: list[Parts] = field(default_factory=list)
    trained: bool = False

    def keep(self, context: StepContext, compiled: CompiledPlan) -> None:
        """Cache a plan under its context; if the cache is full, drop the plan used longest ago."""
        if len(self.plans) >= MOST_PLANS:
            self.plans.pop(next(iter(self.plans)))
            self.followed = ()
        self.plans[context] = compiled

    def follow(self, context: StepContext, compiled: CompiledPlan) -> None:
        """Note that a call of a region followed a plan, so that the next calls look it up first."""
        self.followed = ((context, compiled), *self.followed[: MOST_FOLLOWED - 1])

    def forget(self) -> None:
        """Drop all cached plans."""
        self.plans.clear()
        self.followed, self.latest = (), None

    def note_buffer(self, sizes: Values, nbytes: int) -> int:
        """Record ``nbytes`` for ``sizes``; return the most bytes recorded for these sizes so far.

        They are the bytes by which storages of a call's inputs exceed the planned ones.
        """
        most_bytes = self.buffers.get(sizes, 0)
        if nbytes <= most_bytes:
            return most_bytes
        if len(self.buffers) >= MOST_BUFFERS:
            self.buffers.pop(next(iter(self.buffers)))
        self.buffers[sizes] = nbytes
        return nbytes
