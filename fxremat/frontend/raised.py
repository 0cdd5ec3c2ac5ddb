"""What an exception holds: a notebook keeps the last one, and with its frames their values."""

from __future__ import annotations

import logging
import traceback

from fxremat import torch_compat
from fxremat.errors import FxrematError

LOG = logging.getLogger("fxremat")


class shortened:  # noqa: N801, a context manager; one of contextlib's would be a frame itself
    """Within it, errors of this package lose the frames of torch and of planning that they came
    through: their message has what those would tell. Other errors keep theirs.
    """

    def __enter__(self) -> None:
        """Do nothing: what counts is how it is left."""

    def __exit__(self, _kind: object, error: BaseException | None, _frames: object) -> None:
        if isinstance(error, FxrematError):
            LOG.debug("raised by", exc_info=error)
            let_go(error)
            try:
                raise error.with_traceback(None)
            finally:
                del error, _frames  # this frame is theirs


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
