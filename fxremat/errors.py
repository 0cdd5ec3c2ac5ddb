"""Errors and warnings of fxremat. Each message names the object, the numbers and the remedy.

Each has a code such as ``FXR012``, which :mod:`fxremat.diagnostics` and docs/troubleshooting.md
explain.

Two of them reject arguments of the caller: :class:`BudgetError` a budget, :class:`ArgumentError`
any other argument with a wrong type or value. All others report a problem with the model that
occurred while it was captured, planned or run.
"""

from __future__ import annotations

import reprlib
import sys
from collections.abc import Sequence
from typing import Any, ClassVar, NoReturn

_shown = reprlib.Repr()
_shown.maxstring = _shown.maxother = 200


FAULT = "FXR900"
"""The code of a fault of fxremat itself."""

PAGE = "docs/troubleshooting.md"
"""The page that explains all codes."""


class _Coded(Exception):  # noqa: N818, the base of warnings, too
    """Base of errors and warnings that have a code, with which their printed text ends.

    Attributes:
        code: the code, such as ``"FXR012"``; empty if whoever made the exception gave none.
    """

    default_code: ClassVar[str] = ""

    def __init__(self, message: str = "", *, code: str = "") -> None:
        super().__init__(message)
        self.code = code or self.default_code

    @property
    def message(self) -> str:
        """Return the text without the line that names the code."""
        return super().__str__()

    def __str__(self) -> str:
        """Return the message and, on a separate line, the code and where it is explained."""
        if not self.code:
            return self.message
        place = f"{PAGE}#{self.code.lower()}"
        return f"{self.message}\n[{self.code}: {place}, or run: fxremat explain {self.code}]"

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle and copy without calling the constructor, whose arguments differ by class.

        Dynamo raises an instance of a subclass that it makes, with additional state. Neither can
        be pickled.
        """
        kinds: tuple[type[_Coded], ...] = type(self).__mro__
        kind = next(k for k in kinds if getattr(sys.modules[k.__module__], k.__name__, None) is k)
        attributes = {
            name: value
            for name, value in self.__dict__.items()
            if not type(value).__module__.startswith("torch._")
        }
        return _restored, (kind, self.args, attributes)


def _restored(kind: type[_Coded], args: tuple[Any, ...], attributes: dict[str, Any]) -> _Coded:
    error = kind.__new__(kind, *args)
    error.__dict__.update(attributes)
    return error


def message_of(error: BaseException) -> str:
    """Return the text of an error for use in another one: without the line that names its code."""
    return error.message if isinstance(error, _Coded) else str(error)


class FxrematError(_Coded):
    """Base of all errors raised by fxremat.

    Attributes:
        code: the code of the error, such as ``"FXR012"``: ``fxremat explain FXR012`` explains it.
        message: the text of the error, without the code.
    """


class FxrematWarning(_Coded, UserWarning):
    """Base of all warnings issued by fxremat.

    Attributes:
        code: the code of the warning, such as ``"FXR112"``: ``fxremat explain FXR112`` explains it.
        message: the text of the warning, without the code.
    """


class BudgetError(FxrematError):
    """The budget cannot be read, or is below the least feasible budget.

    Attributes:
        least_budget_bytes: the least feasible budget in bytes, or ``None`` if the budget could not
            be read.
        largest: with symbolic sizes, the largest size of each dimension that fits while all sizes
            that do not depend on it stay as they are. A dimension is named ``args[0].shape[0]``. It
            is empty if not even the smallest size fits.
        budget_bytes: the budget in bytes, or ``None`` if it could not be read.
    """

    def __init__(
        self,
        message: str,
        *,
        code: str = "",
        least_budget_bytes: int | None = None,
        largest: dict[str, int] | None = None,
        budget_bytes: int | None = None,
    ) -> None:
        super().__init__(message, code=code)
        self.least_budget_bytes = least_budget_bytes
        self.budget_bytes = budget_bytes
        self.largest = dict(largest or {})


class BudgetWarning(FxrematWarning):
    """A step may exceed its budget, for a reason that was unknown when it was planned."""


class GraphBreakWarning(FxrematWarning):
    """A model is captured as several graphs, and the code between them is not planned."""


class ArgumentError(FxrematError, ValueError, TypeError):
    """An argument has a wrong type or value.

    It is both a ``ValueError`` and a ``TypeError``, so callers can catch either.

    Attributes:
        argument: name of the argument.
        value: the value that was passed.
    """

    default_code = "FXR401"

    def __init__(self, message: str, *, argument: str, value: object, code: str = "") -> None:
        super().__init__(message, code=code)
        self.argument = argument
        self.value = value


def refuse(argument: str, value: object, must_be: str) -> NoReturn:
    """Raise an :class:`ArgumentError` that describes the valid values of an argument.

    Args:
        argument: name of the argument.
        value: the value that was passed.
        must_be: description of valid values, such as ``"a positive number"``.
    """
    message = f"{argument} must be {must_be}, but got {_shown.repr(value)}"
    raise ArgumentError(message, argument=argument, value=value)


class CaptureError(FxrematError):
    """The step could not be captured as one joint graph of forward and backward.

    Either the model breaks the graph or contains something that cannot be planned, or a CUDA graph
    is being captured, during which nothing can be measured.
    """


class SizesError(CaptureError):
    """A step with symbolic sizes cannot be planned, although one with fixed sizes may be.

    Each size can be captured separately instead.

    Attributes:
        found: description of what prevents symbolic sizes.
    """

    default_code = "FXR320"

    def __init__(self, found: str, remedy: str | None = None) -> None:
        super().__init__(
            f"{found}\n"
            + (
                remedy
                or "Capture each size separately: fxremat.compile(..., dynamic=False), or "
                "torch.compile(..., dynamic=False) if you call that"
            )
        )
        self.found = found


class DataSizesError(CaptureError):
    """A graph cannot be planned because sizes depend on data that no single operation contains."""

    default_code = "FXR330"


class SampleError(FxrematError):
    """The sample is not a call of the model.

    It is not a tensor, tuple, dict or ``Sample``, or its tensors are on another device than the
    model. Errors that the model raises for a sample, for example about its shape, are passed on
    unchanged, with a note of the sample's shapes.
    """


class NoGradientError(FxrematError):
    """There is nothing to train, because no parameter or input requires a gradient."""

    default_code = "FXR510"


class GraphError(FxrematError):
    """A graph violates a requirement of a pass."""

    default_code = FAULT


class CostError(FxrematError):
    """An operation could not be run separately, so its cost is unknown."""


class ScheduleError(FxrematError):
    """A schedule reads a value that none of its operations has computed."""


class PlanError(FxrematError):
    """A saved plan cannot be read or written, or belongs to another step than the compiled one.

    Attributes:
        differs: descriptions of the differences between the plan's step and the compiled one; empty
            if the plan cannot be read.
    """

    def __init__(self, message: str, *, code: str = "", differs: tuple[str, ...] = ()) -> None:
        super().__init__(message, code=code)
        self.differs = differs


class BackwardError(FxrematError, RuntimeError):
    """A backward requests something that planned steps do not support, or its saved state is stale.

    It is a ``RuntimeError``, like autograd's errors.
    """


class HostMemoryError(FxrematError):
    """Host memory for activations cannot be allocated.

    The cause is its limit, pinned memory, the disk or the folder.

    Attributes:
        asked_bytes: number of bytes requested.
    """

    def __init__(self, message: str, *, asked_bytes: int, code: str = "") -> None:
        super().__init__(message, code=code)
        self.asked_bytes = asked_bytes


class RankError(FxrematError, RuntimeError):
    """Processes that train one model disagree, or some of them are missing.

    Attributes:
        ranks: ranks that differ from the first one, or that are missing.
    """

    def __init__(self, message: str, *, ranks: Sequence[int], code: str = "") -> None:
        super().__init__(message, code=code)
        self.ranks = tuple(ranks)


class TransferError(FxrematError):
    """A transfer between device and host memory failed, or was requested incorrectly."""


class TorchVersionError(FxrematError, ImportError):
    """The installed torch is older than the oldest one that fxremat supports."""

    default_code = "FXR802"
