"""A plan: what was decided for one captured step, and why."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from fxremat.errors import PlanError
from fxremat.report.codec import FormatError, decode, encode
from fxremat.report.facts import PlanFacts
from fxremat.report.files import pack, unpack, write_whole

if TYPE_CHECKING:
    from fxremat.report.trace import Traced

KIND = "plan"


@dataclass(frozen=True, slots=True)
class Plan(PlanFacts):
    """The schedule of a training step under a byte budget: its facts, and what to do with them."""

    def with_overhead(self, seconds: float) -> Plan:
        """The plan of a step that takes ``seconds`` beside its calls."""
        more = seconds - self.overhead_s
        return replace(
            self,
            overhead_s=seconds,
            predicted_s=self.predicted_s + more,
            baseline_s=self.baseline_s + more,
            lower_bound_s=self.lower_bound_s + more,
            frontier=self.frontier.delayed(more),
        )

    def explain(self) -> str:
        """Print the plan as a table, and return what was printed."""
        # Only now: rich may be missing, and draws a random number when it is imported.
        from fxremat.report.text import print_plan  # noqa: PLC0415

        return print_plan(self)

    def save_html(self, path: str | os.PathLike[str]) -> None:
        """Write a page to look at: memory over the step, time, the frontier, every stage.

        One file that needs no network.

        Args:
            path: of the file; one that is there is replaced.

        Raises:
            PlanError: the file cannot be written, or the plan was not made of a model.
        """
        from fxremat.report.page import page_of  # noqa: PLC0415

        _write("page", path, lambda: page_of(self).encode())

    def save_trace(self, path: str | os.PathLike[str], traced: Traced | None = None) -> None:
        """Write the step as a trace for ``chrome://tracing`` and Perfetto.

        Args:
            path: of the file; one that is there is replaced.
            traced: what ``trace_step`` of the compiled module returned, to be seen beside it.

        Raises:
            PlanError: the file cannot be written, the plan was not made of a model, or ``traced``
                is of another plan.
        """
        from fxremat.report.trace import trace_of  # noqa: PLC0415

        _write("trace", path, lambda: trace_of(self, traced).encode())

    def save_snapshot(self, path: str | os.PathLike[str]) -> None:
        """Write the predicted memory as torch's memory tools read it.

        For ``python -m torch.cuda._memory_viz`` and https://pytorch.org/memory_viz.

        Args:
            path: of the file; one that is there is replaced.

        Raises:
            PlanError: the file cannot be written, or the plan was not made of a model.
        """
        from fxremat.report.snapshot import snapshot_of  # noqa: PLC0415

        _write("snapshot", path, lambda: snapshot_of(self))

    def _repr_html_(self) -> str:
        """The plan in a notebook."""
        from fxremat.report.notebook import html_of  # noqa: PLC0415

        return html_of(self)

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
        packed = _path(path).suffix == ".gz"
        _write("plan", path, lambda: pack(KIND, {"plan": encode(Plan, self)}, packed=packed))

    @staticmethod
    def load(path: str | os.PathLike[str]) -> Plan:
        """A plan that :meth:`save` wrote; the model is not needed.

        Raises:
            PlanError: the file cannot be read, is damaged, or holds no plan.
        """
        file = _path(path)
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


def _write(what: str, path: str | os.PathLike[str], make: Callable[[], bytes]) -> None:
    """Write a file whole.

    Raises:
        PlanError: it cannot be written.
    """
    file = _path(path)
    try:
        write_whole(file, make())
    except (OSError, ValueError) as error:  # ValueError: a number that JSON does not have
        raise PlanError(
            f"the {what} cannot be written to {file}: {error}. Give the path of a file in a "
            "folder that exists and that this user can write to"
        ) from error


def _path(path: str | os.PathLike[str]) -> Path:
    try:
        return Path(os.fsdecode(path))
    except TypeError as error:
        raise PlanError(f"the path of a plan is {path!r}: give text or a pathlib.Path") from error
