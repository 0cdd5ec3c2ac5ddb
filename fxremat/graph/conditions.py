"""What the candidates for a call depend on beyond the graph."""

from __future__ import annotations

from dataclasses import dataclass

from fxremat.passes.joint.sizes import Values
from fxremat.planner.context.context_bytes import ContextBytes


@dataclass(frozen=True, slots=True)
class Conditions:
    """What the candidates for a call depend on beyond the graph: its context, as sizes and bytes.

    Attributes:
        sizes: the value of each symbol of the graph.
        held: bytes that are held at these sizes in addition to what the graph allocates.
        held_at_capture: ``held`` at the sizes of the capture, where each form is searched first.
        is_at_capture: whether ``sizes`` are those of the capture.
        has_gradients: whether gradients exist when the forward begins.
        scaled, region: as in :class:`StepContext`.
    """

    sizes: Values
    held: ContextBytes
    held_at_capture: ContextBytes
    is_at_capture: bool
    has_gradients: bool
    scaled: bool
    region: bool
