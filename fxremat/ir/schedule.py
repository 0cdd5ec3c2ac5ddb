"""A schedule: the typed sequence of operations of one training step, and its packed form.

What a planner decides in addition to the order of computations is a :class:`Decision`. Nodes are
identified by their index among the nodes of the joint graph, storages by their index in its table.
Both are the same for equal graphs in any process.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum

import numpy as np
from numpy.typing import NDArray


class Keep(Enum):
    """What a forward leaves in memory in addition to the boundary that it writes."""

    NONE = "none"
    """``F_none``: nothing. The boundary that it read is freed unless something else holds it."""
    INPUT = "input"
    """``F_ck``: the boundary that it read."""
    ALL = "all"
    """``F_all``: the boundary that it read, and its saved set."""


@dataclass(frozen=True, slots=True)
class Forward:
    """Forward of a stage: reads boundary ``stage`` and writes boundary ``stage + 1``.

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
    """Backward of a stage: reads the gradient after it, its saved set and boundary ``stage``."""

    stage: int

    def __str__(self) -> str:
        return f"B {self.stage}"


class Part(Enum):
    """Which activations of a stage a transfer moves."""

    INPUT = "input"
    """Boundary ``stage``, as kept by ``F_ck`` of the stage: ``a``."""
    SAVED = "saved"
    """The saved set of the stage with the boundary after it, as kept by ``F_all``: ``ā``."""


@dataclass(frozen=True, slots=True)
class Activations:
    """What a transfer moves: a boundary or saved set that a schedule keeps, or one storage of it.

    Attributes:
        part: boundary or saved set.
        stage: index of the stage.
        name: name of the storage; empty if all storages are moved.
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
        nbytes: number of further bytes to copy; ``None``: all that is left.
    """

    what: Activations
    nbytes: float | None = None

    def __str__(self) -> str:
        return f"offload {self.what}" + ("" if self.nbytes is None else f" {self.nbytes:g}")


@dataclass(frozen=True, slots=True)
class Free:
    """Free the device memory of ``what`` once it has been copied and read."""

    what: Activations

    def __str__(self) -> str:
        return f"free {self.what}"


@dataclass(frozen=True, slots=True)
class Prefetch:
    """Start copying ``what`` back to device memory (H2D lane).

    Attributes:
        what: the activations.
        nbytes: number of further bytes to copy; ``None``: all that is left.
    """

    what: Activations
    nbytes: float | None = None

    def __str__(self) -> str:
        return f"prefetch {self.what}" + ("" if self.nbytes is None else f" {self.nbytes:g}")


@dataclass(frozen=True, slots=True)
class Wait:
    """Delay later computations until ``what`` is entirely in device memory again."""

    what: Activations

    def __str__(self) -> str:
        return f"wait {self.what}"


Compute = Forward | Backward
"""An operation of the compute lane."""

Transfer = Offload | Free | Prefetch | Wait
"""An operation of the transfer lanes, or one that waits for them."""

Op = Compute | Transfer


@dataclass(frozen=True, slots=True)
class Schedule:
    """The operations of a step in the order in which they run."""

    ops: tuple[Op, ...]

    @property
    def computations(self) -> tuple[Compute, ...]:
        """The forwards and backwards in order, without transfers."""
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

    A call is one forward or backward of a stage. Places are indices of calls in the order of the
    step, and denote the instant before that call. The place at the loss point lies in the forward
    for ``offload`` and ``release``, in the backward for the others.

    Attributes:
        storage: the storage.
        nbytes: its size in bytes.
        nodes: the tensors in it that the backward reads.
        offload: place where its copy to the host begins, right after the last call that reads it.
        release: place where its device memory is freed, once that copy is done.
        prefetch: place where device memory is allocated and the copy back begins.
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
"""Pairs of a stage and tensors that its forward computes."""


@dataclass(frozen=True, slots=True)
class Decision:
    """What a planner decides for a step in addition to the order of its computations.

    Attributes:
        missing: stages that do not keep everything, and the tensors that their backwards rebuild.
        held: stages that keep tensors from their first forward on, and those tensors.
        moves: storages that are offloaded.
    """

    missing: Tensors = ()
    held: Tensors = ()
    moves: tuple[Move, ...] = ()


Codes = NDArray[np.int64]
"""The computations of a schedule as integers, for compiled loops: each is ``stage * KINDS`` plus
its kind."""

BACKWARD, NONE, INPUT, ALL = 0, 1, 2, 3
"""Kinds of computations; ``ALL + k`` keeps what save option ``k`` keeps."""

KINDS = 256
"""An upper bound on the number of kinds."""

_KIND_OF_KEEP = {Keep.NONE: NONE, Keep.INPUT: INPUT, Keep.ALL: ALL}
_KEEP_OF_KIND = {code: keep for keep, code in _KIND_OF_KEEP.items()}


def coded(schedule: Schedule) -> Codes:
    """Return the forwards and backwards of a schedule in order, each as an integer (``Codes``)."""
    return np.array([_code_of(op) for op in schedule.computations], dtype=np.int64)


def decoded(codes: Codes) -> Schedule:
    """Return the schedule of the computations in ``codes``, the inverse of ``coded``."""
    return Schedule(tuple(map(_op_of, codes.tolist())))


def _code_of(op: Compute) -> int:
    if isinstance(op, Backward):
        return op.stage * KINDS + BACKWARD
    return op.stage * KINDS + _KIND_OF_KEEP[op.keep] + op.option


@functools.cache
def _op_of(code: int) -> Compute:
    stage, kind = divmod(code, KINDS)
    if kind == BACKWARD:
        return Backward(stage)
    return Forward(stage, _KEEP_OF_KIND[min(kind, ALL)], max(kind - ALL, 0))
