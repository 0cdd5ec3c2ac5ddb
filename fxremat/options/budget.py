"""Valid budgets, and the bytes that they mean for a captured step."""

from __future__ import annotations

import math
import re
import reprlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np

from fxremat.errors import BudgetError
from fxremat.units import Counted, bytes_in, format_bytes

Readable = str | int | float | np.integer[Any] | np.floating[Any]


@dataclass(frozen=True, slots=True)
class Budget:
    """A checked budget, as the user wrote it.

    Attributes:
        written: the value that the user wrote.
        nbytes: the budget in bytes, if it is written in bytes.
        share: the share of the peak with everything kept, if it is written as a share. ``"min"``
            has neither.
        counted: the bytes that it limits: those of blocks that the allocator has handed out, or
            all that the allocator has reserved from the device.
    """

    written: Readable
    nbytes: int | None = None
    share: float | None = None
    counted: Counted = "allocated"

    @property
    def grows(self) -> bool:
        """Whether the budget is ``"min"``, which grows if a later call needs more."""
        bare = _counted_in(self.written)[0]
        return isinstance(bare, str) and bare.strip().lower() == "min"

    @staticmethod
    def read(written: Readable) -> Budget:
        """Return the budget for ``"6 GiB"``, bytes as an int, a share in (0, 1], or ``"min"``.

        Text may end in ``" reserved"`` or ``" allocated"``, which says which bytes are counted.
        Integers and floats of numpy are read as Python's, and so is text from a file that has
        no other types: ``"0.5"`` and ``"50%"`` are shares, ``"6442450944"`` is bytes.

        Raises:
            BudgetError: ``written`` is none of these, or is zero or negative.
        """
        bare, counted = _counted_in(written)
        share = _share_of(bare)
        if share is not None:
            if not (math.isfinite(share) and 0 < share <= 1):
                raise BudgetError(
                    f"budget is {written!r}, but a share of the peak with everything kept must be "
                    "in (0, 1], or up to '100%'. Pass bytes as an int or as '6 GiB'",
                    code="FXR001",
                )
            return Budget(written, share=share, counted=counted)
        if Budget(written).grows:
            return Budget(written, counted=counted)
        nbytes = bytes_in(bare)
        if nbytes is None:
            raise BudgetError(
                f"budget is {reprlib.repr(written)}, a {type(written).__name__}, but must be "
                "bytes as '6 GiB' or an int, a share in (0, 1] as a float or as '50%', or 'min'. "
                "Text that ends in ' reserved' limits reserved bytes",
                code="FXR001",
            )
        if nbytes <= 0:
            raise BudgetError(
                f"budget is {written!r}, but must be at least one byte", code="FXR001"
            )
        return Budget(written, nbytes=nbytes, counted=counted)

    def again(self, amount: object) -> str:
        """Return the text of a budget of ``amount`` that limits the same kind of bytes."""
        return str(amount) if self.counted == "allocated" else f"'{amount} {self.counted}'"

    def resolved_to(self, nbytes: int) -> Budget:
        """Return this budget with its value resolved to ``nbytes``."""
        return Budget(self.written, nbytes, counted=self.counted)

    def bytes_of(self, *, full_bytes: int, least_bytes: int) -> int:
        """Return the budget in bytes, feasible or not.

        Args:
            full_bytes: the peak with everything kept, for a share.
            least_bytes: the least peak, for ``"min"``.
        """
        if self.nbytes is not None:
            return self.nbytes
        return least_bytes if self.share is None else int(self.share * full_bytes)

    def resolve(
        self,
        *,
        full_bytes: int,
        least_bytes: int,
        needed_by: Callable[[], str],
        also_held: Sequence[tuple[str, int]] = (),
        first_bytes: int | None = None,
        most_bytes: int | None = None,
        hint: str = "",
    ) -> int:
        """Return the budget in bytes, or raise ``BudgetError`` if no schedule keeps to them.

        Args:
            full_bytes: peak with everything kept.
            least_bytes: least peak of a schedule, whenever the loop clears gradients.
            needed_by: describes where that least peak occurs, for the error.
            also_held: other memory in the least peak, as descriptions and bytes, for the error.
            first_bytes: least peak if no gradient exists when a forward begins: a budget of at
                least that is accepted. ``None``: ``least_bytes``.
            most_bytes: least peak if gradients are set to zero in place of ``None``, which an error
                names as well. ``None``: ``least_bytes``.
            hint: a further remedy, for the error.

        Raises:
            BudgetError: the budget is below ``first_bytes``. Its ``least_budget_bytes`` are
                ``most_bytes``, which suffice for every loop.
        """
        nbytes = self.bytes_of(full_bytes=full_bytes, least_bytes=least_bytes)
        first_bytes = least_bytes if first_bytes is None else first_bytes
        most_bytes = least_bytes if most_bytes is None else most_bytes
        if nbytes < first_bytes:
            held = "".join(
                f"{', of which' if i == 0 else ' and'} {n} ({format_bytes(n)}) are for {what}"
                for i, (what, n) in enumerate(also_held)
            )
            share = (
                ""
                if self.share is None
                else f"{self.again(_share(most_bytes, full_bytes))}, which is "
            )
            number = isinstance(self.written, (int, np.integer))
            least = "'min'" if self.counted == "allocated" else self.again("min")
            other = "" if self.grows else f", or budget={least}"
            if first_bytes < least_bytes:
                other = f", or {first_bytes} if they are before the forward" + other
            if least_bytes < most_bytes:
                cleared = "cleared to None between forward and backward"
                other = f", or {least_bytes} if gradients are {cleared}{other}"
            elif first_bytes < least_bytes:
                other = other.replace("they are before", "gradients are cleared before")
            raise BudgetError(
                f"{'the budget' if number else f'budget {self.written!r}'} is {nbytes} bytes "
                f"({format_bytes(nbytes)}), but the least feasible budget is {least_bytes} bytes "
                f"({format_bytes(least_bytes)}), needed by {needed_by()}{held}; with everything "
                f"kept the step takes "
                f"{full_bytes} bytes ({format_bytes(full_bytes)}). Give at least "
                f"{share}{self.again(most_bytes)}{other}{hint}",
                least_budget_bytes=most_bytes,
                budget_bytes=nbytes,
                code="FXR002",
            )
        return nbytes


