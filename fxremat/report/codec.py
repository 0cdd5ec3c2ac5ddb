"""Frozen data as JSON and back, by its annotations, and files of it.

Numbers come back as they were, to the last bit. Nothing that is read can run; a file is written
whole or not at all.
"""

from __future__ import annotations

import contextlib
import functools
import gzip
import io
import json
import operator
import os
import secrets
import types
import typing
import zlib
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from enum import Enum
from pathlib import Path
from typing import Any, Literal, TypeVar, Union

from fxremat.errors import PlanError

T = TypeVar("T")

OMITTED = "omitted"
"""Metadata of a field that is not written where it has its default, and may be missing."""

TAG = "is"
"""Where a value may be of several classes: the name of its class."""

VERSION = 6
"""The version of all that is written, raised when the form of any part changes."""

LARGEST = 2**53
"""No number is larger: compiled loops add bytes up in 64 bits."""

MOST_TIMES, MOST_MORE = 50, 1 << 20
"""So many times its size, and so many bytes more, may a packed file have unpacked; a plan has some
5 to 20 times."""

_GZIP = b"\x1f\x8b"
_LEVEL = 1
"""Of gzip: files are a fifth of their size, higher levels are five times as slow."""

PARTIAL = ".part"
"""How names of files end that are being written."""


class Checked:
    """Base of classes whose objects :func:`decode` also checks for consistent values."""

    __slots__ = ()

    def check_read(self) -> None:
        """Raise ``ValueError`` if values of this decoded object are inconsistent.

        Raises:
            ValueError: the object cannot have been encoded; the message says where.
        """
        raise NotImplementedError


class FormatError(ValueError):
    """The error that decoded data has another form than expected; the message says where."""


def encode(kind: Callable[..., T], value: T) -> Any:
    """Return ``value``, of type ``kind``, as dicts, lists and values that ``json`` can write."""
    return _write(kind, value)


def decode(kind: Callable[..., T], data: object) -> T:
    """Return the value of type ``kind`` that :func:`encode` has encoded as ``data``.

    Raises:
        FormatError: ``data`` is of another form.
    """
    found: T = _read(kind, data)
    return found


def _write(kind: Any, value: Any) -> Any:
    form, parts = _form(kind)
    if form is object:
        usual = _omitted(kind)
        return {
            name: _write(own, getattr(value, name))
            for name, own in parts
            if name not in usual or getattr(value, name) != usual[name]
        }
    if form is list:
        return [_write(parts[0], item) for item in value]
    if form is tuple:
        return [_write(own, item) for own, item in zip(parts, value, strict=True)]
    if form is Union:
        if value is None:
            return None
        if len(parts) == 1:
            (alone,) = parts.values()
            return _write(alone, value)
        return {TAG: type(value).__name__, **_write(type(value), value)}
    if form is Enum:
        return value.value
    if form is str:
        return value
    return operator.index(value) if form is int else form(value)  # these may be numpy's


def _read(kind: Any, data: Any) -> Any:
    form, parts = _form(kind)
    if form is object:
        _exactly(dict, data)
        usual = _omitted(kind)
        odd = sorted((data.keys() ^ dict(parts).keys()) - (usual.keys() - data.keys()))
        if odd:
            names = [name for name, _ in parts]
            raise FormatError(f": {kind.__name__} has {names}, {odd} differs")
        found = {name: _inside(f".{name}", own, data[name]) for name, own in parts if name in data}
        made = _checked(lambda: kind(**found))
        if isinstance(made, Checked):
            try:
                made.check_read()
            except ValueError as error:
                raise FormatError(f".{error}") from error
        return made
    if form in (list, tuple):
        _exactly(list, data)
        kinds = parts * len(data) if form is list else parts
        if len(data) != len(kinds):
            raise FormatError(f": expected {len(kinds)} items, found {len(data)}")
        pairs = enumerate(zip(kinds, data, strict=True))
        return tuple(_inside(f"[{i}]", own, item) for i, (own, item) in pairs)
    if form is Union:
        return _read_union(kind, parts, data)
    if form is Enum:
        return _checked(lambda: kind(data))
    if parts and (type(data) is not str or data not in parts):
        raise FormatError(f": expected one of {parts}")
    if form is str:
        return _harmless(_exactly(str, data))
    if form in (int, float) and type(data) in (int, float) and not abs(data) <= LARGEST:
        raise FormatError(f": a number beyond {LARGEST}")
    return float(data) if form is float and type(data) is int else _exactly(form, data)


_CONTROLS = {
    code: f"\\x{code:02x}" for code in (*range(32), *range(127, 160)) if chr(code) not in "\n\t"
} | {code: f"\\u{code:04x}" for code in (*range(0x202A, 0x202F), *range(0x2066, 0x206A))}
"""What a terminal obeys in place of showing it, and how it is written."""


def _harmless(text: str) -> str:
    return text.translate(_CONTROLS)


def _read_union(kind: Any, classes: dict[str, Any], data: Any) -> Any:
    if data is None and type(None) in typing.get_args(kind):
        return None
    if len(classes) == 1:
        (alone,) = classes.values()
        return _read(alone, data)
    name = _exactly(dict, data).get(TAG)
    if not isinstance(name, str) or name not in classes:
        raise FormatError(f".{TAG}: expected one of {sorted(classes)}")
    return _read(classes[name], {key: value for key, value in data.items() if key != TAG})


