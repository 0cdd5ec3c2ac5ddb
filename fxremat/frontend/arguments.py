"""The arguments of the public functions, read in one place, before anything else is done."""

from __future__ import annotations

import os
import reprlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NoReturn, cast, get_args

import numpy as np
import torch
from torch import nn

from fxremat.errors import ArgumentError, BudgetError
from fxremat.frontend.budget import Budget, Readable
from fxremat.frontend.losses import Loss, LossOfOutputs, read_loss
from fxremat.frontend.ranks import Ranks
from fxremat.planner.search import DEFAULT_GENERATORS, GENERATORS_BY_NAME
from fxremat.planner.transfers import HostMemory
from fxremat.report.plan import Plan
from fxremat.units import Counted, format_bytes, parse_bytes

Offload = Literal["auto", "only", "conv", False]
Optimizer = torch.optim.Optimizer | type[torch.optim.Optimizer]
Executor = Literal["eager", "inductor"]

BACKEND_OPTIONS = (
    "budget", "reserve", "optimizer", "loss", "target", "accumulate", "offload", "host_limit",
    "host_dir", "exact", "budget_on", "executor", "in_flight",
)  # fmt: skip
"""What ``torch.compile(options=...)`` may say to the backend."""

MOST_BYTES = 1 << 60
"""The largest reserve: sums of bytes are 64-bit integers."""

_shown = reprlib.Repr()
_shown.maxstring = _shown.maxother = 200


@dataclass(frozen=True, slots=True)
class Arguments:
    """What :func:`fxremat.compile` was asked for, checked.

    Attributes:
        budget: what the peak may reach.
        reserve_bytes: of the budget, to leave alone.
        optimizer: whose state is counted.
        loss: computed from the model's outputs.
        drop_unused: outputs that ``loss`` does not use are not returned.
        accumulate: a second set of gradients is counted.
        host: memory to which storages may travel; ``None``: none may.
        exact: gradients must be bitwise those without a plan.
        budget_on: what the budget is for.
        executor: who makes the kernels.
        dynamic: whether sizes are captured as symbols; ``None``: from the second on.
        kept: a plan to follow, which keeps to the budget.
        fullgraph: what breaks the graph is refused.
        regions: names of modules that are captured each by itself.
        in_flight: so many forwards may wait for their backward.
        ranks: processes that follow one plan; ``None``: those that the model tells of.
        generators: names of solvers whose schedules are looked at.
    """

    budget: Budget
    reserve_bytes: int
    optimizer: Optimizer | None
    loss: LossOfOutputs | None
    drop_unused: bool
    accumulate: bool
    host: HostMemory | None
    exact: bool
    budget_on: Counted
    executor: Executor = "eager"
    dynamic: bool | None = None
    kept: Plan | None = None
    fullgraph: bool = False
    regions: tuple[str, ...] = ()
    in_flight: int = 1
    ranks: Ranks | None = None
    generators: tuple[str, ...] = DEFAULT_GENERATORS

    @property
    def fused(self) -> bool:
        """Whether operations run as units that Inductor compiles."""
        return self.executor == "inductor"

    @staticmethod
    def read(
        budget: Readable | None,
        *,
        reserve: int | str = 0,
        optimizer: Optimizer | str | None = None,
        loss: Loss | None = None,
        target: Any = None,
        drop_unused: bool = False,
        accumulate: bool = False,
        offload: Offload = False,
        host_limit: int | str | None = None,
        host_dir: str | os.PathLike[str] | None = None,
        exact: bool = True,
        budget_on: Counted = "allocated",
        executor: Executor = "eager",
        dynamic: bool | None = None,
        plan: Plan | str | os.PathLike[str] | None = None,
        fullgraph: bool = False,
        regions: Iterable[str] = (),
        in_flight: int = 1,
        ranks: Ranks | None = None,
        generators: Iterable[str] = DEFAULT_GENERATORS,
    ) -> Arguments:
        """Check all arguments but the model and the sample; nothing is changed.

        Raises:
            BudgetError: the budget cannot be read, or ``plan`` does not keep to it.
            PlanError: ``plan`` is no file that holds one.
            ArgumentError: another one cannot be read.
        """
        kept = read_plan("plan", plan)
        arguments = Arguments(
            budget=_read_budget(budget, kept),
            reserve_bytes=_read_bytes("reserve", reserve, most=MOST_BYTES),
            optimizer=_read_optimizer(optimizer),
            loss=read_loss(loss, target),
            drop_unused=read_bool("drop_unused", drop_unused),
            accumulate=read_bool("accumulate", accumulate) or in_flight != 1,
            host=_read_host(offload, host_limit, host_dir),
            exact=read_bool("exact", exact),
            budget_on=_read_counted(budget_on),
            executor=_read_executor(executor),
            dynamic=None if dynamic is None else read_bool("dynamic", dynamic),
            kept=kept,
            fullgraph=read_bool("fullgraph", fullgraph),
            regions=_read_names("regions", regions),
            in_flight=_read_count("in_flight", in_flight),
            ranks=_read_ranks("ranks", ranks),
            generators=_read_generators(generators),
        )
        if arguments.fullgraph and arguments.regions:
            _refuse("regions", regions, "() with fullgraph=True, which captures all as one graph")
        if arguments.in_flight > 1 and arguments.regions:
            _refuse("in_flight", in_flight, "1 with regions=: a step of several graphs is one")
        if arguments.drop_unused and loss is None:
            _refuse("drop_unused", drop_unused, "False without loss=, which says what is used")
        return arguments

    def modules(self, model: nn.Module) -> list[nn.Module]:
        """The modules of ``model`` that are captured each by itself, by the names in ``regions``.

        Raises:
            ArgumentError: it has none of such a name.
        """
        known = dict(model.named_modules(remove_duplicate=False))
        for name in self.regions:
            if name not in known:
                _refuse("regions", self.regions, f"names of its modules: there is no {name!r}")
        return [known[name] for name in self.regions]

    @staticmethod
    def read_options(options: Mapping[str, Any] | None) -> Arguments:
        """Check the options of the Dynamo backend, which are among the same arguments.

        Raises:
            BudgetError: no budget, or one that cannot be read.
            ArgumentError: an option that does not exist, or cannot be read.
        """
        given = dict(options or {})
        for name, value in given.items():
            if name not in BACKEND_OPTIONS:
                raise ArgumentError(
                    f"unknown option {name!r}: fxremat knows {', '.join(BACKEND_OPTIONS)}",
                    argument=name,
                    value=value,
                )
        if "budget" not in given:
            raise BudgetError('no budget: pass options={"budget": "6 GiB"} to torch.compile')
        return Arguments.read(**given)


