"""Files of JSON: whole or not there, and never trusted."""

from __future__ import annotations

import gzip
import os
import pickle
from pathlib import Path

import pytest

from fxremat.report.codec import FormatError, pack, unpack, write_whole


@pytest.mark.parametrize("packed", [False, True])
def test_contents_come_back_and_equal_ones_are_equal_bytes(packed: bool):
    contents = {"a": [1, 0.1, "é"], "b": {"c": None}}
    data = pack("thing", contents, packed=packed)
    assert unpack("thing", data) == contents
    assert data == pack("thing", dict(contents), packed=packed)


GOOD = pack("thing", {"a": list(range(1000))}, packed=True)
BAD = {
    "nothing": b"",
    "text": b"hello",
    "binary": bytes(range(256)),
    "truncated": GOOD[: len(GOOD) // 2],
    "a bit flipped": GOOD[:100] + bytes([GOOD[100] ^ 1]) + GOOD[101:],
    "truncated text": pack("thing", {"a": 1}, packed=False)[:-1],
    "not ours": b'{"a": 1}',
    "a list": b"[1]",
    "another kind": pack("other", {"a": 1}, packed=False),
    "another format": pack("thing", {}, packed=False).replace(b":1", b":99"),
    "a constant": b'{"format":"fxremat thing","version":1,"a":NaN}',
    "too deep": b"[" * 200_000,
    "packed text": gzip.compress(b"hello"),
    "a pickle": pickle.dumps({"a": 1}),
}


@pytest.mark.parametrize("data", BAD.values(), ids=BAD.keys())
def test_anything_else_is_refused(data: bytes):
    with pytest.raises(FormatError):
        unpack("thing", data)


def test_a_file_is_replaced_whole(tmp_path: Path):
    file = tmp_path / "file"
    for data in (b"one", b"two" * 1000):
        write_whole(file, data)
        assert file.read_bytes() == data
    assert list(tmp_path.iterdir()) == [file]


@pytest.mark.parametrize("umask", [0o022, 0o027, 0o077], ids=oct)
def test_a_file_has_the_mode_that_new_files_have(tmp_path: Path, umask: int):
    before = os.umask(umask)
    try:
        write_whole(tmp_path / "file", b"one")
        (tmp_path / "plain").write_bytes(b"one")
    finally:
        os.umask(before)
    modes = {file.name: file.stat().st_mode for file in tmp_path.iterdir()}
    assert modes["file"] == modes["plain"]


@pytest.mark.parametrize("error", [OSError("no space left"), KeyboardInterrupt()])
def test_what_was_there_stays_where_writing_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException
):
    file = tmp_path / "file"
    write_whole(file, b"before")

    def replace(*_args: object) -> None:
        raise error

    monkeypatch.setattr(os, "replace", replace)
    with pytest.raises(type(error)):
        write_whole(file, b"after")
    assert file.read_bytes() == b"before"
    assert list(tmp_path.iterdir()) == [file], "a half file is left"
