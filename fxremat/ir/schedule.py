"""A schedule: the typed sequence of operations of one training step."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum


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
    """What a transfer moves: one of the values that a schedule keeps."""

    part: Part
    stage: int

    def __str__(self) -> str:
        return f"{'a' if self.part is Part.INPUT else 's'}{self.stage}"


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
