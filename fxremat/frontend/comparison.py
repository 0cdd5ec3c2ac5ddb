"""Comparisons of runs in parts with their operations at once, while a model trains."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from fxremat.frontend.shortfall import warn
from fxremat.ir import Form
from fxremat.passes.joint.sizes import evaluated
from fxremat.passes.split.parts import Parts
from fxremat.progress import LOG


@dataclass(slots=True)
class Comparison:
    """Compares one run of a plan in every so many steps, on the numbers of the step.

    The operations at once take memory that the plan does not have, so a run is compared only where
    the budget has room for them above the plan's peak.

    Attributes:
        every: in each such step; 0: never.
        compared: runs that were.
        without_room: steps that compared none, as the budget had no room.
        changed: runs with other bits, which nobody has taken yet.
    """

    every: int
    compared: int = 0
    without_room: int = 0
    changed: list[Parts] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def begin(
        self, runs: list[Parts], number: int, sizes: Mapping[str, int], room_bytes: int
    ) -> None:
        """Let one of the runs of a step be compared, if it is this step's turn.

        Args:
            runs: of its plan.
            number: of the step.
            sizes: of the step, by name.
            room_bytes: that the budget leaves above the plan's peak.
        """
        if not runs or not self.every or number % self.every:
            return
        fit = [run for run in runs if _at_once_bytes(run, sizes) <= room_bytes]
        if not fit:
            self.without_room += 1
            LOG.info("no run is compared: the budget has room for none of them at once")
            return
        run = fit[number // self.every % len(fit)]
        run.compare_next(lambda same: self._compared(run, same=same))

    def _compared(self, run: Parts, *, same: bool) -> None:
        with self._lock:
            self.compared += 1
            if not same:
                self.changed.append(run)

    def take(self) -> list[Parts]:
        """Return the runs that gave other bits, with a warning; they are given once."""
        if not self.changed:
            return []
        with self._lock:
            taken, self.changed = self.changed, []
        for run in taken:
            warn(
                f"{run} ({', '.join(run.operations)}) gave other bits in parts than at once in a "
                "training step. That step has the bits of the operations at once; earlier ones may "
                "differ by rounding. Later plans do without this run, so they may take more memory "
                "or time. Please report this; split=False rules such runs out"
            )
        return taken


def runs_in(form: Form, targets: Sequence[object]) -> list[Parts]:
    """The runs in parts of a step in a form that are to have the bits of the operations at once."""
    if not (form.exact and form.has_parts):
        return []
    return [*dict.fromkeys(t for t in targets if isinstance(t, Parts))]


def _at_once_bytes(run: Parts, sizes: Mapping[str, int]) -> int:
    """Bytes that the operations of a run take at once, with their results."""
    count = -(-int(evaluated(run.rows, sizes)) // run.part_rows)
    results = sum(int(evaluated(own.layout.storage_bytes, sizes)) for own in run.outputs)
    return count * run.part_bytes + results