def read_model(model: object) -> nn.Module:
    """``model``, if it is a module.

    Raises:
        ArgumentError: it is none, or one whose Python is gone.
    """
    if not isinstance(model, nn.Module):
        _refuse("model", model, "a torch.nn.Module")
    if isinstance(model, torch.jit.ScriptModule):
        _refuse("model", model, "the module that was scripted, not a torch.jit.ScriptModule")
    return model


def _refuse(argument: str, value: object, must_be: str) -> NoReturn:
    message = f"{argument} is {_shown.repr(value)}: must be {must_be}"
    raise ArgumentError(message, argument=argument, value=value)


def read_plan(argument: str, value: object) -> Plan | None:
    """A plan, or the one in a file.

    Raises:
        ArgumentError: ``value`` is neither.
        PlanError: the file holds none.
    """
    if value is None or isinstance(value, Plan):
        return value
    if not isinstance(value, (str, os.PathLike)):
        _refuse(argument, value, "a fxremat.Plan, the path of a file that Plan.save wrote, or None")
    return Plan.load(value)


def _read_budget(value: Readable | None, kept: Plan | None) -> Budget:
    """The budget, in bytes where there is a plan, which must keep to it."""
    if kept is None:
        if value is None:
            raise BudgetError("budget is None: give one, such as '6 GiB', or a plan= to follow")
        return Budget.read(value)
    if value is None:
        return Budget(kept.budget_bytes, nbytes=kept.budget_bytes)
    budget = Budget.read(value)
    nbytes = budget.bytes_of(
        full_bytes=kept.baseline_peak_bytes, least_bytes=kept.least_budget_bytes
    )
    if kept.counted_bytes > nbytes:
        raise BudgetError(
            f"budget {value!r} is {nbytes} bytes ({format_bytes(nbytes)}), but the step of plan= "
            f"takes {kept.counted_bytes} ({format_bytes(kept.counted_bytes)}): leave budget out, "
            "or leave plan= out to plan for this budget"
        )
    return Budget(value, nbytes=nbytes)