def constrained(error: BudgetError, *, least_bytes: int | None) -> BudgetError:
    """Return ``error`` with the bytes that constraints of a policy, or tags in the model, cost.

    Args:
        error: the error of a step with these constraints.
        least_bytes: the least budget without them; ``None`` if it is unknown.
    """
    constraints = "the constraints of policy=, or of tags of selective checkpointing, "
    if least_bytes is None:
        cost = f"Without {constraints}fewer bytes may suffice"
    else:
        constrained_bytes = error.least_budget_bytes or 0
        more_bytes = max(0, constrained_bytes - least_bytes)
        cost = (
            f"Without {constraints}{min(least_bytes, constrained_bytes)} bytes suffice: "
            f"the constraints cost {more_bytes} ({format_bytes(more_bytes)})"
        )
    return BudgetError(
        f"{error.message}. {cost}",
        least_budget_bytes=error.least_budget_bytes,
        largest=error.largest,
        budget_bytes=error.budget_bytes,
        code=error.code,
    )


@dataclass(slots=True, eq=False)
class TrainingBudget:
    """The budget of one model, which changes as it is resolved, accepted or grows.

    All parts of the package refer to this object, and none keeps a copy of the bytes.

    Attributes:
        written: the budget as the user wrote it, checked.
        nbytes: the present budget in bytes; ``None`` before a share or ``"min"`` is resolved.
        strict: whether a later step that does not fit raises instead of running with a warning.
        usual: whether least budgets are those of the usual training loop, not of one step.
        accepted: whether a first plan fits the budget.
        trained: whether a step of the model has run to its end.
        counted: bytes by description that the budget was resolved with, for messages to compare.
        hint: a further remedy, for errors before the budget is accepted.
        workspace_bytes: the part of ``nbytes`` for workspaces that libraries allocated after the
            budget was resolved.
    """

    written: Budget
    nbytes: int | None = None
    strict: bool = False
    usual: bool = False
    accepted: bool = False
    trained: bool = False
    counted: dict[str, int] = field(default_factory=dict)
    hint: str = ""
    workspace_bytes: int = 0

    def __post_init__(self) -> None:
        self.nbytes = self.written.nbytes if self.nbytes is None else self.nbytes

    @property
    def grows(self) -> bool:
        """Whether the budget is ``"min"``, which grows if a later call needs more."""
        return self.written.grows

    @property
    def is_relative(self) -> bool:
        """Whether the budget is a share or ``"min"``, so that its bytes depend on the step."""
        return self.written.nbytes is None

    @property
    def may_raise(self) -> bool:
        """Whether a step that does not fit raises an error instead of a warning."""
        return self.strict or not (self.accepted or self.trained)

    @property
    def now(self) -> Budget:
        """The present budget: in bytes if it is resolved, otherwise as written."""
        return self.written if self.nbytes is None else self.written.resolved_to(self.nbytes)

    def set(self, nbytes: int) -> None:
        """Set the budget to ``nbytes``."""
        self.nbytes = nbytes

    def add_workspaces(self, nbytes: int) -> None:
        """Increase a ``"min"`` budget by workspaces that libraries allocated after it was resolved.

        Args:
            nbytes: the total of these workspaces, including those of earlier calls.
        """
        if self.grows and self.nbytes is not None and nbytes > self.workspace_bytes:
            self.nbytes += nbytes - self.workspace_bytes
            self.workspace_bytes = nbytes


def _share(least_bytes: int, full_bytes: int) -> float:
    """Return the least share of ``full_bytes``, in few digits, that is at least ``least_bytes``."""
    parts = 1000
    while True:
        share = min(1.0, math.ceil(parts * least_bytes / full_bytes) / parts)
        if int(share * full_bytes) >= least_bytes or share == 1:
            return share
        parts *= 10


_ENDING = re.compile(r"(.*\S)\s+(allocated|reserved)\s*", re.DOTALL | re.IGNORECASE)


def _counted_in(written: object) -> tuple[object, Counted]:
    """Split a written budget into the amount and the kind of bytes, by default ``"allocated"``."""
    match = _ENDING.fullmatch(written) if isinstance(written, str) else None
    if match is None:
        return written, "allocated"
    return match[1], cast(Counted, match[2].lower())


_SHARE = re.compile(r"\s*([0-9]{1,30}(?:\.[0-9]{0,30})?|\.[0-9]{1,30})\s*(%?)\s*")


def _share_of(written: object) -> float | None:
    """Return the share that a float, or text with a point or ``%``, names; otherwise ``None``."""
    if isinstance(written, (float, np.floating)):
        return float(written)
    match = _SHARE.fullmatch(written) if isinstance(written, str) else None
    if match is None or not (match[2] or "." in match[1]):
        return None
    return float(match[1]) / (100 if match[2] else 1)
