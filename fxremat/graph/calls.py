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
    """State that the calls of one graph share.

    Attributes:
        plans: by context, the one used last at the end.
        contributors: to the gradients of the graph's leaves.
        numbers: numbers of calls, from 1; no two threads get the same.
        on_cuda: whether the graph runs on a CUDA device.
        counts: whether the device's allocator counts bytes.
        returned: indices of the gradients that the backward's caller asks for.
        buffers: bytes by which inputs' storages exceed planned ones, by sizes.
        latest: the latest call: what it was identified by, its context and its plan.
        region_context: the latest call of a region: the fields that were measured, and its context.
        followed: contexts and plans of the latest calls of a region.
        resolutions: how often the budget was resolved again.
        changed_bits: runs that gave other bits in parts, to be refused.
        trained: whether the tensors that it computes a gradient of are listed with the regions.
    """

    plans: dict[StepContext, CompiledPlan] = field(default_factory=dict)
    contributors: Contributors = field(default_factory=Contributors)
    numbers: Iterator[int] = field(default_factory=lambda: itertools.count(1))
    on_cuda: bool = False
    counts: bool = True
    returned: tuple[int, ...] = ()
    buffers: dict[Values, int] = field(default_factory=dict)
    latest: tuple[Any, StepContext, CompiledPlan] | None = None
    region_context: tuple[tuple[Any, ...], StepContext] | None = None
    followed: tuple[tuple[StepContext, CompiledPlan], ...] = ()
    resolutions: int = 0
    changed_bits: list[Parts] = field(default_factory=list)
    trained: bool = False

    def keep(self, context: StepContext, compiled: CompiledPlan) -> None:
        """Keep a plan as the one used last."""
        if len(self.plans) >= MOST_PLANS:
            self.plans.pop(next(iter(self.plans)))
            self.followed = ()
        self.plans[context] = compiled

    def follow(self, context: StepContext, compiled: CompiledPlan) -> None:
        """Look up a plan first at the next calls of a region."""
        self.followed = ((context, compiled), *self.followed[: MOST_FOLLOWED - 1])

    def forget(self) -> None:
        """Drop all plans."""
        self.plans.clear()
        self.followed, self.latest = (), None

    def note_buffer(self, sizes: Values, nbytes: int) -> int:
        """Return the most bytes that were noted at ``sizes``, ``nbytes`` included."""
        most_bytes = self.buffers.get(sizes, 0)
        if nbytes <= most_bytes:
            return most_bytes
        if len(self.buffers) >= MOST_BUFFERS:
            self.buffers.pop(next(iter(self.buffers)))
        self.buffers[sizes] = nbytes
        return nbytes
