"""Readers of the options of :func:`fxremat.compile`: each checks one value, or raises.

A reader gets the name of its option and the value, and returns what :class:`Arguments` keeps. What
it raises is an :class:`ArgumentError` that names both, and what the value may be.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, cast

import numpy as np
import torch

from fxremat.effort import Effort
from fxremat.errors import refuse
from fxremat.options.loss import Loss
from fxremat.options.values import Bits, HostMemory, read_bytes
from fxremat.passes.joint.constraints import Policy
from fxremat.planner.search.search import GENERATORS_BY_NAME
from fxremat.planner.transfers import transfers
from fxremat.ranks.peers import Ranks
from fxremat.report.plan import Plan

Optimizer = torch.optim.Optimizer | type[torch.optim.Optimizer]
Optimizers = Optimizer | Sequence[Optimizer]
Assume = Literal["usual", "strict"]
Executor = Literal["eager", "inductor"]
Regions = Literal["auto", "one"] | tuple[str, ...]

MOST_IN_FLIGHT = 1 << 12
"""More steps than any pipeline has between their forwards and backwards."""

MOST_BYTES = 1 << 60
"""The largest reserve: sums of bytes are 64-bit integers."""


def read_plan(argument: str, value: object) -> Plan | None:
    """Return ``value`` if it is a plan or ``None``, otherwise the plan in the file that it names.

    Raises:
        ArgumentError: ``value`` is not a plan, a path or ``None``.
        PlanError: the file does not contain a plan.
    """
    if value is None or isinstance(value, Plan):
        return value
    if not isinstance(value, (str, os.PathLike)):
        refuse(argument, value, "a fxremat.Plan, the path of a file that Plan.save wrote, or None")
    return Plan.load(value)


def read_bool(argument: str, value: object) -> bool:
    """Return ``value`` as a bool.

    Raises:
        ArgumentError: ``value`` is anything but a bool of Python or numpy.
    """
    if not isinstance(value, (bool, np.bool_)):
        refuse(argument, value, "True or False")
    return bool(value)


def _read_reserve(argument: str, value: object) -> int:
    return read_bytes(argument, value, most=MOST_BYTES)


def _read_optimizers(argument: str, value: object) -> tuple[Optimizer, ...]:
    if value is None:
        return ()
    if isinstance(value, (list, tuple)):
        return tuple(_read_optimizer(argument, own) for own in value)
    return (_read_optimizer(argument, value),)


def _read_optimizer(argument: str, value: object) -> Optimizer:
    if isinstance(value, torch.optim.Optimizer):
        return value
    kind = getattr(torch.optim, value, None) if isinstance(value, str) else value
    if not (isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer)):
        must_be = (
            "an optimizer, its class, the name of a class of torch.optim such as 'AdamW', a list "
            "of these, or None"
        )
        refuse(argument, value, must_be)
    return kind


def _read_loss(_argument: str, value: Any) -> Loss | None:
    return value if value is None or isinstance(value, Loss) else Loss(value)


def _read_offload(argument: str, value: Any) -> transfers.HostMemory | None:
    """Return new host memory for the argument ``offload``, or ``None`` if it is ``False``."""
    if isinstance(value, (bool, np.bool_)) and not value:
        return None
    if not isinstance(value, (str, HostMemory)):
        refuse(argument, value, "'auto', 'only', 'conv', a fxremat.HostMemory or False")
    host = value if isinstance(value, HostMemory) else HostMemory(cast(Any, value))
    return transfers.HostMemory(
        only=host.what != "auto",
        conv=host.what == "conv",
        limit_bytes=cast("int | None", host.limit),
        folder=cast("str | None", host.folder),
        state=bool(host.state),
        all_state=host.state == "all",
        parameters=bool(host.parameters),
        all_parameters=host.parameters == "all",
    )


def _read_bits(_argument: str, value: Any) -> Bits:
    return value if isinstance(value, Bits) else Bits(value)


def _read_effort(_argument: str, value: Any) -> Effort:
    effort = value if isinstance(value, Effort) else Effort(value)
    if not set(effort.generators) <= GENERATORS_BY_NAME.keys():
        refuse("generators", effort.generators, f"some of {', '.join(GENERATORS_BY_NAME)}")
    return effort


def _read_dynamic(argument: str, value: object) -> bool | None:
    return None if value is None else read_bool(argument, value)


def _read_regions(argument: str, value: object) -> Regions:
    if isinstance(value, str) and value in ("auto", "one"):
        return cast(Regions, value)
    names = list(value) if isinstance(value, Iterable) and not isinstance(value, str) else [None]
    if not all(isinstance(name, str) for name in names):
        must_be = "'auto', 'one', or names of modules, as returned by model.named_modules()"
        refuse(argument, value, must_be)
    return tuple(cast(list[str], names))


def _read_in_flight(argument: str, value: object) -> int:
    must_be = f"a number of forwards from 1 to {MOST_IN_FLIGHT}"
    if not isinstance(value, (int, np.integer)) or isinstance(value, bool):
        refuse(argument, value, must_be)
    if not 1 <= value <= MOST_IN_FLIGHT:
        refuse(argument, value, must_be)
    return int(value)


def _read_ranks(argument: str, value: object) -> Ranks | None:
    if not (value is None or isinstance(value, Ranks)):
        refuse(argument, value, "a fxremat.Ranks, or None")
    return value


def _read_policy(argument: str, value: object) -> Policy | None:
    if not (value is None or callable(value)):
        must_be = "None, or a function that takes a fxremat.Operation and returns 'keep', "
        refuse(argument, value, must_be + "'recompute', 'offload' or None")
    return value


def _one_of(*values: str) -> Callable[[str, object], str]:
    """Return a reader that returns its value if it is one of ``values``, and raises otherwise."""

    def read(argument: str, value: object) -> str:
        if not (isinstance(value, str) and value in values):
            refuse(argument, value, " or ".join(map(repr, values)))
        return value

    return read


READERS: Mapping[str, Callable[[str, object], Any]] = {
    "reserve": _read_reserve,
    "optimizer": _read_optimizers,
    "loss": _read_loss,
    "accumulate": read_bool,
    "offload": _read_offload,
    "bits": _read_bits,
    "effort": _read_effort,
    "executor": _one_of("eager", "inductor"),
    "dynamic": _read_dynamic,
    "plan": read_plan,
    "regions": _read_regions,
    "in_flight": _read_in_flight,
    "strict": read_bool,
    "assume": _one_of("usual", "strict"),
    "ranks": _read_ranks,
    "policy": _read_policy,
}
"""The reader of each row of the table of options."""
