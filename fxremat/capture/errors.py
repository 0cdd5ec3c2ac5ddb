"""Exceptions of a capture: the message to the user, and the frames that they hold."""

from __future__ import annotations

import re
import traceback

import torch

from fxremat import torch_compat
from fxremat.errors import CaptureError, FxrematError
from fxremat.progress import LOG

_REMEDIES = (
    (
        "RNN, GRU, or LSTM",
        "nn.RNN, nn.GRU and nn.LSTM are one library call, which cannot be divided. Write the loop "
        "with nn.RNNCell, nn.GRUCell or nn.LSTMCell. (Dynamo's allow_rnn crashes the process on a "
        "CPU)",
    ),
    (
        "backwards hooks",
        "A full backward hook of an inner module cannot be captured. Register it on the compiled "
        "model itself, or register a hook on a tensor",
    ),
    (
        "`lock` context manager",
        "If the model takes the lock in its first call only, call the model once before",
    ),
    ("Data-dependent branching", "Compute both branches, and select with torch.where"),
    (
        "data-dependent expression",
        "A number read from a tensor determines what is computed, as in a BatchNorm with "
        "momentum=None. Keep it a tensor, or use a plain number. For an if, compute both branches, "
        "and select with torch.where",
    ),
)

_DEFAULT_REMEDY = (
    "Move the code that breaks the graph out of the forward: fxremat plans whole steps"
)

_UNEXPECTED_REMEDY = (
    "The code can be captured, but tracing or planning its graph failed. Please report this error"
)

_EXPLANATION = re.compile(r"^ *Explanation: (.+)$", re.M)

MOST_LINES = 3
"""The most lines of the user's source that a message names, innermost last."""


class frames_removed:  # noqa: N801, a context manager of contextlib would add a frame itself
    """A context that removes the traceback from each ``FxrematError`` that leaves it.

    The frames would be those of torch and of planning, and the message says more than they do.
    Other errors keep their traceback.
    """

    def __enter__(self) -> None:
        """Do nothing: only the exit matters."""

    def __exit__(self, _kind: object, error: BaseException | None, _frames: object) -> None:
        if isinstance(error, FxrematError):
            try:
                raise without_frames(error)
            finally:
                del error, _frames  # this frame would be in a cycle with them


def without_frames(error: FxrematError) -> FxrematError:
    """Return ``error`` without its traceback, after clearing the local variables of its frames."""
    LOG.debug("raised by", exc_info=error)
    release_frames(error)
    return error.with_traceback(None)


def release_frames(error: BaseException) -> None:
    """Clear the local variables of finished frames of ``error`` and of the errors that led to it.

    The traceback keeps the lines. A frame with a local variable that is the exception it raised is
    in a reference cycle: its tensors would live until the garbage collector runs.
    """
    cleared: dict[int, BaseException] = {}
    left = [error]
    while left:
        error = left.pop()
        if id(error) not in cleared:
            cleared[id(error)] = error
            traceback.clear_frames(error.__traceback__)
            left += torch_compat.leading_to(error)


def capture_refusal(model: torch.nn.Module, cause: BaseException) -> CaptureError:
    """Return a ``CaptureError`` that says why Dynamo could not capture ``model``, with a remedy."""
    reason = str(cause).strip()
    why = [reason.partition("\n")[0], *_EXPLANATION.findall(reason)]
    is_break = torch_compat.is_break(cause)
    default = _DEFAULT_REMEDY if is_break else _UNEXPECTED_REMEDY
    remedy = next((remedy for sign, remedy in _REMEDIES if sign in reason), default)
    if not is_break:
        why[0] = f"{type(cause).__name__}: {why[0]}"
    lines = map(str, torch_compat.user_lines(reason)[-MOST_LINES:])
    text = "\n".join([": ".join(why), *lines, remedy])
    message = f"{type(model).__name__} cannot be captured as one graph: {text}"
    return CaptureError(message, code="FXR301" if is_break else "FXR302")
