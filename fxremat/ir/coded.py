"""Schedules of computations as arrays of numbers, for compiled loops.

An operation of stage ``i`` is ``i * KINDS`` and what it is.
"""

from __future__ import annotations

import functools

import numpy as np
from numpy.typing import NDArray

from fxremat.ir.schedule import Backward, Compute, Forward, Keep, Schedule

Codes = NDArray[np.int64]

BACKWARD, NONE, INPUT, ALL = 0, 1, 2, 3
"""What an operation is; ``ALL + k`` keeps what save option ``k`` does."""

KINDS = 256
"""More than there are."""

_OF_KEEP = {Keep.NONE: NONE, Keep.INPUT: INPUT, Keep.ALL: ALL}
_KEEP_OF = {code: keep for keep, code in _OF_KEEP.items()}


def coded(schedule: Schedule) -> Codes:
    """The computations of a schedule as numbers."""
    return np.array([_code_of(op) for op in schedule.computations], dtype=np.int64)


def decoded(codes: Codes) -> Schedule:
    """The schedule that ``codes`` stand for."""
    return Schedule(tuple(map(_op_of, codes.tolist())))


def _code_of(op: Compute) -> int:
    if isinstance(op, Backward):
        return op.stage * KINDS + BACKWARD
    return op.stage * KINDS + _OF_KEEP[op.keep] + op.option


@functools.cache
def _op_of(code: int) -> Compute:
    stage, kind = divmod(code, KINDS)
    if kind == BACKWARD:
        return Backward(stage)
    return Forward(stage, _KEEP_OF[min(kind, ALL)], max(kind - ALL, 0))
