"""The cache folder: costs and plans that other processes have found."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from fxremat.report.codec import FormatError, decode, encode
from fxremat.report.files import PARTIAL, pack, unpack, write_whole

LOG = logging.getLogger("fxremat")

VARIABLE = "FXREMAT_CACHE"
"""Environment variable: the folder, or 0 for none."""

MOST_BYTES = 256 << 20
"""Bytes of the folder: what was used longest ago goes first."""

LEFT_SHARE = 0.75
"""Share of these bytes that is left once something had to go."""

ABANDONED_S = 3600
"""A file that is being written for longer than that never will be."""

_PREFIX, _SUFFIX = "fxremat-", ".json.gz"

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Store:
    """Entries of a folder by kind and key; nothing that goes wrong with them is an error.

    An entry is a file of JSON. It is written whole or not at all, so that any number of
    processes may share the folder. One that cannot be read is ignored, and written anew.

    Attributes:
        folder: where they are; ``None``: nothing is found and nothing kept.
    """

    folder: Path | None

    @staticmethod
    def of_environment() -> Store:
        """``$FXREMAT_CACHE``, else ``fxremat`` in the user's cache folder."""
        wish = os.environ.get(VARIABLE)
        if wish == "0":
            return Store(None)
        if wish:
            return Store(Path(wish).absolute())
        home = os.environ.get("XDG_CACHE_HOME", "")
        if Path(home).is_absolute():  # any other is to be ignored
            return Store(Path(home) / "fxremat")
        try:
            return Store(Path.home() / ".cache" / "fxremat")
        except RuntimeError:  # a user without a home
            return Store(None)

    def get(self, name: str, key: str, kind: Callable[..., T]) -> T | None:
        """The entry of type ``kind`` that was kept as ``name`` under ``key``, if there is one."""
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
                raise FormatError("it is of another key")
            found = decode(kind, contents.get("value"))
        except FormatError as error:
            LOG.warning("%s is ignored, and will be written anew: %s", file, error)
            return None
        with contextlib.suppress(OSError):
            os.utime(file)  # it was used
        return found

    def put(self, name: str, key: str, kind: Callable[..., T], value: T) -> None:
        """Keep ``value``, in place of what is there."""
        if self.folder is None:
            return
        try:
            data = pack(name, {"key": key, "value": encode(kind, value)}, packed=True)
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            write_whole(self._file(name, key), data)
            self._make_room()
        except (OSError, ValueError) as error:  # ValueError: a number that JSON does not have
            _warn_once(f"nothing is kept in the cache folder {self.folder} ({error})")

    def _file(self, name: str, key: str) -> Path:
        assert self.folder is not None
        return self.folder / f"{_PREFIX}{name}-{key}{_SUFFIX}"

    def _make_room(self) -> None:
        """Delete what was used longest ago, and what was never finished."""
        assert self.folder is not None
        found: list[tuple[float, int, Path]] = []
        for entry in os.scandir(self.folder):
            if not entry.name.startswith((_PREFIX, f".{_PREFIX}")):
                continue  # nothing of ours
            with contextlib.suppress(FileNotFoundError):  # another process was faster
                seen = entry.stat(follow_symlinks=False)
                if not entry.name.endswith(PARTIAL):
                    found.append((seen.st_mtime, seen.st_size, Path(entry.path)))
                elif time.time() - seen.st_mtime > ABANDONED_S:
                    Path(entry.path).unlink()
        total = sum(size for _, size, _ in found)
        if total <= MOST_BYTES:
            return
        for _, size, path in sorted(found):
            path.unlink(missing_ok=True)
            total -= size
            if total <= LEFT_SHARE * MOST_BYTES:
                break


@functools.cache
def _warn_once(message: str) -> None:
    LOG.warning("%s: set %s to a folder of your own, or to 0", message, VARIABLE)
