"""A schedule: the typed sequence of operations of one training step, and its packed form.

What a planner decides beyond the order of computations is a :class:`Decision`. Nodes are told by
their index among the nodes of the joint graph, storages by their index in its table: equal for
equal graphs in any process.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum

import numpy as np
from numpy.typing import NDArray


class Keep(Enum):
    """What a forward leaves in memory beside the boundary it writes."""

    NONE = "none"
    """``F_none``: nothing; a boundary that nobody else holds is freed."""
    INPUT = "input"
    """``F_ck``: the boundary it read."""
    ALL = "all"
    """``F_all``: the boundary it read and its saved set."""


@dataclass(frozen=True, slots=True)
class Forward:
    """Forward of ``stage``: reads boundary ``stage``, writes boundary ``stage + 1``.

    Attributes:
        stage: index of the stage.
        keep: what it leaves in memory.
        option: what ``F_all`` keeps of the saved set: 0 for all of it, else an index into
            ``StageCosts.options``, counted from 1.
    """

    stage: int
    keep: Keep
    option: int = 0

    def __str__(self) -> str:
        name = {Keep.NONE: "F_none", Keep.INPUT: "F_ck", Keep.ALL: "F_all"}[self.keep]
        return f"{name} {self.stage}" + (f" option {self.option}" if self.option else "")


@dataclass(frozen=True, slots=True)
class Backward:
    """Backward of ``stage``: reads the gradient after it, its saved set and boundary ``stage``."""

    stage: int

    def __str__(self) -> str:
        return f"B {self.stage}"


class Part(Enum):
    """Which activations of a stage a transfer moves."""

    INPUT = "input"
    """Boundary ``stage``, as kept by ``F_ck`` of the stage: ``a``."""
    SAVED = "saved"
    """The saved set of the stage, as kept by its ``F_all``, boundary after it included: ``ā``."""


@dataclass(frozen=True, slots=True)
class Activations:
    """What a transfer moves: one of the values that a schedule keeps, or a single storage of it.

    Attributes:
        part: which of them.
        stage: of which stage.
        name: of the storage; empty: all of the value.
    """

    part: Part
    stage: int
    name: str = ""

    def __str__(self) -> str:
        return self.name or f"{'a' if self.part is Part.INPUT else 's'}{self.stage}"


@dataclass(frozen=True, slots=True)
class Offload:
    """Start copying ``what`` to host memory (D2H lane).

    Attributes:
        what: the activations.
        nbytes: copy this much more of it; ``None``: all that is left.
    """

    what: Activations
    nbytes: float | None = None

    def __str__(self) -> str:
        return f"offload {self.what}" + ("" if self.nbytes is None else f" {self.nbytes:g}")


@dataclass(frozen=True, slots=True)
class Free:
    """Give the device memory of ``what`` back once its copy and what reads it are done."""

    what: Activations

    def __str__(self) -> str:
        return f"free {self.what}"


@dataclass(frozen=True, slots=True)
class Prefetch:
    """Start copying ``what`` back to device memory (H2D lane); see ``Offload``."""

    what: Activations
    nbytes: float | None = None

    def __str__(self) -> str:
        return f"prefetch {self.what}" + ("" if self.nbytes is None else f" {self.nbytes:g}")


@dataclass(frozen=True, slots=True)
class Wait:
    """Later computations start once ``what`` is in device memory again, whole."""

    what: Activations

    def __str__(self) -> str:
        return f"wait {self.what}"


Compute = Forward | Backward
"""What runs on the compute lane."""

Transfer = Offload | Free | Prefetch | Wait
"""What the transfer lanes do, and what the others wait for."""

Op = Compute | Transfer


@dataclass(frozen=True, slots=True)
class Schedule:
    """Operations in the order in which they run."""

    ops: tuple[Op, ...]

    @property
    def computations(self) -> tuple[Compute, ...]:
        """The forwards and backwards in their order, transfers left out."""
        return tuple(op for op in self.ops if isinstance(op, Compute))

    def __len__(self) -> int:
        return len(self.ops)

    def __iter__(self) -> Iterator[Op]:
        return iter(self.ops)

    def __str__(self) -> str:
        return ", ".join(map(str, self.ops))


@dataclass(frozen=True, slots=True)
class Move:
    """A storage that is in host memory for part of the step.

    Places are indices of calls, and mean the instant before that call. One that is the turn
    lies in the forward for ``offload`` and ``release``, in the backward for the others.

    Attributes:
        storage: which.
        nbytes: its size.
        nodes: the tensors in it that the backward reads.
        offload: its copy to the host begins, right after the last call that reads it.
        release: its device memory is given back, once that copy is done.
        prefetch: device memory is taken and the copy back begins.
        wait: the call that reads it next.
    """

    storage: int
    nbytes: int
    nodes: tuple[int, ...]
    offload: int
    release: int
    prefetch: int
    wait: int


Tensors = tuple[tuple[int, tuple[int, ...]], ...]
"""Stages, and tensors that their forwards make."""


@dataclass(frozen=True, slots=True)
class Decision:
    """What is decided for a step beside its schedule.

    Attributes:
        missing: stages that do not keep everything, and the tensors that their backwards rebuild.
        held: stages that keep tensors from their first forward on, and those tensors.
        moves: storages that travel.
    """

    missing: Tensors = ()
    held: Tensors = ()
    moves: tuple[Move, ...] = ()


Codes = NDArray[np.int64]
"""The computations of a schedule, for compiled loops: one of stage ``i`` is ``i * KINDS`` and what
it is."""

BACKWARD, NONE, INPUT, ALL = 0, 1, 2, 3
"""What a computation is; ``ALL + k`` keeps what save option ``k`` does."""

KINDS = 256
"""More than there are."""

_OF_KEEP = {Keep.NONE: NONE, Keep.INPUT: INPUT, Keep.ALL: ALL}
_KEEP_OF = {code: keep for keep, code in _OF_KEEP.items()}


def coded(schedule: Schedule) -> Codes:
    """The computations of a schedule as numbers."""
    return np.array([_code_of(op) for op in schedule.computations], dtype=np.int64)


def decoded(codes: Codes) -> Schedule:
    """The schedule that ``codes`` stand for."""
    return Schedule(tuple(map(_op_of, codes.tolist())))


def _code_of(op: Compute) -> int:
    if isinstance(op, Backward):
        return op.stage * KINDS + BACKWARD
    return op.stage * KINDS + _OF_KEEP[op.keep] + op.option


@functools.cache
def _op_of(code: int) -> Compute:
    stage, kind = divmod(code, KINDS)
    if kind == BACKWARD:
        return Backward(stage)
    return Forward(stage, _KEEP_OF[min(kind, ALL)], max(kind - ALL, 0))
