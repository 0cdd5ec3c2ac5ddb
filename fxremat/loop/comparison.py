"""Comparisons of runs in parts with the same operations at once, while a model trains."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from fxremat.graph.shortfall import warn
from fxremat.ir import Form
from fxremat.passes.parts.parts import Parts
from fxremat.units import format_bytes

MOST_MEASURED = 32
"""Steps in a row that were due, and measured instead, before a warning is given."""


@dataclass(slots=True)
class Comparison:
    """Compares runs of operations that a plan computes in parts with the whole, bit by bit.

    In every ``every`` steps one run is compared, on the numbers of the step. The operations as a
    whole take memory that the plan does not count, so a run is compared only if the budget has room
    for them above the plan's peak. A step whose memory is measured is not compared, as later plans
    would count the comparison as the step's.

    Attributes:
        every: the number of steps from one comparison to the next; 0: never.
    """

    every: int
    _has_warned: bool = False
    _next: Parts | None = None
    _measured: int = 0

    def is_due(self, number: int, *, measured: bool) -> bool:
        """Return whether a run of the step with this number is to be compared.

        Args:
            number: the number of the step.
            measured: whether a step is being measured for later plans.
        """
        if number % self.every:
            return False
        self._measured = self._measured + 1 if measured else 0
        if self._measured == MOST_MEASURED:
            warn(
                f"verify_every={self.every} has compared nothing in {MOST_MEASURED} steps in which "
                "it was due, because these were measured for later plans: their sizes differ and "
                "come near the budget. With a larger budget fewer steps are measured",
                code="FXR113",
            )
        return not measured

    def cancel(self) -> None:
        """Cancel the comparison that :meth:`begin` has prepared, if it has not taken place."""
        if self._next is not None:
            self._next.compare_next(None)
            self._next = None

    def begin(
        self,
        runs: list[Parts],
        number: int,
        room_bytes: int,
        *,
        takes_bytes: Callable[[Parts], int],
        refuse: Callable[[Parts], None],
    ) -> None:
        """Have one of the runs of a step compared when it is called next.

        Args:
            runs: the runs of the step's plan.
            number: the number of the step.
            room_bytes: what the budget leaves above the plan's peak.
            takes_bytes: returns what comparing a run takes.
            refuse: is called with a run that gave other bits, before a warning.
        """
        if not runs:
            return
        takes = {run: takes_bytes(run) for run in runs}
        fit = [run for run in runs if takes[run] <= room_bytes]
        if not fit:
            self._warn_of_no_room(min(takes.values()), room_bytes)
            return
        run = fit[number // self.every % len(fit)]

        def report(same: bool) -> None:
            if not same:
                refuse(run)
                warn(
                    f"{run} ({', '.join(run.operations)}) gave other bits in parts than as a whole "
                    "in a training step. That step uses the bits of the whole; earlier steps may "
                    "differ by rounding. Later plans do not use this run, so they may take more "
                    "memory or time. Please report this; effort=fxremat.Effort(forms=('norms',)) "
                    "disables parts",
                    code="FXR114",
                )

        self._next = run
        run.compare_next(report)

    def _warn_of_no_room(self, least_bytes: int, room_bytes: int) -> None:
        """Warn once that the budget of a step has no room for a comparison."""
        if self._has_warned:
            return
        self._has_warned = True
        more = least_bytes - room_bytes
        warn(
            f"verify_every={self.every} compares nothing in this step: its smallest run in parts "
            f"takes {least_bytes} bytes as a whole, but the budget leaves {room_bytes} above the "
            f"plan's peak. Comparing needs {more} bytes ({format_bytes(more)}) more budget",
            code="FXR113",
        )


def runs_in(form: Form, targets: Sequence[object]) -> list[Parts]:
    """Return the runs, computed in parts, that must have the bits of their operations as a whole.

    Args:
        form: the form of the step.
        targets: the targets of its nodes.
    """
    if not (form.exact and form.has_parts):
        return []
    return [*dict.fromkeys(t for t in targets if isinstance(t, Parts))]
