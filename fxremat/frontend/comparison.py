"""Comparisons of runs in parts with their operations at once, while a model trains."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from fxremat.frontend.shortfall import warn
from fxremat.ir import Form
from fxremat.passes.joint.sizes import evaluated
from fxremat.passes.split.parts import Parts
from fxremat.units import format_bytes


@dataclass(slots=True)
class Comparison:
    """Compares one run of a plan in every so many steps, on the numbers of the step.

    The operations at once take memory that the plan does not have, so a run is compared only where
    the budget has room for them above the plan's peak.

    Attributes:
        every: in each such step; 0: never.
    """

    every: int
    _has_warned: bool = False

    def begin(
        self,
        runs: list[Parts],
        number: int,
        sizes: Mapping[str, int],
        room_bytes: int,
        *,
        refuse: Callable[[Parts], None],
    ) -> None:
        """Let one of the runs of a step be compared when it is called.

        Args:
            runs: of its plan.
            number: of the step.
            sizes: of the step, by name.
            room_bytes: that the budget leaves above the plan's peak.
            refuse: called with a run that has other bits, of which a warning was given.
        """
        if not runs:
            return
        takes_bytes = [_at_once_bytes(run, sizes) for run in runs]
        fit = [run for run, own in zip(runs, takes_bytes, strict=True) if own <= room_bytes]
        if not fit:
            self._has_no_room(min(takes_bytes), room_bytes)
            return
        run = fit[number // self.every % len(fit)]

        def report(same: bool) -> None:
            if not same:
                refuse(run)
                warn(
                    f"{run} ({', '.join(run.operations)}) gave other bits in parts than at once in "
                    "a training step. That step has the bits of the operations at once; earlier "
                    "ones may differ by rounding. Later plans do without this run, so they may "
                    "take more memory or time. Please report this; split=False rules such runs out"
                )

        run.compare_next(report)

    def _has_no_room(self, least_bytes: int, room_bytes: int) -> None:
        """Warn once that the budget of a step has room for no comparison."""
        if self._has_warned:
            return
        self._has_warned = True
        more = least_bytes - room_bytes
        warn(
            f"verify_bits={self.every} compares nothing in this step: the smallest of its runs in "
            f"parts takes {least_bytes} bytes at once, and the budget leaves {room_bytes} above "
            f"the plan's peak. A plan like this one needs {more} bytes ({format_bytes(more)}) more"
        )


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
