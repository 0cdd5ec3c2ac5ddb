"""Options as plain values, for configuration files and command lines."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import MISSING, field, fields, make_dataclass
from typing import Any

from fxremat.effort import Effort
from fxremat.errors import ArgumentError, refuse
from fxremat.options.loss import Loss
from fxremat.options.table import BUDGET, OPTIONS, Field, Option, refuse_unknown
from fxremat.options.values import Bits, HostMemory

CLASSES: Mapping[str, Callable[..., Any]] = {
    "loss": Loss,
    "offload": HostMemory,
    "bits": Bits,
    "effort": Effort,
}
"""For each option of several plain values, the class that they construct."""


def gathered(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return arguments of :func:`fxremat.compile` made from plain values.

    Args:
        given: values by the names of plain values (``Field``). An option may also have a value
            that ``compile`` accepts.

    Raises:
        ArgumentError: a value requires another one that is missing, or cannot be read.
    """
    arguments = dict(given)
    for option in OPTIONS:
        own = {
            each.name: arguments.pop(each.name) for each in option.fields if each.name in arguments
        }
        if own:
            arguments[option.name] = _value(option, own)
    return arguments


def _value(option: Option, own: dict[str, Any]) -> Any:
    """Return the argument that ``compile`` takes for an option.

    Args:
        option: the option.
        own: the given plain values of the option, by name.

    Raises:
        ArgumentError: a value requires another one that is missing, or cannot be read.
    """
    value, parts = option.default, {}
    for each in option.fields:
        if each.name in own and not each.part:
            value = _names(each, own[each.name])
        elif own.get(each.name) is not None:
            parts[each.part] = _names(each, own[each.name])
    if option.name == "offload" and value is None:
        value = False
    if not parts:
        return value
    made = CLASSES[option.name]
    if isinstance(made, type) and isinstance(value, made):
        name = f"fxremat.{made.__name__}"
        raise ArgumentError(
            f"{option.name} is a {name}, which sets {', '.join(parts)} itself: set it there",
            argument=option.name,
            value=value,
            code="FXR407",
        )
    if value is None or value is False:
        part, one = next(iter(parts.items()))
        if not any(parts.values()):
            return value
        refuse(part, one, f"omitted unless {option.name}= is given as well")
    return made(value, **parts)


def _names(each: Field, value: Any) -> Any:
    """Return text of names separated by commas as a tuple, if the field takes such names.

    Return any other value unchanged.
    """
    if not (each.separated and isinstance(value, str)) or value in each.choices:
        return value
    return tuple(name.strip() for name in value.split(",") if name.strip())


def _plain_fields() -> Iterator[tuple[str, Any, Any]]:
    yield BUDGET.name, BUDGET.kind, field()
    for option in OPTIONS:
        for each in option.fields:
            yield each.name, each.kind, field(default=each.default)


_Plain: Any = make_dataclass("_Plain", list(_plain_fields()))  # not frozen: Hydra sets fields


class Options(_Plain):  # type: ignore[misc]
    """Arguments of :func:`fxremat.compile` as plain values: numbers, flags and text.

    OmegaConf and Hydra make a structured config from this class, and ``HfArgumentParser`` makes
    command line arguments. Values are only checked when :meth:`arguments` are used. The reference
    lists all attributes. These have special values:

    Attributes:
        budget: ``"6 GiB"``, ``"6GB"`` (decimal), ``"50%"`` of the peak with everything kept, or
            ``"min"``; each may end in ``" reserved"``.
        optimizer: name of a class of ``torch.optim``. ``"none"`` counts no state before it exists,
            not even that of a trainer's optimizer.
        loss: ``"own"`` if the model returns its loss.
        offload: ``"auto"``, ``"only"``, ``"conv"``, or ``None`` to move nothing.
        regions: ``"auto"``, ``"one"``, or names of modules separated by commas.
        plan: path of the file of a plan to follow.
    """

    @staticmethod
    def from_dict(values: Mapping[str, Any]) -> Options:
        """Return the options in a section of a configuration file.

        Args:
            values: values by the names of the attributes. Missing ones have their defaults.

        Raises:
            ArgumentError: a name is not an attribute, or ``budget`` is missing.
        """
        names = [each.name for each in fields(Options)]
        refuse_unknown(values, names, knows="valid names are")
        if "budget" not in values:
            raise ArgumentError(
                "there is no budget: set one, such as budget: 6 GiB", argument="budget", value=None
            )
        return Options(**values)

    def arguments(self) -> dict[str, Any]:
        """Return the values that differ from the defaults, as arguments of :func:`fxremat.compile`.

        Raises:
            ArgumentError: several values make up an argument that cannot be read.
        """
        changed = {
            each.name: getattr(self, each.name)
            for each in fields(self)
            if each.default is MISSING or getattr(self, each.name) != each.default
        }
        none = changed.get("optimizer") == "none"
        return gathered(changed) | ({"optimizer": None} if none else {})
