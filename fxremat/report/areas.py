"""A step's memory as areas that lie on each other: one for each kind, activations by depth."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

from fxremat.errors import PlanError
from fxremat.report.facts import PlanFacts
from fxremat.report.memory import Kind, Life, StepMemory
from fxremat.report.modules import blocks_of, named, span

MOST_BANDS = 10
"""Areas of activations: more cannot be told apart."""

BUDGET = "#d43d2a"
"""Of its line."""

_COLOURS = {
    Kind.PARAMETERS: "#626a78",
    Kind.BUFFERS: "#79808d",
    Kind.INPUTS: "#8f96a2",
    Kind.OPTIMIZER: "#a5abb5",
    Kind.RESERVE: "#b9bec6",
    Kind.OTHER: "#cbced4",
    Kind.GRADIENTS: "#8f5fb3",
    Kind.PASSING: "#c795d0",
    Kind.WORKSPACES: "#b98d5f",
    Kind.LOSS: "#7a4f38",
}
"""On light and dark ground; activations go from green to blue, what is always there is grey."""

_BELOW = (
    Kind.PARAMETERS,
    Kind.BUFFERS,
    Kind.INPUTS,
    Kind.OPTIMIZER,
    Kind.RESERVE,
    Kind.OTHER,
    Kind.GRADIENTS,
)
_ABOVE = (Kind.PASSING, Kind.WORKSPACES, Kind.LOSS)


@dataclass(frozen=True, slots=True)
class Band:
    """Stages that follow each other, whose activations are one area.

    Attributes:
        name: where in the model they are.
        stages: which.
    """

    name: str
    stages: range


@dataclass(frozen=True, slots=True)
class Area:
    """What is held of one kind, or by the activations of one band.

    Attributes:
        name: for people.
        kind: of what is held.
        lives: of the step's memory.
        colour: of it, as ``"#6f7683"``.
    """

    name: str
    kind: Kind
    lives: tuple[Life, ...]
    colour: str


def memory_of(plan: PlanFacts) -> StepMemory:
    """The memory that a plan tells of.

    Raises:
        PlanError: it does not, as it was not made of a model.
    """
    if not plan.memory.count:
        raise PlanError(
            "this plan does not say which tensors are held when, as it was not made of a model: "
            "take the plan of what compile() returns"
        )
    return plan.memory


def areas_of(memory: StepMemory) -> tuple[Area, ...]:
    """What is held, lowest area first; none is empty."""
    bands = bands_of(memory.modules)
    band_of = {stage: i for i, band in enumerate(bands) for stage in band.stages}
    found: dict[tuple[Kind, int], list[Life]] = {
        **{(kind, -1): [] for kind in _BELOW},
        **{(Kind.ACTIVATIONS, i): [] for i in range(-1, len(bands))},
        **{(kind, -1): [] for kind in _ABOVE},
    }
    for life in memory.lives:
        tensor = memory.tensors[life.tensor]
        activation = tensor.kind is Kind.ACTIVATIONS
        found[tensor.kind, band_of.get(tensor.stage, -1) if activation else -1].append(life)
    return tuple(
        Area(
            bands[i].name if i >= 0 else kind.value,
            kind,
            tuple(lives),
            _COLOURS.get(kind) or _colour(max(i, 0) / max(len(bands) - 1, 1)),
        )
        for (kind, i), lives in found.items()
        if lives
    )


def _colour(depth: float) -> str:
    """Of activations, ``depth`` of the way through the model."""
    return f"hsl({152 + 42 * depth:.0f} {38 + 14 * depth:.0f}% {62 - 22 * depth:.0f}%)"


def bands_of(modules: Sequence[str]) -> tuple[Band, ...]:
    """Stages in runs by the block of the model that they are in, at most ``MOST_BANDS``."""
    blocks = blocks_of(modules)
    runs = [list(own) for _, own in groupby(range(len(blocks)), key=blocks.__getitem__)]
    count = min(len(runs), MOST_BANDS)
    bands = []
    for i in range(count):
        part = runs[i * len(runs) // count : (i + 1) * len(runs) // count]
        first, last = part[0][0], part[-1][-1]
        name = named([blocks[run[0]] for run in part]) or f"stage {span(first, last)}"
        bands.append(Band(name, range(first, last + 1)))
    return tuple(bands)
