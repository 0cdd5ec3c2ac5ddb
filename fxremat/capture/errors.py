"""Exceptions: what they hold, and what is said of a model that cannot be captured."""

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
        "nn.RNN, nn.GRU and nn.LSTM are one call of a library, which cannot be cut: write the loop "
        "over nn.RNNCell, nn.GRUCell or nn.LSTMCell. (Dynamo's allow_rnn crashes the process on a "
        "CPU)",
    ),
    (
        "backwards hooks",
        "a full backward hook of an inner module cannot be captured: register it on the compiled "
        "model itself, or a hook on a tensor",
    ),
    (
        "`lock` context manager",
        "what a model does under a lock in its first call alone is not captured after it: call "
        "the model once before",
    ),
    ("Data-dependent branching", "let both branches be computed, and torch.where choose"),
    (
        "data-dependent expression",
        "a number that is read from a tensor decides what is computed, as a BatchNorm of "
        "momentum=None does: keep it a tensor, or a plain number",
    ),
)

_DEFAULT = "fxremat plans whole steps: take what breaks the graph out of the forward"

_EXPLANATION = re.compile(r"^ *Explanation: (.+)$", re.M)

MOST_LINES = 3
"""Lines of the user's that a message names, the innermost ones."""


class shortened:  # noqa: N801, a context manager; one of contextlib's would be a frame itself
    """Within it, errors of this package lose the frames of torch and of planning that they came
    through: their message has what those would tell. Other errors keep theirs.
    """

    def __enter__(self) -> None:
        """Do nothing: what counts is how it is left."""

    def __exit__(self, _kind: object, error: BaseException | None, _frames: object) -> None:
        if isinstance(error, FxrematError):
            try:
                raise shorten(error)
            finally:
                del error, _frames  # this frame is theirs


def shorten(error: FxrematError) -> FxrematError:
    """``error`` without the frames that it came through; they forget their values."""
    LOG.debug("raised by", exc_info=error)
    let_go(error)
    return error.with_traceback(None)


def let_go(error: BaseException) -> None:
    """Have frames that have ended, of ``error`` and of what led to it, forget their values.

    Their lines stay in the traceback. Whoever handles an exception under a name and raises it is
    in a circle with it: what its frames have would be there until circles are collected.
    """
    found: dict[int, BaseException] = {}
    left = [error]
    while left:
        error = left.pop()
        if id(error) not in found:
            found[id(error)] = error
            traceback.clear_frames(error.__traceback__)
            left += torch_compat.leading_to(error)


def refused(model: torch.nn.Module, cause: BaseException) -> CaptureError:
    """The error that tells of ``model``, which Dynamo could not capture for ``cause``."""
    reason = str(cause).strip()
    why = [reason.splitlines()[0], *_EXPLANATION.findall(reason)]
    remedy = next((told for sign, told in _REMEDIES if sign in reason), _DEFAULT)
    lines = map(str, torch_compat.user_lines(reason)[-MOST_LINES:])
    text = "\n".join([": ".join(why), *lines, remedy])
    return CaptureError(f"{type(model).__name__} cannot be captured as one graph: {text}")
