"""The table of options, from which every list of options is made.

The readers of :mod:`fxremat.options.readers` check one value for each row. These are made from the
rows: the options of the backend of ``torch.compile``, :class:`fxremat.Options`, the flags of the
command, the options that must be equal in all processes, and the reference table of the docs.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ParamSpec, TypeVar

from fxremat.errors import ArgumentError

P = ParamSpec("P")
T = TypeVar("T")

BACKEND = "torch.compile"
"""The name of the backend in the table, next to the functions of this package."""


@dataclass(frozen=True, slots=True)
class Field:
    """A plain value, as in a configuration file or on a command line.

    Attributes:
        name: its name.
        kind: its type.
        doc: a short description.
        default: the value that represents the default of the option.
        part: the argument of the option's class that it sets; empty for the option itself.
        choices: the valid texts, or empty for any. If it is ``separated``, the texts that are not
            names.
        separated: whether it is names separated by commas.
        flag: whether the command has a flag for it.
        refused_by: functions that do not take it, in addition to those of its option.
    """

    name: str
    kind: Any
    doc: str
    default: Any = None
    part: str = ""
    choices: tuple[str, ...] = ()
    separated: bool = False
    flag: bool = True
    refused_by: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Option:
    """A keyword argument of :func:`fxremat.compile`.

    Attributes:
        name: its name.
        values: description of the valid values.
        doc: description of its purpose, in one sentence.
        default: its default.
        fields: the plain values that make it up. The first one has the name of the option.
        refused_by: functions that do not take it.
        agreed: whether it must be equal in all processes that train together.
    """

    name: str
    values: str
    doc: str
    default: Any = None
    fields: tuple[Field, ...] = ()
    refused_by: tuple[str, ...] = ()
    agreed: bool = False

    def taken_by(self, function: str) -> bool:
        """Return whether ``function`` takes the option."""
        return function not in self.refused_by


BUDGET = Field(
    "budget",
    str,
    "maximum bytes of a step, such as 60GiB, 50% of the peak, or min; '60GiB reserved' limits "
    "reserved bytes",
    flag=False,
)
"""The plain value of the budget, which is not a keyword-only argument."""

OPTIONS: tuple[Option, ...] = (
    Option(
        "reserve",
        "bytes, as an int or as text",
        "Bytes of the budget that the plan leaves free.",
        0,
        (Field("reserve", str, "bytes of the budget that the plan leaves free", "0"),),
    ),
    Option(
        "optimizer",
        "an optimizer, its class, the name of one of `torch.optim`, or a list of these",
        "The optimizers whose state is counted from the first step on.",
        None,
        (Field("optimizer", str | None, "class of torch.optim whose state is counted"),),
    ),
    Option(
        "loss",
        'a function of the outputs, `"own"`, or a `Loss`',
        "The loss of the step, and its target.",
        None,
        (
            Field("loss", str | None, "own, if the model returns its loss"),
            Field(
                "drop_unused",
                bool,
                "return None in place of outputs that the loss does not use",
                False,
                part="drop_unused",
                refused_by=(BACKEND,),
            ),
        ),
    ),
    Option(
        "accumulate",
        "`True` or `False`",
        "Whether each step adds its gradients to those of earlier steps.",
        False,
        (Field("accumulate", bool, "count accumulated gradients", False),),
        agreed=True,
    ),
    Option(
        "offload",
        '`False`, `"auto"`, `"only"`, `"conv"`, or a `HostMemory`',
        "Whether activations, gradients and optimizer state may be in host memory, and how much.",
        False,
        (
            Field(
                "offload",
                str | None,
                "move activations to host memory",
                choices=("auto", "only", "conv"),
            ),
            Field("host_limit", str | None, "maximum bytes of host memory", part="limit"),
            Field(
                "host_dir",
                str | None,
                "folder of the file that represents host memory on a CPU",
                part="folder",
            ),
            Field("host_state", bool, "optimizer state in host memory", False, part="state"),
            Field(
                "host_parameters",
                bool,
                "keep frozen parameters in host memory",
                False,
                part="parameters",
            ),
        ),
        agreed=True,
    ),
    Option(
        "bits",
        '`"exact"`, `"rounding"`, or a `Bits`',
        "Whether gradients are bitwise those without a plan, or equal to rounding.",
        "exact",
        (
            Field(
                "bits",
                str,
                "how gradients equal those without a plan: bitwise, or up to rounding",
                "exact",
                choices=("exact", "rounding"),
            ),
            Field(
                "verify_bits",
                int,
                "steps between comparisons of a run in parts with the whole; 0: never",
                0,
                part="verify_every",
                flag=False,
            ),
        ),
        agreed=True,
    ),
    Option(
        "effort",
        "a number, at least 0, or an `Effort`",
        "How much work planning does, and what it searches.",
        1.0,
        (
            Field("effort", float, "amount of planning work", 1.0),
            Field(
                "generators",
                str | None,
                "solvers whose schedules are searched, such as rotor,join",
                part="generators",
                separated=True,
            ),
            Field(
                "forms",
                str | None,
                "further forms of the step that are searched, such as parts,norms",
                part="forms",
                separated=True,
            ),
        ),
        agreed=True,
    ),
    Option(
        "executor",
        '`"eager"` or `"inductor"`',
        "Whether the step runs eager's kernels, or kernels that Inductor generates.",
        "eager",
        (
            Field(
                "executor",
                str,
                "source of the kernels",
                "eager",
                choices=("eager", "inductor"),
            ),
        ),
        refused_by=("estimate",),
        agreed=True,
    ),
    Option(
        "dynamic",
        "`None`, `True` or `False`",
        "Whether sizes are captured as symbols.",
        None,
        (Field("dynamic", bool | None, "capture sizes as symbols", flag=False),),
        refused_by=("max_batch", "estimate", BACKEND),
    ),
    Option(
        "plan",
        "a `Plan`, or the path of its file",
        "A plan to follow without measuring or planning.",
        None,
        (Field("plan", str | None, "file of a plan to follow", flag=False),),
        refused_by=("max_batch", "estimate", BACKEND),
        agreed=True,
    ),
    Option(
        "regions",
        '`"auto"`, `"one"`, or names of modules',
        "How the model is divided into graphs that are planned within one budget.",
        "auto",
        (
            Field(
                "regions",
                str,
                "auto (as the graph breaks), one (the whole model), or names of modules",
                "auto",
                choices=("auto", "one"),
                separated=True,
                flag=False,
            ),
        ),
        refused_by=("plan", "frontier", "max_batch", "estimate", BACKEND),
        agreed=True,
    ),
    Option(
        "in_flight",
        "a number of steps",
        "How many forwards may wait for their backward.",
        1,
        (Field("in_flight", int, "number of forwards that may wait for their backward", 1),),
        refused_by=("max_batch", "estimate"),
        agreed=True,
    ),
    Option(
        "strict",
        "`True` or `False`",
        "Whether a later step that does not fit raises an error instead of a warning.",
        False,
        (Field("strict", bool, "raise an error for a step that does not fit", False, flag=False),),
        agreed=True,
    ),
    Option(
        "assume",
        '`"usual"` or `"strict"`',
        "Whether least budgets have room for steps of the usual loop, or for one step.",
        "usual",
        (
            Field(
                "assume",
                str,
                "whether least budgets are those of the usual loop or of one step",
                "usual",
                choices=("usual", "strict"),
            ),
        ),
        agreed=True,
    ),
    Option(
        "ranks",
        "a `Ranks`",
        "The processes that train the model together.",
        None,
        (),
        refused_by=("max_batch", "estimate", BACKEND),
    ),
    Option(
        "policy",
        "a function of an `Operation`",
        "Decides whether the results of single operations are kept, recomputed or offloaded.",
        None,
        (),
        agreed=True,
    ),
)
"""All keyword-only arguments of :func:`fxremat.compile`, in order."""

RENAMED: Mapping[str, str] = {
    "target": "loss=fxremat.Loss(function, target=...)",
    "drop_unused": "loss=fxremat.Loss(function or 'own', drop_unused=True)",
    "host_limit": "offload=fxremat.HostMemory('auto', limit='8 GiB')",
    "host_dir": "offload=fxremat.HostMemory('auto', folder='/fast/disk')",
    "exact": "bits= and effort=: bits='rounding' for exact=False, with "
    "effort=fxremat.Effort(forms=('norms',)) to compute nothing in parts",
    "split": "bits= and effort=: bits='rounding' for split=True, "
    "effort=fxremat.Effort(forms=('norms',)) for split=False",
    "verify_bits": "bits=fxremat.Bits('exact', verify_every=100)",
    "fullgraph": "regions=: regions='one' for fullgraph=True, 'auto' for False",
    "budget_on": "part of the budget: budget='22 GiB reserved' for budget_on='reserved'",
    "generators": "effort=fxremat.Effort(generators=('rotor', 'join'))",
}
"""Former names of arguments, and their replacements."""


def refuse_former(given: Mapping[str, Any]) -> None:
    """Refuse arguments under their former names.

    Raises:
        ArgumentError: there is one; the message has its replacement.
    """
    for name, now in RENAMED.items():
        if name in given:
            raise ArgumentError(f"{name}= is now {now}", argument=name, value=given[name])


def refuse_unknown(given: Mapping[str, Any], names: Collection[str], *, knows: str) -> None:
    """Refuse options that are not among ``names``.

    Args:
        given: the options.
        names: names of valid options.
        knows: begin of the sentence that lists ``names`` in the error.

    Raises:
        ArgumentError: there is one; the message has its replacement, or all ``names``.
    """
    for name, value in given.items():
        if name not in names:
            refuse_former({name: value})
            message = f"unknown option {name!r}: {knows} {', '.join(names)}"
            raise ArgumentError(message, argument=str(name), value=value)


def former_refused(function: Callable[P, T]) -> Callable[P, T]:
    """Return ``function`` with former names of arguments refused by :func:`refuse_former`."""

    @functools.wraps(function)
    def called(*args: P.args, **kwargs: P.kwargs) -> T:
        refuse_former(kwargs)
        return function(*args, **kwargs)

    return called


def options_of(function: str) -> Iterator[Option]:
    """Yield the options that ``function`` takes."""
    return (option for option in OPTIONS if option.taken_by(function))


def fields_of(function: str) -> Iterator[Field]:
    """Yield the plain values that ``function`` takes, except the budget."""
    for option in options_of(function):
        yield from (field for field in option.fields if function not in field.refused_by)


def names_of(function: str) -> tuple[str, ...]:
    """Return the names of plain values that ``function`` takes, or of options without these."""
    names = ["budget"]
    for option in options_of(function):
        fields = (field.name for field in option.fields if function not in field.refused_by)
        names += tuple(fields) or (option.name,)
    return tuple(names)
