"""The tensors that a step holds at each instant, and the areas that display them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import accumulate, groupby

from fxremat.ir import Lane, Timeline
from fxremat.report.modules import blocks_of, named, span


class Kind(Enum):
    """The purpose of memory, in the order in which areas are stacked."""

    PARAMETERS = "parameters"
    BUFFERS = "buffers"
    INPUTS = "inputs"
    OPTIMIZER = "optimizer state"
    RESERVE = "reserve"
    OTHER = "outside the step"
    GRADIENTS = "gradients"
    ACTIVATIONS = "activations"
    PASSING = "gradients passed on"
    WORKSPACES = "workspaces"
    LOSS = "loss"


@dataclass(frozen=True, slots=True)
class Tensor:
    """A storage, a workspace, or several tensors of one kind that are held throughout.

    Attributes:
        name: name of the tensor that it was allocated for.
        nbytes: size in bytes.
        kind: its purpose.
        stage: index of the stage that allocates it; -1 for none.
        operation: name of the operation that allocates it, such as ``"addmm"``.
        module: path of the module that runs the operation, such as ``"blocks.3.mlp"``; empty if
            unknown.
    """

    name: str
    nbytes: int
    kind: Kind
    stage: int = -1
    operation: str = ""
    module: str = ""


@dataclass(frozen=True, slots=True)
class Life:
    """The interval in which a tensor is held: from instant ``begin`` on, before instant ``end``."""

    tensor: int
    begin: int
    end: int


@dataclass(frozen=True, slots=True)
class Outline:
    """Seconds and peak memory of each call in a step, without the purpose of the memory.

    Attributes:
        seconds: seconds of each call.
        peaks_bytes: maximum bytes held during each call.
        loss_point: index of the first call of the backward.
        loss_point_bytes: maximum bytes held between forward and backward.
    """

    seconds: tuple[float, ...]
    peaks_bytes: tuple[int, ...]
    loss_point: int
    loss_point_bytes: int


@dataclass(frozen=True, slots=True)
class StepMemory:
    """Memory of a step by instant.

    A new instant begins with each call, with the first allocation after a deallocation, and at the
    end of a call. The maximum at any time is held at one of these instants.

    Attributes:
        tensors: the tensors.
        lives: intervals in which they are held, by ascending ``begin``.
        calls: first instant of each call, in the order of the plan's timeline.
        loss_point: instant of the loss point, between forward and backward.
        end: instant after the last call.
        modules: for each stage, the path of the module of its operations.
    """

    tensors: tuple[Tensor, ...] = ()
    lives: tuple[Life, ...] = ()
    calls: tuple[int, ...] = ()
    loss_point: int = 0
    end: int = 0
    modules: tuple[str, ...] = ()

    @property
    def count(self) -> int:
        """The number of instants."""
        return self.end + 1 if self.lives else 0

    def held_bytes(self, lives: tuple[Life, ...] | None = None) -> tuple[int, ...]:
        """Return the bytes that ``lives`` hold at each instant, by default all lives."""
        changes = [0] * (self.count + 1)
        for life in self.lives if lives is None else lives:
            changes[life.begin] += self.tensors[life.tensor].nbytes
            changes[life.end] -= self.tensors[life.tensor].nbytes
        return tuple(accumulate(changes[:-1]))

    def spans(self) -> Iterator[range]:
        """Yield the range of instants of each call, at the last of which the call has ended."""
        for first, after in zip(self.calls, (*self.calls[1:], self.end), strict=True):
            yield range(first, self.loss_point if first < self.loss_point < after else after)

    def times(self, timeline: Timeline) -> tuple[float, ...]:
        """Return the seconds at which each instant begins; in a call they are spread evenly.

        Args:
            timeline: predicted or measured timeline of the plan that has this memory.
        """
        found = [0.0] * self.count
        runs = [event for event in timeline.events if event.lane is Lane.COMPUTE]
        for instants, run in zip(self.spans(), runs, strict=True):
            for i, instant in enumerate(instants):
                share = i / max(len(instants) - 1, 1)
                found[instant] = run.start_s + (run.end_s - run.start_s) * share
            if instants.stop in (self.loss_point, self.end):
                found[instants.stop] = run.end_s
        return tuple(found)

    @property
    def peak_bytes(self) -> int:
        """The maximum number of bytes at any instant."""
        return max(self.held_bytes(), default=0)

    def most_bytes(self, kind: Kind) -> int:
        """Return the maximum number of bytes of one kind at any instant."""
        own = tuple(life for life in self.lives if self.tensors[life.tensor].kind is kind)
        return max(self.held_bytes(own), default=0)

    def at_peak(self) -> dict[Kind, int]:
        """Return the bytes of each kind at the first instant with the maximum total."""
        held = self.held_bytes()
        found = dict.fromkeys(Kind, 0)
        if held:
            peak = held.index(max(held))
            for life in self.lives:
                if life.begin <= peak < life.end:
                    tensor = self.tensors[life.tensor]
                    found[tensor.kind] += tensor.nbytes
        return found


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
