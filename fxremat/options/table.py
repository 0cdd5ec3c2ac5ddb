"""The table of options, from which everything that lists options is made.

The readers of :mod:`fxremat.options.readers` check one value for each row. These are made from the
rows: the options of the backend of ``torch.compile``, :class:`fxremat.Options`, the flags of the
command, what processes that train together must all be given, and the reference table of the docs.
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
"""How the table names the options of the backend, next to the functions of this package."""


@dataclass(frozen=True, slots=True)
class Field:
    """A plain value, as a configuration file or a command line holds it.

    Attributes:
        name: its name there.
        kind: its type: of numbers, flags and text.
        doc: what it is, in a few words.
        default: the value that stands for the default of the option.
        part: the argument of the option's class that it is; empty for the option itself.
        choices: the texts that it may be; empty for any. Of what is ``separated``, the texts that
            are no names.
        separated: whether it is names that are separated by commas.
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
        values: what it may be.
        doc: what it is for, in one sentence.
        default: its default.
        fields: the plain values that make it up; the first one has the name of the option.
        refused_by: functions that do not take it.
        agreed: whether processes that train together must all be given the same.
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
    "the most bytes of a step, as 60GiB, 50% of the peak, or min; for reserved bytes, "
    "'60GiB reserved'",
    flag=False,
)
"""The plain value of the budget, which is no keyword-only argument."""

OPTIONS: tuple[Option, ...] = (
    Option(
        "reserve",
        "bytes, as an int or as text",
        "Bytes of the budget that the plan leaves free.",
        0,
        (Field("reserve", str, "bytes of the budget that stay free", "0"),),
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
        "The loss of the step, and what it compares the outputs with.",
        None,
        (
            Field("loss", str | None, "own: the model returns its loss"),
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
        (Field("accumulate", bool, "gradients are accumulated", False),),
        agreed=True,
    ),
    Option(
        "offload",
        '`False`, `"auto"`, `"only"`, `"conv"`, or a `HostMemory`',
        "Whether activations may travel to host memory, and how much of it they may take.",
        False,
        (
            Field(
                "offload",
                str | None,
                "activations may travel to host memory",
                choices=("auto", "only", "conv"),
            ),
            Field("host_limit", str | None, "the most bytes of host memory", part="limit"),
            Field(
                "host_dir",
                str | None,
                "folder of the file that stands for host memory on a CPU",
                part="folder",
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
                "gradients are those without a plan: bitwise, or to rounding",
                "exact",
                choices=("exact", "rounding"),
            ),
            Field(
                "verify_bits",
                int,
                "compare one run in parts with the whole in every so many steps",
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
        "How much work planning does, and what it looks at.",
        1.0,
        (
            Field("effort", float, "how much work planning does", 1.0),
            Field(
                "generators",
                str | None,
                "solvers whose schedules are looked at, as rotor,join",
                part="generators",
                separated=True,
            ),
            Field(
                "forms",
                str | None,
                "further forms of the step that are looked at, as parts,norms",
                part="forms",
                separated=True,
            ),
        ),
        agreed=True,
    ),
    Option(
        "executor",
        '`"eager"` or `"inductor"`',
        "Who makes the kernels of the step.",
        "eager",
        (
            Field(
                "executor",
                str,
                "who makes the kernels",
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
        (Field("dynamic", bool | None, "sizes are captured as symbols", flag=False),),
        refused_by=("max_batch", "estimate", BACKEND),
    ),
    Option(
        "plan",
        "a `Plan`, or the file of one",
        "A plan to follow: nothing is measured or planned.",
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
                "auto: as the graph breaks; one: whole; or names of modules",
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
        (Field("in_flight", int, "forwards that may wait for their backward", 1),),
        refused_by=("max_batch", "estimate"),
        agreed=True,
    ),
    Option(
        "strict",
        "`True` or `False`",
        "Whether a later step that does not fit raises an error, or runs with a warning.",
        False,
        (
            Field(
                "strict", bool, "a later step that does not fit raises an error", False, flag=False
            ),
        ),
        agreed=True,
    ),
    Option(
        "assume",
        '`"usual"` or `"strict"`',
        "What least budgets have room for: steps of the usual loop, or one step.",
        "usual",
        (
            Field(
                "assume",
                str,
                "least budgets are those of the usual loop, or of one step",
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
        "Says of single operations whether their results are kept, recomputed or offloaded.",
        None,
        (),
        agreed=True,
    ),
)
"""All keyword-only arguments of :func:`fxremat.compile`, in their order."""

RENAMED: Mapping[str, str] = {
    "target": "loss=fxremat.Loss(function, target=...)",
    "drop_unused": "loss=fxremat.Loss(function or 'own', drop_unused=True)",
    "host_limit": "offload=fxremat.HostMemory('auto', limit='8 GiB')",
    "host_dir": "offload=fxremat.HostMemory('auto', folder='/fast/disk')",
    "exact": "bits= and effort=: bits='rounding' for exact=False, with "
    "effort=fxremat.Effort(forms=('norms',)) where nothing is to be computed in parts",
    "split": "bits= and effort=: bits='rounding' for split=True, "
    "effort=fxremat.Effort(forms=('norms',)) for split=False",
    "verify_bits": "bits=fxremat.Bits('exact', verify_every=100)",
    "fullgraph": "regions=: regions='one' for fullgraph=True, 'auto' for False",
    "budget_on": "said by the budget: budget='22 GiB reserved' for budget_on='reserved'",
    "generators": "effort=fxremat.Effort(generators=('rotor', 'join'))",
}
"""Former names of arguments, and what is written now."""


def refuse_former(given: Mapping[str, Any]) -> None:
    """Refuse arguments under their former names.

    Raises:
        ArgumentError: one is given; the message has the new form.
    """
    for name, now in RENAMED.items():
        if name in given:
            raise ArgumentError(f"{name}= is now {now}", argument=name, value=given[name])


def refuse_unknown(given: Mapping[str, Any], names: Collection[str], *, knows: str) -> None:
    """Refuse options that are not among ``names``, which is what ``knows`` introduces.

    Raises:
        ArgumentError: one is given; the message has its new form, or all ``names``.
    """
    for name, value in given.items():
        if name not in names:
            refuse_former({name: value})
            message = f"unknown option {name!r}: {knows} {', '.join(names)}"
            raise ArgumentError(message, argument=str(name), value=value)


def former_refused(function: Callable[P, T]) -> Callable[P, T]:
    """Return ``function`` with former names of arguments refused as :func:`refuse_former` does."""

    @functools.wraps(function)
    def called(*args: P.args, **kwargs: P.kwargs) -> T:
        refuse_former(kwargs)
        return function(*args, **kwargs)

    return called


def options_of(function: str) -> Iterator[Option]:
    """Yield the options that ``function`` takes."""
    return (option for option in OPTIONS if option.taken_by(function))


def fields_of(function: str) -> Iterator[Field]:
    """Yield the plain values, without the budget, that ``function`` takes."""
    for option in options_of(function):
        yield from (field for field in option.fields if function not in field.refused_by)


def names_of(function: str) -> tuple[str, ...]:
    """Return the names under which ``function`` takes plain values, and options that have none."""
    names = ["budget"]
    for option in options_of(function):
        fields = (field.name for field in option.fields if function not in field.refused_by)
        names += tuple(fields) or (option.name,)
    return tuple(names)
