"""Plans as users have them: what they say (:mod:`fxremat.report.facts`), and how it is shown."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fxremat.errors import PlanError
from fxremat.report.codec import (
    Checked,
    FormatError,
    decode,
    encode,
    pack,
    path_of,
    unpack,
    write_made,
)
from fxremat.report.consistent import check_plan
from fxremat.report.facts import AnyPlan, PlanFacts, StepFacts

if TYPE_CHECKING:
    from fxremat.report.trace import StepTrace

KIND = "plan"


class Shown:
    """The ways to look at a plan, be it of one graph or of several.

    Their modules are imported where they are used: a plan is made where nobody looks at it, and
    rich may be missing.
    """

    __slots__ = ()

    def explain(self) -> str:
        """Print the plan as a table, and return what was printed."""
        from fxremat.report.text import print_plan  # noqa: PLC0415

        return print_plan(_facts(self))

    def save_html(self, path: str | os.PathLike[str]) -> None:
        """Write a page to look at: memory over the step, time, the frontier, every stage.

        One file that needs no network. Of a ``StepPlan`` it shows the whole step and every region,
        and no frontier.

        Args:
            path: of the file; one that is there is replaced.

        Raises:
            PlanError: the file cannot be written, or the plan was not made of a model.
        """
        from fxremat.report.page import data_of, page_with  # noqa: PLC0415

        write_made("page", path, lambda: page_with(data_of(_facts(self))).encode())

    def save_trace(self, path: str | os.PathLike[str], traced: StepTrace | None = None) -> None:
        """Write the step as a trace for ``chrome://tracing`` and Perfetto.

        Args:
            path: of the file; one that is there is replaced.
            traced: what ``trace_step`` of the compiled module returned, shown as a second process.

        Raises:
            PlanError: the file cannot be written, the plan was not made of a model, or ``traced``
                is of another plan.
        """
        from fxremat.report.trace import trace_of  # noqa: PLC0415

        write_made("trace", path, lambda: trace_of(_facts(self), traced).encode())

    def __repr__(self) -> str:
        """In a few lines; all of it is in its attributes."""
        from fxremat.report.summary import shortly  # noqa: PLC0415

        return shortly(_facts(self))

    def _repr_html_(self) -> str:
        """The plan in a notebook."""
        from fxremat.report.page import notebook_of  # noqa: PLC0415

        return notebook_of(_facts(self))


def _facts(plan: Shown) -> AnyPlan:
    assert isinstance(plan, PlanFacts | StepFacts)
    return plan


@dataclass(frozen=True, slots=True, repr=False)
class Plan(Shown, PlanFacts, Checked):
    """The schedule of a training step under a byte budget: its facts, and what to do with them."""

    def check_read(self) -> None:
        """Check that the parts of a plan that was read go together.

        Raises:
            ValueError: they do not; the message says where.
        """
        check_plan(self)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the plan, and the costs that it rests on, into a file.

        ``fxremat.compile(model, sample, plan=path)`` follows it again, without measuring or
        planning. It is JSON, with gzip where the name ends in ``.gz``; equal plans give equal
        bytes.

        Args:
            path: of the file; one that is there is replaced. Never is it half written.

        Raises:
            PlanError: the file cannot be written.
        """
        packed = path_of(path).suffix == ".gz"
        write_made("plan", path, lambda: pack(KIND, {"plan": encode(Plan, self)}, packed=packed))

    @staticmethod
    def load(path: str | os.PathLike[str]) -> Plan:
        """A plan that :meth:`save` wrote; the model is not needed.

        Raises:
            PlanError: the file cannot be read, is damaged, or holds no plan.
        """
        file = path_of(path)
        try:
            data = file.read_bytes()
        except OSError as error:
            raise PlanError(
                f"no plan can be read from {file}: {error}. Give the path of a file that "
                "Plan.save wrote"
            ) from error
        try:
            return decode(Plan, unpack(KIND, data).get("plan"))
        except FormatError as error:
            raise PlanError(
                f"{file} holds no plan that can be read: {error}. Plan again, and save that plan"
            ) from error


@dataclass(frozen=True, slots=True, repr=False)
class StepPlan(Shown, StepFacts[Plan]):
    """The plan of a training step that runs several captured graphs within one byte budget.

    A model that is captured in several graphs has a ``StepPlan``; one that is captured whole has a
    ``Plan``. Attributes and methods that both classes have bear the same names.
    """
