"""The tensors that a step holds at each instant."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from itertools import accumulate

from fxremat.ir import Lane, Timeline


class Kind(Enum):
    """The purpose of memory, in the order in which areas are stacked."""

    PARAMETERS = "parameters"
    BUFFERS = "buffers"
    INPUTS = "inputs"
    OPTIMIZER = "optimizer state"
    RESERVE = "reserve"
    OTHER = "outside the step"
    GRADIENTS = "gradients"
    OUTPUTS = "outputs"
    ACTIVATIONS = "activations"
    PASSING = "gradients passed on"
    WORKSPACES = "workspaces"
    LOSS = "loss"


EXISTING = "gradients that exist"
"""The name of the gradients that exist when a step begins."""


@dataclass(frozen=True, slots=True)
class CodeLine:
    """A line of source code of the model.

    Attributes:
        file: name of the file; of an installed package, its path in the package, such as
            ``"transformers/models/llama/modeling_llama.py"``.
        number: number of the line, from 1.
        code: text of the line without indentation; empty if unknown.
    """

    file: str
    number: int
    code: str = ""

    @property
    def place(self) -> str:
        """The name of the file and the number of the line, such as ``"modeling_llama.py:171"``."""
        return f"{self.file.rpartition('/')[2]}:{self.number}"


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
        line: index, in the lines of the step's memory, of the line of the model whose operation
            allocates it; -1 if unknown.
    """

    name: str
    nbytes: int
    kind: Kind
    stage: int = -1
    operation: str = ""
    module: str = ""
    line: int = -1


@dataclass(frozen=True, slots=True)
class Life:
    """The interval in which a tensor is held: from instant ``begin`` on, before instant ``end``."""

    tensor: int
    begin: int
    end: int


@dataclass(frozen=True, slots=True)
class Waiting:
    """A tensor that the forward leaves in memory for the backward.

    Attributes:
        tensor: index of the tensor.
        calls: indices of the calls of the step that read it.
        runs: indices of the operations that recompute it from what else is held between forward and
            backward, and from ``needs``; ``None`` if any plan keeps it, because it is small and
            read in many places, is returned by the model, or must not be computed twice.
        needs: indices of tensors that would have to be held until then, and are not.
    """

    tensor: int
    calls: tuple[int, ...] = ()
    runs: tuple[int, ...] | None = None
    needs: tuple[int, ...] = ()


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
        lines: lines of the model that allocate tensors, each once.
        waiting: tensors that are held from the forward to the backward.
        again_s: seconds of each operation that recomputes one of them.
    """

    tensors: tuple[Tensor, ...] = ()
    lives: tuple[Life, ...] = ()
    calls: tuple[int, ...] = ()
    loss_point: int = 0
    end: int = 0
    modules: tuple[str, ...] = ()
    lines: tuple[CodeLine, ...] = ()
    waiting: tuple[Waiting, ...] = ()
    again_s: tuple[float, ...] = ()

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

    @property
    def peak_instant(self) -> int:
        """The first instant at which the maximum number of bytes is held; 0 if nothing is held."""
        held = self.held_bytes()
        return held.index(max(held)) if held else 0

    def alive(self, instant: int) -> tuple[Life, ...]:
        """Return the lives of the tensors that are held at an instant."""
        return tuple(life for life in self.lives if life.begin <= instant < life.end)
