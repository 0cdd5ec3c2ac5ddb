"""The plan of a step that several captured graphs make."""

from __future__ import annotations

import os
from dataclasses import dataclass

from fxremat.report.files import write_made
from fxremat.report.step_facts import StepFacts


@dataclass(frozen=True, slots=True)
class StepPlan(StepFacts):
    """The plan of a training step that runs several captured graphs within one byte budget.

    A model that is captured in several graphs has a ``StepPlan``; one that is captured whole has a
    ``Plan``. Attributes and methods that both classes have bear the same names.
    """

    def explain(self) -> str:
        """Print the step as a table, and return what was printed."""
        # Only now: rich may be missing, and draws a random number when it is imported.
        from fxremat.report.step_text import print_step  # noqa: PLC0415

        return print_step(self)

    def save_html(self, path: str | os.PathLike[str]) -> None:
        """Write a page to look at: memory over the whole step, time, every region and stage.

        One file that needs no network.

        Args:
            path: of the file; one that is there is replaced.

        Raises:
            PlanError: the file cannot be written.
        """
        from fxremat.report.step_page import page_of_step  # noqa: PLC0415

        write_made("page", path, lambda: page_of_step(self).encode())

    def save_trace(self, path: str | os.PathLike[str]) -> None:
        """Write the whole step as a trace for ``chrome://tracing`` and Perfetto.

        Args:
            path: of the file; one that is there is replaced.

        Raises:
            PlanError: the file cannot be written.
        """
        from fxremat.report.step_page import trace_of_step  # noqa: PLC0415

        write_made("trace", path, lambda: trace_of_step(self).encode())

    def __repr__(self) -> str:
        """In a few lines; the plans of the regions are in ``regions``."""
        # Only now: a plan is made where nobody looks at it.
        from fxremat.report.summary import shortly, what_is_done  # noqa: PLC0415

        count = len(self.regions)
        what = f"StepPlan of {count} region{'s' * (count != 1)}"
        return shortly(self, what, what_is_done(*(row.plan for row in self.regions)))

    def _repr_html_(self) -> str:
        """The step in a notebook."""
        from fxremat.report.step_page import html_of_step  # noqa: PLC0415

        return html_of_step(self)
