"""The cache folder: what is found in it is what was kept, and nothing there is an error."""

from __future__ import annotations

import gzip
import logging
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from fxremat.cache import folder as module
from fxremat.cache.folder import Store
from fxremat.ir import Storage

KEY = "k" * 64


def kept(store: Store, nbytes: int = 3, key: str = KEY) -> Storage:
    value = Storage(nbytes, "x")
    store.put("thing", key, Storage, value)
    return value


def found(store: Store, key: str = KEY) -> Storage | None:
    return store.get("thing", key, Storage)


def test_what_was_kept_is_found_by_its_kind_and_key(tmp_path: Path):
    store = Store(tmp_path / "new" / "folder")
    assert found(store) is None
    assert found(store) is None
    value = kept(store)
    assert found(store) == found(Store(store.folder)) == value
    assert found(store, "other") is None
    assert store.get("number", KEY, float) is None
    assert kept(store, 4) == found(store)


def test_without_a_folder_nothing_is_kept():
    store = Store(None)
    kept(store)
    assert found(store) is None


def test_the_folder_is_named_by_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def folder(**environment: str) -> Path | None:
        for name in ("FXREMAT_CACHE", "XDG_CACHE_HOME"):
            monkeypatch.delenv(name, raising=False)
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        return Store.of_environment().folder

    monkeypatch.setenv("HOME", str(tmp_path))
    assert folder(FXREMAT_CACHE="0") is None
    assert folder(FXREMAT_CACHE="/a/b") == Path("/a/b")
    assert folder(FXREMAT_CACHE="b", XDG_CACHE_HOME="/c") == Path.cwd() / "b"
    assert folder(FXREMAT_CACHE="", XDG_CACHE_HOME="/c") == Path("/c/fxremat")
    assert folder(XDG_CACHE_HOME="not/absolute") == tmp_path / ".cache" / "fxremat"
    assert folder() == tmp_path / ".cache" / "fxremat"


def entry(store: Store) -> Path:
    assert store.folder is not None
    (file,) = store.folder.iterdir()
    return file


DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "truncated": lambda data: data[:-9],
    "empty": lambda data: b"",
    "foreign": lambda data: b"PK\3\4",
    "a number": lambda data: gzip.compress(gzip.decompress(data).replace(b":3,", b":4,")),
    "a large number": lambda data: gzip.compress(
        gzip.decompress(data).replace(b":3,", b":%d," % 10**30)
    ),
    "no value": lambda data: gzip.compress(gzip.decompress(data).replace(b'"value"', b'"other"')),
    "a list": lambda data: gzip.compress(gzip.decompress(data).replace(b":3,", b":[],")),
    "spaces": lambda data: gzip.compress(b" " * (64 << 20)),
}


@pytest.mark.parametrize("damage", [*DAMAGES, "of another key", "a folder"])
def test_what_cannot_be_read_is_ignored_and_written_anew(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, damage: str
):
    store = Store(tmp_path / "cache")
    value = kept(store)
    file = entry(store)
    data = file.read_bytes()
    if damage == "of another key":
        kept(Store(tmp_path / "other"), key="other")
        entry(Store(tmp_path / "other")).replace(file)
    elif damage == "a folder":
        file.unlink()
        file.mkdir()
    else:
        file.write_bytes(DAMAGES[damage](data))
    with caplog.at_level(logging.WARNING, logger="fxremat"):
        assert found(store) is None
    assert caplog.records
    if damage != "a folder":
        kept(store)
        assert found(store) == value


def test_a_folder_that_cannot_be_used_is_said_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    """It is a file here: nobody can make an entry in it."""
    (tmp_path / "file").write_text("mine")
    store = Store(tmp_path / "file")
    with caplog.at_level(logging.WARNING, logger="fxremat"):
        for _ in range(3):
            assert found(store) is None
            kept(store)
    messages = [record.getMessage() for record in caplog.records]
    assert len(messages) == len(set(messages)) == 2  # of reading and of writing
    assert all(str(store.folder) in message for message in messages)
    assert (tmp_path / "file").read_text() == "mine"


def test_numbers_that_json_does_not_have_are_not_kept(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    store = Store(tmp_path)
    with caplog.at_level(logging.WARNING, logger="fxremat"):
        store.put("number", KEY, float, float("nan"))
    assert caplog.records
    assert store.get("number", KEY, float) is None


def test_what_was_used_longest_ago_goes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    store = Store(tmp_path)
    now = time.time()
    for age, key in enumerate("abcd"):
        kept(store, key=key)
        (file,) = tmp_path.glob(f"*-{key}.*")
        os.utime(file, (now - 100 + age, now - 100 + age))
    assert found(store, "a") is not None  # used just now
    size = file.stat().st_size
    (tmp_path / "notes.json.gz").write_bytes(bytes(10 * size))  # the user's
    (tmp_path / ".fxremat-thing.part").write_bytes(b"")
    os.utime(tmp_path / ".fxremat-thing.part", (now - 1e5, now - 1e5))
    monkeypatch.setattr(module, "MOST_BYTES", 4 * size)
    kept(store, key="e")
    assert [key for key in "abcde" if found(store, key) is None] == ["b", "c"]
    assert (tmp_path / "notes.json.gz").exists()
    assert not list(tmp_path.glob("*.part"))


def test_many_may_share_a_folder(tmp_path: Path):
    """Whoever reads finds what someone wrote, whole."""
    values = [Storage(n, "x" * 10_000) for n in range(4)]
    seen: list[Storage | None] = []

    def work(value: Storage) -> None:
        store = Store(tmp_path)
        for _ in range(25):
            store.put("thing", KEY, Storage, value)
            seen.append(store.get("thing", KEY, Storage))

    threads = [threading.Thread(target=work, args=(value,)) for value in values]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(seen) == 100
    assert set(seen) <= set(values)
    assert len(list(tmp_path.iterdir())) == 1
