"""Frozen data as JSON and back: the same values, and nothing but them, in files that are whole."""

from __future__ import annotations

import gzip
import json
import os
import pickle
import tracemalloc
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fxremat.ir import Backward, Copy, Event, Forward, Keep, Lane, Schedule, Storage, Timeline
from fxremat.report.codec import (
    LARGEST,
    VERSION,
    FormatError,
    decode,
    encode,
    pack,
    unpack,
    write_whole,
)
from tests.examples import examples


@dataclass(frozen=True)
class Sizes:
    """All kinds of fields that plans have."""

    name: str
    seconds: tuple[float, ...]
    pairs: tuple[tuple[int, str], ...] = ()
    kind: Literal["a", "b"] = "a"
    last: Storage | None = None
    kept: bool = False


finite = st.floats(-LARGEST, LARGEST)
whole = st.integers(-LARGEST, LARGEST)
text = st.text(st.characters(exclude_categories=["C"]) | st.sampled_from("\n\t"), max_size=5)
sizes = st.builds(
    Sizes,
    text,
    st.lists(finite, max_size=4).map(tuple),
    st.lists(st.tuples(whole, text), max_size=3).map(tuple),
    st.sampled_from(["a", "b"]),
    st.none() | st.builds(Storage, whole, text),
    st.booleans(),
)


@examples(1)
@given(sizes)
def test_values_come_back_to_the_last_bit(value: Sizes):
    text = json.dumps(encode(Sizes, value), allow_nan=False)
    found = decode(Sizes, json.loads(text))
    assert found == value
    assert [x.hex() for x in found.seconds] == [x.hex() for x in value.seconds]  # -0.0, too


def test_numbers_of_numpy_are_written_as_pythons():
    made = Sizes("x", (np.float64(0.1),), ((np.int64(3), "y"),), kept=np.bool_(True))  # type: ignore[arg-type]
    text = json.dumps(encode(Sizes, made))
    assert decode(Sizes, json.loads(text)) == Sizes("x", (0.1,), ((3, "y"),), kept=True)
    with pytest.raises(TypeError):
        encode(Storage, Storage(1.5))  # type: ignore[arg-type]


def test_classes_among_others_are_told_by_their_names():
    ops = (Forward(0, Keep.INPUT), Forward(1, Keep.ALL, 2), Backward(1))
    assert decode(Schedule, encode(Schedule, Schedule(ops))) == Schedule(ops)
    copy = Event(Copy("x", 0, 4), 0.0, 1.0, 4, 0, Lane.D2H)
    assert decode(Timeline, encode(Timeline, Timeline((copy,)))) == Timeline((copy,))


GOOD = encode(Sizes, Sizes("x", (1.0,), ((1, "y"),), last=Storage(3, "z")))


@pytest.mark.parametrize(
    ("change", "place"),
    [
        ({"name": 1}, ".name"),
        ({"seconds": 1.0}, ".seconds"),
        ({"seconds": [1.0, "2.0"]}, ".seconds[1]"),
        ({"seconds": [True]}, ".seconds[0]"),
        ({"pairs": [[1, "y", 2]]}, ".pairs[0]"),
        ({"pairs": [["1", "y"]]}, ".pairs[0][0]"),
        ({"pairs": ["1y"]}, ".pairs[0]: expected list"),
        ({"kind": "c"}, ".kind"),
        ({"kind": ["a"]}, ".kind"),
        ({"last": {"nbytes": 1.5, "name": ""}}, ".last.nbytes"),
        ({"kept": 0}, ".kept"),
        ({"pairs": [[10**30, "y"]]}, ".pairs[0][0]"),
        ({"pairs": [[-(10**400), "y"]]}, ".pairs[0][0]"),
        ({"seconds": [1e300]}, ".seconds[0]"),
        ({"seconds": [float("inf")]}, ".seconds[0]"),
        ({"seconds": [float("nan")]}, ".seconds[0]"),
        ({"last": {"nbytes": 2 * LARGEST, "name": ""}}, ".last.nbytes"),
        ({"more": 0}, "more"),
    ],
)
def test_other_forms_are_refused_with_their_place(change: dict[str, object], place: str):
    with pytest.raises(FormatError) as caught:
        decode(Sizes, {**GOOD, **change})
    assert place in str(caught.value)


