"""Every error fxremat raises: each names the object, the numbers and the remedy.

What the user wrote is refused by two of them: a budget by :class:`BudgetError`, every other
argument by :class:`ArgumentError`, whether its type or its value is wrong. All other errors
are about what was found when the model was captured, planned or run.
"""

from __future__ import annotations

import reprlib
from collections.abc import Sequence
from typing import NoReturn

_shown = reprlib.Repr()
_shown.maxstring = _shown.maxother = 200


class FxrematError(Exception):
    """Base of all errors raised by fxremat."""


class BudgetError(FxrematError):
    """The budget cannot be read, or is below what any known schedule needs.

    Attributes:
        least_budget_bytes: the least budget for which a schedule was found, or
            ``None`` when the budget could not be read at all.
        largest: where sizes vary: for each dimension of an argument, named as
            ``args[0].shape[0]``, the largest size that fits while what does not follow it
            stays as it is; none where not even the smallest does.
    """

    def __init__(
        self,
        message: str,
        *,
        least_budget_bytes: int | None = None,
        largest: dict[str, int] | None = None,
    ) -> None:
        super().__init__(message)
        self.least_budget_bytes = least_budget_bytes
        self.largest = dict(largest or {})


class BudgetWarning(UserWarning):
    """A step took more than its budget, because of what could not be known beforehand."""


class GraphBreakWarning(UserWarning):
    """A model is captured in several graphs, and what is between them is not planned."""


class ArgumentError(FxrematError, ValueError, TypeError):
    """An argument is not what it may be.

    It is both a ``ValueError`` and a ``TypeError``, so whoever catches either need not know
    what was wrong.

    Attributes:
        argument: its name.
        value: what was given.
    """

    def __init__(self, message: str, *, argument: str, value: object) -> None:
        super().__init__(message)
        self.argument = argument
        self.value = value


def refuse(argument: str, value: object, must_be: str) -> NoReturn:
    """Raise the error of an argument that must be something else."""
    message = f"{argument} is {_shown.repr(value)}: must be {must_be}"
    raise ArgumentError(message, argument=argument, value=value)


class CaptureError(FxrematError):
    """The step could not be captured as one joint forward and backward graph.

    The model breaks the graph, or a CUDA graph is being captured, in which nothing can be
    measured.
    """


class SizesError(CaptureError):
    """A step with symbols in place of sizes cannot be followed; one of numbers may be.

    Whoever captured it with symbols may do so again with numbers, each size by itself.

    Args:
        found: what does not follow the sizes.
        remedy: what to do about it.

    Attributes:
        found: as given.
    """

    def __init__(self, found: str, remedy: str | None = None) -> None:
        super().__init__(
            f"{found}\n"
            + (
                remedy
                or "Have each size captured by itself: fxremat.compile(..., dynamic=False), or "
                "torch.compile(..., dynamic=False) where you call that"
            )
        )
        self.found = found


class SampleError(FxrematError):
    """The sample is no call of the model: no tensor, tuple, dict or ``Sample``, or tensors on
    another device than the model.

    What the model itself raises at a sample, such as of a shape it does not take, is raised as it
    is, with a note of the shapes it was called with.
    """


class NoGradientError(FxrematError):
    """The model has nothing to train: no parameter or input requires a gradient."""


class GraphError(FxrematError):
    """A graph violates what a pass requires of it."""


class CostError(FxrematError):
    """An operation could not be run alone, so its cost is unknown."""


class ScheduleError(FxrematError):
    """A schedule reads what none of its operations has computed."""


class PlanError(FxrematError):
    """A kept plan cannot be read or written, or is not one of the step that is compiled.

    Attributes:
        differs: of the step, what is not as in the plan; empty where the plan is not readable.
    """

    def __init__(self, message: str, *, differs: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.differs = differs


class BackwardError(FxrematError, RuntimeError):
    """The backward was asked for something a planned step cannot give, or is not right any more.

    It is a ``RuntimeError``, as autograd's own.
    """


class HostMemoryError(FxrematError):
    """Host memory for activations cannot be had: limit, pinned memory, disk or folder.

    Attributes:
        asked_bytes: what was asked for.
    """

    def __init__(self, message: str, *, asked_bytes: int) -> None:
        super().__init__(message)
        self.asked_bytes = asked_bytes


class RankError(FxrematError, RuntimeError):
    """Processes that train one model do not agree, or one of them does not come.

    Attributes:
        ranks: of those that differ from the first of them, or are missing.
    """

    def __init__(self, message: str, *, ranks: Sequence[int]) -> None:
        super().__init__(message)
        self.ranks = tuple(ranks)


class TransferError(FxrematError):
    """A transfer between device and host memory failed, or was asked for wrongly."""
