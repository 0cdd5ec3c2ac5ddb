"""The areas into which a plot of the memory of a step is stacked."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

from fxremat.report.memory import Kind, Life, StepMemory
from fxremat.report.modules import blocks_of, named, span

MOST_BANDS = 10
"""The maximum number of areas of activations; more would have indistinguishable colors."""

_COLOURS = {
    Kind.PARAMETERS: "#626a78",
    Kind.BUFFERS: "#79808d",
    Kind.INPUTS: "#8f96a2",
    Kind.OPTIMIZER: "#a5abb5",
    Kind.RESERVE: "#b9bec6",
    Kind.OTHER: "#cbced4",
    Kind.GRADIENTS: "#8f5fb3",
    Kind.OUTPUTS: "#4d8fa8",
    Kind.PASSING: "#c795d0",
    Kind.WORKSPACES: "#b98d5f",
    Kind.LOSS: "#7a4f38",
}
"""Colors of areas on light and dark background. Activations range from green to blue, and memory
that is held throughout is gray.
"""


@dataclass(frozen=True, slots=True)
class Area:
    """An area of a stacked plot: memory of one kind, or activations of one part of the model.

    Attributes:
        name: name to display.
        kind: purpose of the memory.
        lives: intervals of its tensors.
        colour: color, such as ``"#6f7683"``.
    """

    name: str
    kind: Kind
    lives: tuple[Life, ...]
    colour: str


def areas_of(memory: StepMemory) -> tuple[Area, ...]:
    """Return the areas into which a plot of the memory of a step is stacked, the lowest first."""
    bands = _bands(memory.modules)
    band_of = {stage: i for i, (_, stages) in enumerate(bands) for stage in stages}
    found: defaultdict[tuple[Kind, int], list[Life]] = defaultdict(list)
    for life in memory.lives:
        tensor = memory.tensors[life.tensor]
        band = band_of.get(tensor.stage, -1) if tensor.kind is Kind.ACTIVATIONS else -1
        found[tensor.kind, band].append(life)
    kinds = list(Kind)
    return tuple(
        Area(
            bands[i][0] if i >= 0 else kind.value,
            kind,
            tuple(found[kind, i]),
            _COLOURS.get(kind) or _colour(max(i, 0) / max(len(bands) - 1, 1)),
        )
        for kind, i in sorted(found, key=lambda key: (kinds.index(key[0]), key[1]))
    )


def _colour(depth: float) -> str:
    """Return the CSS color of activations at a depth in the model, from 0 to 1 (last)."""
    return f"hsl({152 + 42 * depth:.0f} {38 + 14 * depth:.0f}% {62 - 22 * depth:.0f}%)"


def _bands(modules: Sequence[str]) -> list[tuple[str, range]]:
    """Return the name and the stages of each of at most ``MOST_BANDS`` parts of the model.

    Each part is one or more consecutive blocks, of about equally many for all parts.

    Args:
        modules: the path of the module of each stage.
    """
    blocks = blocks_of(modules)
    runs = [list(own) for _, own in groupby(range(len(blocks)), key=blocks.__getitem__)]
    count = min(len(runs), MOST_BANDS)
    bands = []
    for i in range(count):
        part = runs[i * len(runs) // count : (i + 1) * len(runs) // count]
        first, last = part[0][0], part[-1][-1]
        name = named([blocks[run[0]] for run in part]) or f"stage {span(first, last)}"
        bands.append((name, range(first, last + 1)))
    return bands
