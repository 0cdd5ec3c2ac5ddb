"""A plan: what was decided for one captured step, and why."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path

from fxremat.errors import PlanError
from fxremat.report.codec import FormatError, decode, encode
from fxremat.report.facts import PlanFacts
from fxremat.report.files import pack, unpack, write_whole

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
        file = _path(path)
        try:
            data = pack(KIND, {"plan": encode(Plan, self)}, packed=file.suffix == ".gz")
            write_whole(file, data)
        except (OSError, ValueError) as error:  # ValueError: a number that JSON does not have
            raise PlanError(
                f"the plan cannot be written to {file}: {error}. Give the path of a file in a "
                "folder that exists and that this user can write to"
            ) from error

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


def _path(path: str | os.PathLike[str]) -> Path:
    try:
        return Path(os.fsdecode(path))
    except TypeError as error:
        raise PlanError(f"the path of a plan is {path!r}: give text or a pathlib.Path") from error
