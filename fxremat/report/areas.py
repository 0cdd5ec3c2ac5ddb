"""A step's memory as areas that lie on each other: one for each kind, activations by depth."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

from fxremat.errors import PlanError
from fxremat.report.facts import PlanFacts
from fxremat.report.memory import Kind, Life, StepMemory

MOST_BANDS = 10
"""Areas of activations: more cannot be told apart."""

_BELOW = (Kind.PARAMETERS, Kind.BUFFERS, Kind.INPUTS, Kind.OTHER, Kind.GRADIENTS)
_ABOVE = (Kind.PASSING, Kind.WORKSPACES, Kind.LOSS)
_BLOCK = re.compile(r"^(.*?\.)?\d+(?=\.|$)")


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
        band: index among the bands of activations; -1: none.
    """

    name: str
    kind: Kind
    lives: tuple[Life, ...]
    band: int = -1


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
        Area(bands[i].name if i >= 0 else kind.value, kind, tuple(lives), i)
        for (kind, i), lives in found.items()
        if lives
    )


def bands_of(modules: Sequence[str]) -> tuple[Band, ...]:
    """Stages in runs by the block of the model that they are in, at most ``MOST_BANDS``."""
    blocks: list[str] = []
    for module in modules:  # one without a module goes with what comes before it
        blocks.append(_block_of(module) or (blocks[-1] if blocks else ""))
    runs: list[tuple[str, list[int]]] = []
    for block, own in groupby(range(len(blocks)), key=blocks.__getitem__):
        runs.append((block, list(own)))
    count = min(len(runs), MOST_BANDS)
    bands = []
    for i in range(count):
        part = runs[i * len(runs) // count : (i + 1) * len(runs) // count]
        stages = range(part[0][1][0], part[-1][1][-1] + 1)
        name = named([block for block, _ in part]) or _stages_named(stages)
        bands.append(Band(name, stages))
    return tuple(bands)


def _block_of(module: str) -> str:
    """The outermost numbered module that one is in, else the outermost."""
    module = module.split(" … ")[0]
    found = _BLOCK.match(module)
    return found[0] if found else module.split(".")[0]


def named(modules: Sequence[str]) -> str:
    """Modules that follow each other: ``blocks.0–4.mlp``, or the first and the last."""
    told = [module for module in modules if module]
    if not told or told[0] == told[-1]:
        return told[0] if told else ""
    first, last = told[0].split("."), told[-1].split(".")
    differ = [i for i, pair in enumerate(zip(first, last, strict=False)) if pair[0] != pair[1]]
    if len(first) == len(last) and len(differ) == 1:
        at = differ[0]
        if first[at].isdigit() and last[at].isdigit():
            return ".".join([*first[:at], f"{first[at]}–{last[at]}", *first[at + 1 :]])
    return f"{told[0]} … {told[-1]}"


def _stages_named(stages: range) -> str:
    last = stages.stop - 1
    return f"stage {last}" if len(stages) == 1 else f"stages {stages.start}–{last}"
