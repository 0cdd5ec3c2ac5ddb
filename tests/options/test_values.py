"""Values of options that say more than one thing are checked when they are made."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fxremat
from fxremat.errors import ArgumentError


def refused(argument: str, kind: Any, *args: Any, **values: Any) -> str:
    with pytest.raises(ArgumentError) as caught:
        kind(*args, **values)
    assert caught.value.argument == argument
    return str(caught.value)


@pytest.mark.parametrize("value", [-1, 0.5, "3", None, True])
def test_what_is_no_number_of_steps(value: Any) -> None:
    assert "steps" in refused("verify_every", fxremat.Bits, verify_every=value)


def test_bits_are_exact_and_not_verified_unless_asked_for() -> None:
    assert (fxremat.Bits().kind, fxremat.Bits().verify_every) == ("exact", 0)
    assert fxremat.Bits(verify_every=np.int64(3)) == fxremat.Bits("exact", 3)  # type: ignore[arg-type]


@pytest.mark.parametrize("value", [False, "yes", None, 1])
def test_what_cannot_travel(value: Any) -> None:
    message = refused("offload", fxremat.HostMemory, value)
    assert all(choice in message for choice in ("auto", "only", "conv"))


@pytest.mark.parametrize("value", [0.5, True, -1, "-1 GiB", "much", "", [1], float("inf")])
def test_what_is_no_limit(value: Any) -> None:
    assert "MiB" in refused("limit", fxremat.HostMemory, limit=value)


def test_a_limit_is_in_bytes() -> None:
    assert fxremat.HostMemory().limit is None
    assert fxremat.HostMemory(limit="1.5 KiB").limit == 1536
    assert fxremat.HostMemory(limit=1 << 63).limit == 1 << 63  # as good as none


@pytest.mark.parametrize("kind", [str, Path])
def test_a_folder_is_kept_by_its_whole_path(
    kind: type, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path)
    for value in (kind("here"), kind(tmp_path / "here")):
        assert fxremat.HostMemory(folder=value).folder == str(tmp_path / "here")


@pytest.mark.parametrize("value", ["", b"/tmp", 3, True, ["/tmp"], "/no/such/folder", "\0"])
def test_what_is_no_folder(value: Any) -> None:
    assert "folder" in refused("folder", fxremat.HostMemory, folder=value)


def test_a_file_is_no_folder(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    refused("folder", fxremat.HostMemory, folder=tmp_path / "file")


def test_a_folder_that_cannot_be_written_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "access", lambda _path, _mode: False)
    assert "write" in refused("folder", fxremat.HostMemory, folder=tmp_path)
