"""Files of JSON: each is written whole or not at all, and read without trust."""

from __future__ import annotations

import contextlib
import gzip
import json
import os
import secrets
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fxremat.errors import PlanError
from fxremat.report.codec import FormatError

VERSION = 1
"""Of all that is written. Raised when the form of any of it changes."""

_GZIP = b"\x1f\x8b"
_LEVEL = 1
"""Of gzip: files are a fifth of their size, higher levels are five times as slow."""


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


PARTIAL = ".part"
"""How names of files end that are being written."""