@pytest.mark.parametrize("data", [None, [], "x", {}, {"name": "x"}])
def test_what_is_no_object_of_these_fields_is_refused(data: object):
    with pytest.raises(FormatError):
        decode(Sizes, data)


@pytest.mark.parametrize(
    "op",
    [
        {"stage": 0},
        {"is": "Event", "stage": 0},
        {"is": ["Forward"], "stage": 0},
        {"is": "Forward", "stage": 0, "keep": "much", "option": 0},
        {"is": "Forward", "stage": 0, "keep": ["all"], "option": 0},
    ],
)
def test_other_classes_and_members_are_refused(op: object):
    with pytest.raises(FormatError):
        decode(Schedule, {"ops": [op]})


def test_text_is_shown_and_never_obeyed():
    """Codes of terminals, and marks that turn text around, are written out."""
    hostile = "a\x1b[31mred\x07\x9b2J\x7f\r\u202eb\n\tc"
    found = decode(Storage, {"nbytes": 1, "name": hostile})
    assert found.name == r"a\x1b[31mred\x07\x9b2J\x7f\x0d\u202eb" + "\n\tc"


def test_values_that_a_class_refuses_are_refused():
    @dataclass(frozen=True)
    class Positive:
        number: int

        def __post_init__(self) -> None:
            if self.number <= 0:
                raise ValueError("not positive")

    with pytest.raises(FormatError, match="not positive"):
        decode(Positive, {"number": 0})


def test_types_without_a_form_are_the_programmers_mistake():
    with pytest.raises(TypeError):
        encode(set, set())


@pytest.mark.parametrize("packed", [False, True])
def test_contents_come_back_and_equal_ones_are_equal_bytes(packed: bool):
    contents = {"a": [1, 0.1, "é"], "b": {"c": None}}
    data = pack("thing", contents, packed=packed)
    assert unpack("thing", data) == contents
    assert data == pack("thing", dict(contents), packed=packed)


PACKED = pack("thing", {"a": list(range(1000))}, packed=True)
BAD = {
    "nothing": b"",
    "text": b"hello",
    "binary": bytes(range(256)),
    "truncated": PACKED[: len(PACKED) // 2],
    "a bit flipped": PACKED[:100] + bytes([PACKED[100] ^ 1]) + PACKED[101:],
    "truncated text": pack("thing", {"a": 1}, packed=False)[:-1],
    "not ours": b'{"a": 1}',
    "a list": b"[1]",
    "another kind": pack("other", {"a": 1}, packed=False),
    "another format": pack("thing", {}, packed=False).replace(b":%d" % VERSION, b":99"),
    "a constant": b'{"format":"fxremat thing","version":%d,"a":NaN}' % VERSION,
    "too deep": b"[" * 200_000,
    "text as a version": b'{"format":"fxremat thing","version":"\\u001b[31m"}',
    "packed text": gzip.compress(b"hello"),
    "a pickle": pickle.dumps({"a": 1}),
}


@pytest.mark.parametrize("data", BAD.values(), ids=BAD.keys())
def test_anything_else_is_refused(data: bytes):
    with pytest.raises(FormatError):
        unpack("thing", data)


def test_a_small_file_that_unpacks_to_much_is_refused_at_once():
    packed = gzip.compress(b" " * (64 << 20))
    tracemalloc.start()
    try:
        with pytest.raises(FormatError, match=rf"^{len(packed)} bytes unpack to more than \d+"):
            unpack("thing", packed)
        assert tracemalloc.get_traced_memory()[1] < 16 << 20
    finally:
        tracemalloc.stop()


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
