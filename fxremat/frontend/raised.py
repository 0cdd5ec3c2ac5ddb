"""What an exception holds: a notebook keeps the last one, and with its frames their values."""

from __future__ import annotations

import traceback

from fxremat import torch_compat


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
