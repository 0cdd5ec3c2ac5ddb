"""Frozen data as JSON and back, by its annotations, and files of it.

Numbers come back as they were, to the last bit. Nothing that is read can run; a file is written
whole or not at all.
"""

from __future__ import annotations

import contextlib
import functools
import gzip
import json
import operator
import os
import secrets
import types
import typing
import zlib
from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass
from enum import Enum
from pathlib import Path
from typing import Any, TypeVar

from fxremat.errors import PlanError

T = TypeVar("T")

TAG = "is"
"""Where a value may be of several classes: the name of its own."""

VERSION = 1
"""Of all that is written. Raised when the form of any of it changes."""

_GZIP = b"\x1f\x8b"
_LEVEL = 1
"""Of gzip: files are a fifth of their size, higher levels are five times as slow."""

PARTIAL = ".part"
"""How names of files end that are being written."""


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


def pack(kind: str, contents: dict[str, Any], *, packed: bool) -> bytes:
    """``contents`` under the name of their kind, the same bytes for the same contents."""
    head = {"format": f"fxremat {kind}", "version": VERSION}
    text = json.dumps({**head, **contents}, allow_nan=False, separators=(",", ":"))
    data = text.encode()
    return gzip.compress(data, _LEVEL, mtime=0) if packed else data


def unpack(kind: str, data: bytes) -> dict[str, Any]:
    """What :func:`pack` was given.

    Raises:
        FormatError: it was not given that, or the data is damaged.
    """
    try:
        text = gzip.decompress(data) if data.startswith(_GZIP) else data
        found = json.loads(text, parse_constant=_refuse_constant)
    except (OSError, EOFError, zlib.error) as error:
        raise FormatError(f"it is damaged: {error}") from error
    except (ValueError, RecursionError) as error:
        raise FormatError(f"it is no JSON: {error}") from error
    if not isinstance(found, dict) or found.pop("format", None) != f"fxremat {kind}":
        raise FormatError(f"it is no {kind} of fxremat")
    version = found.pop("version", None)
    if version != VERSION:
        raise FormatError(f"it is of format {version}, this fxremat reads format {VERSION}")
    return found


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no number of JSON")


def write_whole(path: Path, data: bytes) -> None:
    """Write a file that others find whole or not at all, whatever happens meanwhile.

    Raises:
        OSError: it cannot be written; what was there before still is.
    """
    part = path.with_name(f".{path.name}.{secrets.token_hex(8)}{PARTIAL}")  # nobody else's
    try:
        with part.open("xb") as file:  # of the mode that any new file of this user has
            file.write(data)
        part.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            part.unlink()
        raise


def write_made(what: str, path: str | os.PathLike[str], make: Callable[[], bytes]) -> None:
    """Write a file that a user has asked for, whole.

    Args:
        what: it is, for the error.
        path: of the file; one that is there is replaced.
        make: gives its contents.

    Raises:
        PlanError: it cannot be written.
    """
    file = path_of(path)
    try:
        write_whole(file, make())
    except (OSError, ValueError) as error:  # ValueError: a number that JSON does not have
        raise PlanError(
            f"the {what} cannot be written to {file}: {error}. Give the path of a file in a "
            "folder that exists and that this user can write to"
        ) from error


def path_of(path: str | os.PathLike[str]) -> Path:
    """What a user has given as a path.

    Raises:
        PlanError: it is none.
    """
    try:
        return Path(os.fsdecode(path))
    except TypeError as error:
        raise PlanError(f"the path of a plan is {path!r}: give text or a pathlib.Path") from error