def read_bool(argument: str, value: object) -> bool:
    """A flag.

    Raises:
        ArgumentError: anything else.
    """
    if not isinstance(value, (bool, np.bool_)):
        _refuse(argument, value, "True or False")
    return bool(value)


def _read_counted(value: object) -> Counted:
    for counted in get_args(Counted):
        if isinstance(value, str) and value == counted:
            return cast(Counted, counted)
    _refuse("budget_on", value, "'allocated' or 'reserved'")


def _read_executor(value: object) -> Executor:
    for executor in get_args(Executor):
        if isinstance(value, str) and value == executor:
            return cast(Executor, executor)
    _refuse("executor", value, "'eager' or 'inductor'")


def _read_bytes(argument: str, value: object, *, most: int | None = None) -> int:
    """Bytes as an integer or as text, at least 0 and at most ``most``."""
    nbytes: int | None = None
    if isinstance(value, str):
        nbytes = parse_bytes(value)
    elif isinstance(value, (int, np.integer)) and not isinstance(value, bool):
        nbytes = int(value)
    if nbytes is None or nbytes < 0:
        _refuse(argument, value, "bytes, at least 0, as an int or as text such as '64 MiB'")
    if most is not None and nbytes > most:
        _refuse(argument, value, f"at most {most} bytes")
    return nbytes


def _read_optimizer(value: object) -> Optimizer | None:
    if value is None or isinstance(value, torch.optim.Optimizer):
        return value
    found = getattr(torch.optim, value, None) if isinstance(value, str) else value
    if not (isinstance(found, type) and issubclass(found, torch.optim.Optimizer)):
        must_be = "an optimizer, its class, the name of one of torch.optim as 'AdamW', or None"
        _refuse("optimizer", value, must_be)
    return found


def _read_names(argument: str, value: object) -> tuple[str, ...]:
    names = list(value) if isinstance(value, Iterable) and not isinstance(value, str) else [None]
    if not all(isinstance(name, str) for name in names):
        _refuse(argument, value, "names of modules, as model.named_modules() has them")
    return tuple(cast(list[str], names))


def _read_generators(value: object) -> tuple[str, ...]:
    names = list(value) if isinstance(value, Iterable) and not isinstance(value, str) else []
    if not (names and all(isinstance(name, str) and name in GENERATORS_BY_NAME for name in names)):
        _refuse("generators", value, f"some of {', '.join(GENERATORS_BY_NAME)}")
    return tuple(dict.fromkeys(names))


def _read_count(argument: str, value: object) -> int:
    if not isinstance(value, (int, np.integer)) or isinstance(value, bool) or value < 1:
        _refuse(argument, value, "a number, at least 1")
    return int(value)


def _read_ranks(argument: str, value: object) -> Ranks | None:
    if not (value is None or isinstance(value, Ranks)):
        _refuse(argument, value, "a fxremat.Ranks, or None")
    return value


def _read_host(offload: object, limit: object, folder: object) -> HostMemory | None:
    if isinstance(offload, (bool, np.bool_)) and not offload:
        for argument, value in (("host_limit", limit), ("host_dir", folder)):
            if value is not None:
                _refuse(argument, value, "None without offload=, or offload= be given as well")
        return None
    if not (isinstance(offload, str) and offload in ("auto", "only", "conv")):
        _refuse("offload", offload, "'auto', 'only', 'conv' or False")
    return HostMemory(
        only=offload != "auto",
        conv=offload == "conv",
        limit_bytes=None if limit is None else _read_bytes("host_limit", limit),
        folder=None if folder is None else _read_folder("host_dir", folder),
    )


def _read_folder(argument: str, value: object) -> str:
    """An existing folder that can be written to, as an absolute path."""
    path = os.fspath(value) if isinstance(value, (str, os.PathLike)) else None
    if not (isinstance(path, str) and path):
        _refuse(argument, value, "the path of a folder, as text or as a pathlib.Path, or None")
    if not Path(path).is_dir():
        _refuse(argument, value, "a folder that exists: make it first, or give another")
    if not os.access(path, os.W_OK | os.X_OK):
        _refuse(argument, value, "a folder that this user can write to")
    return str(Path(path).absolute())
