"""Frozen data as JSON and back, by its annotations: nothing that is read can run.

Numbers come back as they were, to the last bit.
"""

from __future__ import annotations

import functools
import operator
import types
import typing
from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass
from enum import Enum
from typing import Any, TypeVar

T = TypeVar("T")

TAG = "is"
"""Where a value may be of several classes: the name of its own."""


class FormatError(ValueError):
    """Data is not what its reader expects; the message says where."""


def encode(kind: Callable[..., T], value: T) -> Any:
    """``value``, of type ``kind``, as what ``json`` can write."""
    return _coder(kind).write(value)


def decode(kind: Callable[..., T], data: object) -> T:
    """The value of type ``kind`` that :func:`encode` made ``data`` of.

    Raises:
        FormatError: ``data`` is of another form.
    """
    found: T = _coder(kind).read(data)
    return found


@dataclass(frozen=True, slots=True)
class _Coder:
    """How values of a type are written and read."""

    write: Callable[[Any], Any]
    read: Callable[[Any], Any]


@functools.cache
def _coder(kind: Any) -> _Coder:
    if is_dataclass(kind):
        return _of_dataclass(kind)
    if isinstance(kind, type) and issubclass(kind, Enum):
        return _Coder(lambda value: value.value, lambda data: _checked(lambda: kind(data)))
    origin, parameters = typing.get_origin(kind), typing.get_args(kind)
    if origin in (types.UnionType, typing.Union):
        return _of_union(parameters)
    if origin is tuple:
        return _of_tuple(parameters)
    if origin is typing.Literal:
        return _Coder(_same, lambda data: _one_of(parameters, data))
    if kind is float:
        return _Coder(float, _float)
    if kind in (int, str, bool):
        # Integers and truth values may be numpy's.
        write = {int: operator.index, str: _same, bool: bool}[kind]
        return _Coder(write, lambda data: _exactly(kind, data))
    raise TypeError(f"{kind} has no form in JSON")


def _same(value: Any) -> Any:
    return value


def _checked(make: Callable[[], Any]) -> Any:
    """What ``make`` returns; values that it refuses are no valid data."""
    try:
        return make()
    except (TypeError, ValueError) as error:
        raise FormatError(f": {error}") from error


def _exactly(kind: type, data: object) -> Any:
    if type(data) is not kind:
        raise FormatError(f": expected {kind.__name__}, found {type(data).__name__}")
    return data


def _float(data: object) -> float:
    if type(data) not in (float, int):
        raise FormatError(f": expected float, found {type(data).__name__}")
    return float(data)  # type: ignore[arg-type]


def _one_of(values: tuple[Any, ...], data: object) -> Any:
    if type(data) is not str or data not in values:
        raise FormatError(f": expected one of {values}")
    return data


def _of_dataclass(kind: Any) -> _Coder:
    hints = typing.get_type_hints(kind)
    names = [field.name for field in fields(kind) if field.init]
    coders = [(name, _coder(hints[name])) for name in names]

    def write(value: Any) -> dict[str, Any]:
        return {name: coder.write(getattr(value, name)) for name, coder in coders}

    def read(data: Any) -> Any:
        _exactly(dict, data)
        if data.keys() != set(names):
            odd = sorted(data.keys() ^ set(names))
            raise FormatError(f": {kind.__name__} has {names}, {odd} differs")
        found = {name: _inside(f".{name}", coder, data[name]) for name, coder in coders}
        return _checked(lambda: kind(**found))

    return _Coder(write, read)


def _of_union(kinds: tuple[Any, ...]) -> _Coder:
    """Classes by their names; ``None`` and one other by whether it is ``None``."""
    rest = [kind for kind in kinds if kind is not type(None)]
    optional = len(rest) < len(kinds)
    if len(rest) == 1:
        (alone,) = map(_coder, rest)
        return _Coder(
            lambda value: None if value is None else alone.write(value),
            lambda data: None if data is None else alone.read(data),
        )
    coders = {kind.__name__: _coder(kind) for kind in rest}

    def write(value: Any) -> Any:
        if optional and value is None:
            return None
        name = type(value).__name__
        return {TAG: name, **coders[name].write(value)}

    def read(data: Any) -> Any:
        if optional and data is None:
            return None
        _exactly(dict, data)
        name = data.get(TAG)
        if not isinstance(name, str) or name not in coders:
            raise FormatError(f".{TAG}: expected one of {sorted(coders)}")
        return coders[name].read({key: value for key, value in data.items() if key != TAG})

    return _Coder(write, read)


def _of_tuple(kinds: tuple[Any, ...]) -> _Coder:
    if len(kinds) == 2 and kinds[1] is ...:
        each = _coder(kinds[0])
        return _Coder(
            lambda value: list(map(each.write, value)),
            lambda data: tuple(
                _inside(f"[{i}]", each, item) for i, item in enumerate(_exactly(list, data))
            ),
        )
    coders = tuple(map(_coder, kinds))

    def read(data: Any) -> Any:
        if len(_exactly(list, data)) != len(coders):
            raise FormatError(f": expected {len(coders)} items, found {len(data)}")
        pairs = zip(coders, data, strict=True)
        return tuple(_inside(f"[{i}]", coder, item) for i, (coder, item) in enumerate(pairs))

    return _Coder(
        lambda value: [c.write(item) for c, item in zip(coders, value, strict=True)], read
    )


def _inside(place: str, coder: _Coder, data: object) -> Any:
    try:
        return coder.read(data)
    except FormatError as error:
        raise FormatError(f"{place}{error}") from error
