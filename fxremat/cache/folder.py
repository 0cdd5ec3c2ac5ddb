"""The cache folder, which keeps measured costs and plans across processes."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from fxremat.progress import LOG
from fxremat.report.codec import PARTIAL, FormatError, decode, encode, pack, unpack, write_whole

VARIABLE = "FXREMAT_CACHE"
"""The environment variable that names the folder; ``0`` disables the cache."""

MOST_BYTES = 256 << 20
"""The most bytes that the folder holds; the least recently used entries are deleted first."""

LEFT_SHARE = 0.75
"""The share of ``MOST_BYTES`` that remains after a deletion."""

ABANDONED_S = 3600
"""Seconds after which a partially written file counts as abandoned."""

_PREFIX, _SUFFIX = "fxremat-", ".json.gz"

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Store:
    """The entries of a cache folder, by name and key. No method raises.

    An entry is a JSON file. It is written atomically, so that any number of processes can share
    the folder. An entry that cannot be read, or that was modified, is ignored and written again.

    Attributes:
        folder: the folder; ``None`` disables the cache.
    """

    folder: Path | None

    @staticmethod
    def of_environment() -> Store:
        """Return the store in ``$FXREMAT_CACHE``, or in ``fxremat`` in the user's cache folder."""
        wanted = os.environ.get(VARIABLE)
        if wanted == "0":
            return Store(None)
        if wanted:
            return Store(Path(wanted).absolute())
        home = os.environ.get("XDG_CACHE_HOME", "")
        if Path(home).is_absolute():  # the XDG specification ignores relative paths
            return Store(Path(home) / "fxremat")
        try:
            return Store(Path.home() / ".cache" / "fxremat")
        except RuntimeError:  # the user has no home folder
            return Store(None)

    def get(self, name: str, key: str, kind: Callable[..., T]) -> T | None:
        """Return the value of the entry ``name`` with this ``key``, or ``None`` if none is valid.

        Args:
            name: the name of the kind of entry, which is part of the file's name.
            key: a digest of all that the value depends on.
            kind: the type of the value.
        """
        if self.folder is None:
            return None
        file = self._file(name, key)
        try:
            data = file.read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:
            _warn_once(f"the cache folder {self.folder} cannot be read ({error})")
            return None
        try:
            contents = unpack(name, data)
            if contents.get("key") != key:
                raise FormatError("it has another key")
            value = contents.get("value")
            if contents.get("digest") != _digest(key, value):
                raise FormatError("it was modified")
            entry = decode(kind, value)
        except FormatError as error:
            LOG.warning("%s is ignored, and will be written again: %s", file, error)
            return None
        with contextlib.suppress(OSError):
            os.utime(file)  # marks it as recently used
        return entry

    def put(self, name: str, key: str, kind: Callable[..., T], value: T) -> None:
        """Write ``value`` as the entry ``name`` with this ``key``; see :meth:`get`."""
        if self.folder is None:
            return
        try:
            encoded = encode(kind, value)
            contents = {"key": key, "value": encoded, "digest": _digest(key, encoded)}
            data = pack(name, contents, packed=True)
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            write_whole(self._file(name, key), data)
            self._make_room()
        except (OSError, ValueError) as error:  # ValueError: JSON has no such number
            _warn_once(f"the cache folder {self.folder} cannot be written ({error})")

    def _file(self, name: str, key: str) -> Path:
        assert self.folder is not None
        return self.folder / f"{_PREFIX}{name}-{key}{_SUFFIX}"

    def _make_room(self) -> None:
        """Delete abandoned partial files and, above ``MOST_BYTES``, least recently used entries."""
        assert self.folder is not None
        entries: list[tuple[float, int, Path]] = []
        for entry in os.scandir(self.folder):
            if not entry.name.startswith((_PREFIX, f".{_PREFIX}")):
                continue  # not written by this package
            with contextlib.suppress(FileNotFoundError):  # another process deleted it
                status = entry.stat(follow_symlinks=False)
                if not entry.name.endswith(PARTIAL):
                    entries.append((status.st_mtime, status.st_size, Path(entry.path)))
                elif time.time() - status.st_mtime > ABANDONED_S:
                    Path(entry.path).unlink()
        total = sum(size for _, size, _ in entries)
        if total <= MOST_BYTES:
            return
        for _, size, path in sorted(entries):
            with contextlib.suppress(OSError):  # it is deleted already, or a folder
                path.unlink()
                total -= size
            if total <= LEFT_SHARE * MOST_BYTES:
                break


def _digest(key: str, value: object) -> str:
    """Return the checksum by which :meth:`Store.get` finds that an entry was modified."""
    return hashlib.sha256(json.dumps([key, value], allow_nan=False).encode()).hexdigest()


@functools.cache
def _warn_once(message: str) -> None:
    LOG.warning("%s: set %s to a writable folder, or to 0", message, VARIABLE)
