"""The arguments of the public functions, read in one place, before anything else is done.

Each is documented at :func:`fxremat.compile`, whose signature has the defaults; here are its check,
in ``_READERS`` or in :meth:`Arguments.read`, and, where text can say it, its field of
:class:`Options`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal, cast

import numpy as np
import torch
from torch import nn

from fxremat.errors import ArgumentError, BudgetError, refuse
from fxremat.options.budget import Budget, Readable
from fxremat.options.loss import LossOfOutputs, read_loss
from fxremat.planner.search import DEFAULT_GENERATORS, GENERATORS_BY_NAME
from fxremat.planner.transfers import HostMemory
from fxremat.ranks.peers import Ranks
from fxremat.report.plan import Plan
from fxremat.units import Counted, format_bytes, parse_bytes

Offload = Literal["auto", "only", "conv", False]
Optimizer = torch.optim.Optimizer | type[torch.optim.Optimizer]
Optimizers = Optimizer | Sequence[Optimizer]
Assume = Literal["usual", "strict"]
Executor = Literal["eager", "inductor"]
Split = Literal["exact"] | bool

BACKEND_OPTIONS = (
    "budget", "reserve", "optimizer", "loss", "target", "accumulate", "offload", "host_limit",
    "host_dir", "exact", "split", "effort", "budget_on", "executor", "in_flight", "strict",
    "assume", "verify_bits",
)  # fmt: skip
"""What ``torch.compile(options=...)`` may say to the backend."""

MOST_IN_FLIGHT = 1 << 12
"""More steps than any pipeline has between their forwards and backwards."""

MOST_BYTES = 1 << 60
"""The largest reserve: sums of bytes are 64-bit integers."""


@dataclass(frozen=True, slots=True)
class Arguments:
    """What :func:`fxremat.compile` was asked for, checked, under the names that it has there.

    Attributes:
        reserve_bytes: ``reserve``.
        loss: computed from the model's outputs: ``loss`` and ``target``.
        host: memory to which storages may travel: ``offload``, ``host_limit`` and ``host_dir``;
            ``None``: none may.
        kept: ``plan``, which keeps to the budget.
        optimizers: ``optimizer``, as a tuple.
    """

    budget: Budget
    reserve_bytes: int = 0
    optimizers: tuple[Optimizer, ...] = ()
    loss: LossOfOutputs | None = None
    drop_unused: bool = False
    accumulate: bool = False
    host: HostMemory | None = None
    exact: bool = True
    split: Split = "exact"
    effort: float = 1.0
    budget_on: Counted = "allocated"
    executor: Executor = "eager"
    dynamic: bool | None = None
    kept: Plan | None = None
    fullgraph: bool = False
    regions: tuple[str, ...] = ()
    in_flight: int = 1
    ranks: Ranks | None = None
    strict: bool = False
    assume: Assume = "usual"
    verify_bits: int = 0
    generators: tuple[str, ...] = DEFAULT_GENERATORS

    @property
    def fused(self) -> bool:
        """Whether operations run as units that Inductor compiles."""
        return self.executor == "inductor"

    @staticmethod
    def read(budget: Readable | None = None, **given: Any) -> Arguments:
        """Check arguments of :func:`fxremat.compile`, all but the model and the sample.

        Raises:
            BudgetError: the budget cannot be read, or ``plan`` does not keep to it.
            PlanError: ``plan`` is no file that holds one.
            ArgumentError: another one cannot be read.
            TypeError: there is no such argument.
        """
        kept = read_plan("plan", given.pop("plan", None))
        loss, target = given.pop("loss", None), given.pop("target", None)
        optimizers = _read_optimizers("optimizer", given.pop("optimizer", None))
        offload = given.pop("offload", False)
        host = _read_host(offload, given.pop("host_limit", None), given.pop("host_dir", None))
        reserve_bytes = _read_bytes("reserve", given.pop("reserve", 0), most=MOST_BYTES)
        for name in given.keys() - _READERS.keys():
            raise TypeError(f"fxremat.compile has no argument {name!r}")
        arguments = Arguments(
            budget=_read_budget(budget, kept),
            reserve_bytes=reserve_bytes,
            loss=read_loss(loss, target),
            host=host,
            kept=kept,
            optimizers=optimizers,
            **{name: _READERS[name](name, value) for name, value in given.items()},
        )
        if arguments.fullgraph and arguments.regions:
            must_be = "() with fullgraph=True, which captures all as one graph"
            refuse("regions", given["regions"], must_be)
        if arguments.in_flight > 1 and arguments.regions:
            must_be = "1 with regions=: a step of several graphs is one"
            refuse("in_flight", given["in_flight"], must_be)
        if arguments.drop_unused and loss is None:
            refuse("drop_unused", True, "False without loss=, which says what is used")
        return replace(arguments, accumulate=arguments.accumulate or arguments.in_flight > 1)

    def modules(self, model: nn.Module) -> list[nn.Module]:
        """The modules of ``model`` that are captured each by itself, by the names in ``regions``.

        Raises:
            ArgumentError: it has none of such a name.
        """
        known = dict(model.named_modules(remove_duplicate=False))
        for name in self.regions:
            if name not in known:
                refuse("regions", self.regions, f"names of its modules: there is no {name!r}")
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
        refuse("model", model, "a torch.nn.Module")
    if isinstance(model, torch.jit.ScriptModule):
        refuse("model", model, "the module that was scripted, not a torch.jit.ScriptModule")
    return model


def read_plan(argument: str, value: object) -> Plan | None:
    """A plan, or the one in a file.

    Raises:
        ArgumentError: ``value`` is neither.
        PlanError: the file holds none.
    """
    if value is None or isinstance(value, Plan):
        return value
    if not isinstance(value, (str, os.PathLike)):
        refuse(argument, value, "a fxremat.Plan, the path of a file that Plan.save wrote, or None")
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
        refuse(argument, value, "True or False")
    return bool(value)


def _read_bytes(argument: str, value: object, *, most: int | None = None) -> int:
    """Bytes as an integer or as text, at least 0 and at most ``most``."""
    nbytes: int | None = None
    if isinstance(value, str):
        nbytes = parse_bytes(value)
    elif isinstance(value, (int, np.integer)) and not isinstance(value, bool):
        nbytes = int(value)
    if nbytes is None or nbytes < 0:
        refuse(argument, value, "bytes, at least 0, as an int or as text such as '64 MiB'")
    if most is not None and nbytes > most:
        refuse(argument, value, f"at most {most} bytes")
    return nbytes


def _read_optimizers(argument: str, value: object) -> tuple[Optimizer, ...]:
    if value is None:
        return ()
    if isinstance(value, (list, tuple)):
        return tuple(_read_optimizer(argument, own) for own in value)
    return (_read_optimizer(argument, value),)


def _read_optimizer(argument: str, value: object) -> Optimizer:
    if isinstance(value, torch.optim.Optimizer):
        return value
    found = getattr(torch.optim, value, None) if isinstance(value, str) else value
    if not (isinstance(found, type) and issubclass(found, torch.optim.Optimizer)):
        must_be = (
            "an optimizer, its class, the name of one of torch.optim as 'AdamW', a list of these, "
            "or None"
        )
        refuse(argument, value, must_be)
    return found


def _read_names(argument: str, value: object) -> tuple[str, ...]:
    names = list(value) if isinstance(value, Iterable) and not isinstance(value, str) else [None]
    if not all(isinstance(name, str) for name in names):
        refuse(argument, value, "names of modules, as model.named_modules() has them")
    return tuple(cast(list[str], names))


def _read_generators(argument: str, value: object) -> tuple[str, ...]:
    names = list(value) if isinstance(value, Iterable) and not isinstance(value, str) else []
    if not (names and all(isinstance(name, str) and name in GENERATORS_BY_NAME for name in names)):
        refuse(argument, value, f"some of {', '.join(GENERATORS_BY_NAME)}")
    return tuple(dict.fromkeys(names))


def _read_steps(argument: str, value: object) -> int:
    if not isinstance(value, (int, np.integer)) or isinstance(value, bool) or value < 0:
        refuse(argument, value, "a number of steps, or 0")
    return int(value)


def _read_in_flight(argument: str, value: object) -> int:
    must_be = f"from 1 to {MOST_IN_FLIGHT}: so many forwards run before the first one's backward"
    if not isinstance(value, (int, np.integer)) or isinstance(value, bool):
        refuse(argument, value, must_be)
    if not 1 <= value <= MOST_IN_FLIGHT:
        refuse(argument, value, must_be)
    return int(value)


def _read_effort(argument: str, value: object) -> float:
    is_number = isinstance(value, (int, float, np.integer, np.floating))
    if not is_number or isinstance(value, bool) or not float(value) >= 0:  # type: ignore[arg-type]
        refuse(argument, value, "a number, at least 0, such as 1.0 or math.inf")
    return float(value)  # type: ignore[arg-type]


def _read_ranks(argument: str, value: object) -> Ranks | None:
    if not (value is None or isinstance(value, Ranks)):
        refuse(argument, value, "a fxremat.Ranks, or None")
    return value


def _read_host(offload: object, limit: object, folder: object) -> HostMemory | None:
    if isinstance(offload, (bool, np.bool_)) and not offload:
        for argument, value in (("host_limit", limit), ("host_dir", folder)):
            if value is not None:
                refuse(argument, value, "None without offload=, or offload= be given as well")
        return None
    if not (isinstance(offload, str) and offload in ("auto", "only", "conv")):
        refuse("offload", offload, "'auto', 'only', 'conv' or False")
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
        refuse(argument, value, "the path of a folder, as text or as a pathlib.Path, or None")
    if not Path(path).is_dir():
        refuse(argument, value, "a folder that exists: make it first, or give another")
    if not os.access(path, os.W_OK | os.X_OK):
        refuse(argument, value, "a folder that this user can write to")
    return str(Path(path).absolute())


def _one_of(*values: str) -> Callable[[str, object], str]:
    """Reads one of some texts."""

    def read(argument: str, value: object) -> str:
        if not (isinstance(value, str) and value in values):
            refuse(argument, value, " or ".join(map(repr, values)))
        return value

    return read


def _read_dynamic(argument: str, value: object) -> bool | None:
    return None if value is None else read_bool(argument, value)


def _read_split(argument: str, value: object) -> Split:
    if isinstance(value, str) and value == "exact":
        return "exact"
    if not isinstance(value, bool):
        refuse(argument, value, '"exact", True or False')
    return value


_READERS: dict[str, Callable[[str, object], Any]] = {
    "drop_unused": read_bool,
    "accumulate": read_bool,
    "exact": read_bool,
    "split": _read_split,
    "effort": _read_effort,
    "budget_on": _one_of("allocated", "reserved"),
    "executor": _one_of("eager", "inductor"),
    "dynamic": _read_dynamic,
    "fullgraph": read_bool,
    "regions": _read_names,
    "in_flight": _read_in_flight,
    "ranks": _read_ranks,
    "strict": read_bool,
    "assume": _one_of("usual", "strict"),
    "verify_bits": _read_steps,
    "generators": _read_generators,
}
"""Arguments that are read by themselves."""


@dataclass  # not frozen: Hydra could not override its fields
class Options:
    """Arguments of :func:`fxremat.compile` as plain values: numbers, flags and text.

    A class from which OmegaConf and Hydra make a structured config, and ``HfArgumentParser``
    arguments of a command line. Nothing is checked here: who takes :meth:`arguments` does.

    Attributes:
        budget: text: ``"6 GiB"``, ``"6GB"`` (decimal), ``"50%"`` of what the step takes with
            everything kept, or ``"min"``.
        optimizer: name of a class of ``torch.optim``; ``"none"``: no state is counted before
            it exists, not even that of a trainer's optimizer.
        loss: ``"own"``: the model returns its loss.
        offload: ``"auto"``, ``"only"`` or ``"conv"``; ``None``: nothing travels.
        split: ``"exact"``, ``"true"`` or ``"false"``.
        plan: file of a plan to follow.
    """

    budget: str
    reserve: str = "0"
    optimizer: str | None = None
    loss: str | None = None
    drop_unused: bool = False
    accumulate: bool = False
    offload: str | None = None
    host_limit: str | None = None
    host_dir: str | None = None
    exact: bool = True
    split: str = "exact"
    effort: float = 1.0
    budget_on: str = "allocated"
    executor: str = "eager"
    dynamic: bool | None = None
    plan: str | None = None
    fullgraph: bool = False
    in_flight: int = 1
    strict: bool = False
    assume: str = "usual"
    verify_bits: int = 0

    @staticmethod
    def from_dict(values: Mapping[str, Any]) -> Options:
        """The options that a section of a configuration file has.

        Args:
            values: by the names of the attributes; what is left out is the default.

        Raises:
            ArgumentError: a name is none of them, or ``budget`` is missing.
        """
        names = [field.name for field in fields(Options)]
        for name in values:
            if name not in names:
                raise ArgumentError(
                    f"unknown option {name!r}: fxremat.Options has {', '.join(names)}",
                    argument=str(name),
                    value=values[name],
                )
        if "budget" not in values:
            raise ArgumentError(
                "no budget: give one, such as budget: 6 GiB", argument="budget", value=None
            )
        return Options(**values)

    def arguments(self) -> dict[str, Any]:
        """What differs from the defaults, as keywords of :func:`fxremat.compile` or a callback."""
        found = {
            field.name: getattr(self, field.name)
            for field in fields(self)
            if getattr(self, field.name) != field.default
        }
        if found.get("optimizer") == "none":
            found["optimizer"] = None
        if "split" in found:
            found["split"] = {"true": True, "false": False}.get(str(self.split).lower(), self.split)
        return found
