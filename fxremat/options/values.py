"""Classes for the values of options that have several parts."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

import numpy as np

from fxremat.errors import refuse
from fxremat.units import bytes_in

BitsKind = Literal["exact", "rounding"]
What = Literal["auto", "only", "conv"]


@dataclass(frozen=True, slots=True)
class Bits:
    """The equality of gradients to those of a step without a plan, and how often it is verified.

    Attributes:
        kind: ``"exact"`` computes gradients that are bitwise those without a plan. ``"rounding"``
            computes gradients that are equal up to rounding. The input of a BatchNorm may then be
            rebuilt from the output of the leaky ReLU that follows it. Operations may be computed in
            parts whose sums are taken in another order, and attention without its causal mask.
        verify_every: the interval in steps of a comparison. In every ``verify_every``-th step, one
            run of operations that is computed in parts is also computed as a whole, on the data
            of that step. The budget must have room for that above the plan's peak. If bits differ,
            the step uses the results of the whole, a ``BudgetWarning`` names the run, and later
            plans do not use it. Steps that are measured for later plans, such as the first ones,
            are skipped. ``0`` disables the comparison.

    Raises:
        ArgumentError: a value cannot be read.
    """

    kind: BitsKind = "exact"
    verify_every: int = 0

    def __post_init__(self) -> None:
        kinds = get_args(BitsKind)
        if not (isinstance(self.kind, str) and self.kind in kinds):
            refuse("bits", self.kind, "'exact', 'rounding' or a fxremat.Bits")
        steps = self.verify_every
        if not isinstance(steps, (int, np.integer)) or isinstance(steps, bool) or steps < 0:
            refuse("verify_every", steps, "a nonnegative number of steps")
        object.__setattr__(self, "verify_every", int(steps))


@dataclass(frozen=True, slots=True)
class HostMemory:
    """Host memory for activations between forward and backward, and for what an optimizer keeps.

    Attributes:
        what: ``"auto"`` moves activations where that is faster than recomputing them; ``"only"``
            recomputes nothing; ``"conv"`` recomputes nothing and moves only inputs of convolutions
            and poolings (Hascoet et al.).
        limit: maximum host memory to use, as ``"8 GiB"`` or bytes, or ``None`` for as much as the
            plan takes. It limits all graphs and steps together, and all processes on one machine.
            The memory is allocated once, and freed with the module that ``compile`` returns.
        folder: for steps on a CPU, the folder of the file that represents host memory, on a fast
            disk or in memory. ``None`` uses the system's folder for temporary files.
        state: ``True``: the state of the optimizers in ``optimizer=`` and the gradients may live in
            host memory. As much of them does as makes the step fastest within the budget. The
            optimizer steps some parameters at a time, on the device, with the same bits as without.
            ``"all"``: all of them do that ``limit`` allows, whatever the budget is.
        parameters: ``True``: frozen parameters may live in host memory. A step then copies each to
            the device before an operation reads it, and frees it afterwards. None is moved where
            everything fits on the device. ``"all"``: trained parameters may live there as well. An
            operator of the optimizer copies each to the device and back.

    Raises:
        ArgumentError: a value cannot be read.
    """

    what: What = "auto"
    limit: int | str | None = None
    folder: str | os.PathLike[str] | None = None
    state: bool | Literal["all"] = False
    parameters: bool | Literal["all"] = False

    def __post_init__(self) -> None:
        if not (isinstance(self.what, str) and self.what in get_args(What)):
            refuse("offload", self.what, "'auto', 'only', 'conv', a fxremat.HostMemory or False")
        if self.limit is not None:
            object.__setattr__(self, "limit", read_bytes("limit", self.limit))
        if self.folder is not None:
            object.__setattr__(self, "folder", _read_folder("folder", self.folder))
        if not isinstance(self.state, bool) and self.state != "all":
            refuse("state", self.state, "True, False or 'all'")
        if not isinstance(self.parameters, bool) and self.parameters != "all":
            refuse("parameters", self.parameters, "True, False or 'all'")


def read_bytes(argument: str, value: object, *, most: int | None = None) -> int:
    """Return a number of bytes given as an integer or as text.

    Args:
        argument: name of the argument, for the error.
        value: the bytes.
        most: the largest valid value, or ``None`` for no limit.

    Raises:
        ArgumentError: ``value`` is not a number of bytes, is negative, or is more than ``most``.
    """
    nbytes = bytes_in(value)
    if nbytes is None or nbytes < 0:
        refuse(argument, value, "a nonnegative number of bytes, as an int or text like '64 MiB'")
    if most is not None and nbytes > most:
        refuse(argument, value, f"at most {most} bytes")
    return nbytes


def _read_folder(argument: str, value: object) -> str:
    """Return the absolute path of an existing folder that can be written to."""
    path = os.fspath(value) if isinstance(value, (str, os.PathLike)) else None
    if not (isinstance(path, str) and path):
        refuse(argument, value, "the path of a folder, as a str or a pathlib.Path, or None")
    if not Path(path).is_dir():
        refuse(argument, value, "an existing folder")
    if not os.access(path, os.W_OK | os.X_OK):
        refuse(argument, value, "a folder that this user can write to")
    return str(Path(path).absolute())