@functools.cache
def _form(kind: Any) -> tuple[Any, Any]:
    """Return the form in which values of a type are written, and the types of their parts.

    The form is ``object``, with names and types of fields; ``list`` or ``tuple``, with one type for
    all items or one for each; ``Union``, with classes by their names; ``Enum``; or a type of JSON,
    with the values that a ``Literal`` lists.
    """
    if is_dataclass(kind):
        hints = typing.get_type_hints(kind)
        return object, tuple(
            (field.name, hints[field.name]) for field in fields(kind) if field.init
        )
    if isinstance(kind, type) and issubclass(kind, Enum):
        return Enum, ()
    origin, parts = typing.get_origin(kind), typing.get_args(kind)
    if origin in (types.UnionType, Union):
        return Union, {getattr(own, "__name__", ""): own for own in parts if own is not type(None)}
    if origin is tuple:
        return (list, parts[:1]) if parts[1:] == (...,) else (tuple, parts)
    if origin is Literal:
        return str, parts
    if kind in (int, float, str, bool):
        return kind, ()
    raise TypeError(f"{kind} has no form in JSON")


@functools.cache
def _omitted(kind: Any) -> dict[str, Any]:
    """Return the defaults of the fields of a dataclass that are written only if they differ."""
    return {field.name: field.default for field in fields(kind) if field.metadata.get(OMITTED)}


def _checked(make: Callable[[], Any]) -> Any:
    """Return the result of ``make``; a ``TypeError`` or ``ValueError`` becomes ``FormatError``."""
    try:
        return make()
    except (TypeError, ValueError) as error:
        raise FormatError(f": {error}") from error


def _exactly(kind: type, data: Any) -> Any:
    if type(data) is not kind:
        raise FormatError(f": expected {kind.__name__}, found {type(data).__name__}")
    return data


def _inside(place: str, kind: Any, data: object) -> Any:
    try:
        return _read(kind, data)
    except FormatError as error:
        raise FormatError(f"{place}{error}") from error


def pack(kind: str, contents: dict[str, Any], *, packed: bool) -> bytes:
    """Return the bytes of a file with ``contents``; equal contents have equal bytes.

    Args:
        kind: the name of the kind of file, such as ``"plan"``, which its head contains.
        contents: values that ``json`` can write.
        packed: whether to compress the file with gzip.
    """
    head = {"format": f"fxremat {kind}", "version": VERSION}
    text = json.dumps({**head, **contents}, allow_nan=False, separators=(",", ":"))
    data = text.encode()
    return gzip.compress(data, _LEVEL, mtime=0) if packed else data


def unpack(kind: str, data: bytes) -> dict[str, Any]:
    """Return the contents of a file that :func:`pack` has written.

    Args:
        kind: the name of the kind of file that is expected.
        data: the bytes of the file.

    Raises:
        FormatError: the file is of another kind or version, or is damaged.
    """
    try:
        text = _unzipped(data) if data.startswith(_GZIP) else data
        found = json.loads(text, parse_constant=_refuse_constant)
    except FormatError:
        raise
    except (OSError, EOFError, zlib.error) as error:
        raise FormatError(f"the file is damaged: {error}") from error
    except (ValueError, RecursionError) as error:
        raise FormatError(f"the file is not valid JSON: {error}") from error
    if not isinstance(found, dict) or found.pop("format", None) != f"fxremat {kind}":
        raise FormatError(f"the file is not a {kind} of fxremat")
    version = found.pop("version", None)
    if version != VERSION:
        raise FormatError(
            f"the file has format {version!r:.20}, but this version of fxremat reads {VERSION}"
        )
    return found


def _unzipped(data: bytes) -> bytes:
    """Return the decompressed bytes of a gzip file.

    Raises:
        FormatError: they are more than any plan has.
        OSError, EOFError, zlib.error: the file is damaged.
    """
    most = MOST_TIMES * len(data) + MOST_MORE
    with gzip.GzipFile(fileobj=io.BytesIO(data)) as file:
        text = file.read(most + 1)
    if len(text) > most:
        raise FormatError(f"{len(data)} bytes unpack to more than {most}, more than any plan has")
    return text


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no number of JSON")


def write_whole(path: Path, data: bytes) -> None:
    """Write a file atomically: readers find the former file or the whole new one.

    Raises:
        OSError: the file cannot be written; a former file is unchanged.
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
    """Write the file that a user has requested, atomically.

    Args:
        what: the name of the kind of file, for the error.
        path: the path of the file. An existing file is replaced.
        make: returns the contents.

    Raises:
        PlanError: the file cannot be written.
    """
    file = path_of(path)
    try:
        write_whole(file, make())
    except (OSError, ValueError) as error:  # ValueError: a number that JSON does not have
        why = getattr(error, "strerror", None) or error
        raise PlanError(
            f"the {what} cannot be written to {file}: {why}. Pass the path of a file in an "
            "existing folder that this user can write to",
            code="FXR604",
        ) from error


def path_of(path: str | os.PathLike[str]) -> Path:
    """Return the path that a user has given as a ``Path``.

    Raises:
        PlanError: ``path`` is not a path.
    """
    try:
        return Path(os.fsdecode(path))
    except TypeError as error:
        raise PlanError(
            f"the path of a plan must be a str or a pathlib.Path, but got {path!r}", code="FXR603"
        ) from error
