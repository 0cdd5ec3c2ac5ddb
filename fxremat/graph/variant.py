"""Variants: the ways to compute a captured graph."""

from __future__ import annotations

from dataclasses import dataclass

from fxremat.costs.estimated.scaled import ScaledCosts
from fxremat.costs.measured.cost import Measured
from fxremat.graph.pool import Pool
from fxremat.ir import Form, Origin
from fxremat.passes.stages.block import BlockCache
from fxremat.passes.stages.linearize import Line
from fxremat.planner.context.context_bytes import ContextBytes


@dataclass(slots=True)
class Variant:
    """One way to compute a captured graph at one size.

    A graph is computed as it was traced, with norms undone, or with runs of operations in parts.

    Attributes:
        origin: what its measured costs depend on.
        blocks: the blocks of its stages.
        measured: its stages, and what they cost.
        base: what is held at every call beyond what the graph allocates.
        form: how its operations are computed.
        scaled: its costs at any sizes; ``None`` before another size is asked for.
        pool: its candidates at the sizes of the capture; ``None`` before they are searched for.
    """

    origin: Origin
    blocks: BlockCache
    measured: Measured
    base: ContextBytes
    form: Form
    scaled: ScaledCosts | None = None
    pool: Pool | None = None

    @property
    def line(self) -> Line:
        """The graph as this variant computes it, cut into stages."""
        return self.measured.line

    def learn(self, pool: Pool) -> None:
        """Include the candidates of ``pool``, of any context, in the variant's pool from now on."""
        self.pool = (self.pool or pool).knowing(pool)
