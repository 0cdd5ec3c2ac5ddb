"""Arguments: read in one place; an error names the argument, the value and what it may be."""

from __future__ import annotations

import os
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import fxremat
from fxremat.errors import ArgumentError, BudgetError, FxrematError
from fxremat.options.arguments import BACKEND_OPTIONS, MOST_BYTES, Arguments, read_model


def refused(argument: str, value: Any, **others: Any) -> ArgumentError:
    with pytest.raises(ArgumentError) as caught:
        Arguments.read(1.0, **{argument: value}, **others)
    error = caught.value
    assert error.argument == argument and error.value is value
    assert argument in str(error)
    if isinstance(value, (int, float, str)):
        assert repr(value)[:30] in str(error)
    return error


def test_an_argument_error_is_caught_as_python_would_raise_it():
    error = refused("reserve", 0.5)
    assert isinstance(error, FxrematError)
    assert isinstance(error, ValueError) and isinstance(error, TypeError)
    assert fxremat.ArgumentError is ArgumentError


BYTES = {"reserve": {}, "host_limit": {"offload": "auto"}}
"""Arguments in bytes, with what else they need."""


def read_bytes(argument: str, value: Any) -> int | None:
    arguments = Arguments.read(1.0, **{argument: value}, **BYTES[argument])
    if argument == "reserve":
        return arguments.reserve_bytes
    assert arguments.host is not None
    return arguments.host.limit_bytes


@pytest.mark.parametrize("argument", BYTES)
@pytest.mark.parametrize(
    "value",
    [
        0.5, 1.0, float("nan"), float("inf"), np.float64(3), np.float32(3), True, False, np.True_,
        -1, np.int64(-1), "-1 GiB", "much", "", b"1 GiB", Decimal(4), Fraction(4), 1j, [1], {},
        torch.tensor(3), np.array(3), np.array([1, 2]),
    ],
    ids=repr,
)  # fmt: skip
def test_what_is_no_number_of_bytes(argument: str, value: Any):
    error = refused(argument, value, **BYTES[argument])
    assert "bytes" in str(error) and "MiB" in str(error)


@pytest.mark.parametrize("argument", BYTES)
@pytest.mark.parametrize(
    ("value", "nbytes"),
    [(0, 0), (7, 7), (np.int64(7), 7), (np.uint8(7), 7), ("7", 7), ("1.5 KiB", 1536), ("0", 0)],
)
def test_bytes_that_can_be_read(argument: str, value: Any, nbytes: int):
    found = read_bytes(argument, value)
    assert found == nbytes and type(found) is int


def test_no_limit_is_none_but_no_reserve_is_zero():
    assert read_bytes("host_limit", None) is None
    assert Arguments.read(1.0).reserve_bytes == 0
    refused("reserve", None)


def test_a_reserve_beyond_all_memory_is_refused():
    assert read_bytes("reserve", MOST_BYTES) == MOST_BYTES
    refused("reserve", MOST_BYTES + 1)
    assert read_bytes("host_limit", 1 << 63) == 1 << 63  # as good as none


@pytest.mark.parametrize("argument", ["drop_unused", "accumulate", "exact"])
@pytest.mark.parametrize("value", [0, 1, 0.0, "False", "", None, torch.tensor(True), [True]])
def test_only_a_bool_is_one(argument: str, value: Any):
    assert "True or False" in str(refused(argument, value, loss=torch.sum))


@pytest.mark.parametrize("argument", ["drop_unused", "accumulate", "exact"])
@pytest.mark.parametrize("value", [True, False, np.True_, np.False_])
def test_bools_of_python_and_numpy(argument: str, value: Any):
    found = getattr(Arguments.read(1.0, loss=torch.sum, **{argument: value}), argument)
    assert found is bool(value)


@pytest.mark.parametrize("value", [None, True, 0, "", "Reserved", b"reserved", ["reserved"]])
def test_a_budget_is_for_one_of_two(value: Any):
    message = str(refused("budget_on", value))
    assert "allocated" in message
    assert "reserved" in message


def test_a_budget_is_for_what_is_allocated_unless_asked_otherwise():
    assert Arguments.read(1.0).budget_on == "allocated"
    assert Arguments.read(1.0, budget_on="reserved").budget_on == "reserved"


def test_dropping_what_is_unused_needs_to_know_what_is():
    assert "loss=" in str(refused("drop_unused", True))


OFFLOADS = [True, np.True_, 0, 1, 0.0, None, "", "yes", "AUTO", ["auto"], torch.tensor(False)]


@pytest.mark.parametrize("value", OFFLOADS, ids=repr)
def test_what_is_no_way_to_offload_lists_those_that_are(value: Any):
    message = str(refused("offload", value))
    assert all(repr(choice) in message for choice in ("auto", "only", "conv", False))


@pytest.mark.parametrize("value", [False, np.False_])
def test_nothing_travels_if_false(value: Any):
    assert Arguments.read(1.0, offload=value).host is None


def test_the_ways_to_offload():
    hosts = {way: Arguments.read(1.0, offload=way).host for way in ("auto", "only", "conv")}  # type: ignore[arg-type]
    assert {way: (h.only, h.conv) for way, h in hosts.items() if h} == {
        "auto": (False, False),
        "only": (True, False),
        "conv": (True, True),
    }


@pytest.mark.parametrize("argument", ["host_limit", "host_dir"])
@pytest.mark.parametrize("offload", [False, np.False_])
def test_what_concerns_the_host_needs_offload(argument: str, offload: Any, tmp_path: Path):
    value = "1 GiB" if argument == "host_limit" else tmp_path
    assert "offload=" in str(refused(argument, value, offload=offload))


@pytest.mark.parametrize("kind", [str, Path])
def test_a_folder_is_kept_by_its_whole_path(
    kind: type, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path)
    for value in (kind("here"), kind(tmp_path / "here")):
        host = Arguments.read(1.0, offload="auto", host_dir=value).host
        assert host is not None and host.folder == str(tmp_path / "here")


@pytest.mark.parametrize("value", ["", b"/tmp", 3, True, ["/tmp"], "/no/such/folder", "\0"])
def test_what_is_no_folder(value: Any):
    assert "folder" in str(refused("host_dir", value, offload="auto"))


def test_a_file_is_no_folder(tmp_path: Path):
    (tmp_path / "file").touch()
    refused("host_dir", tmp_path / "file", offload="auto")


def test_a_folder_that_cannot_be_written_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(os, "access", lambda _path, _mode: False)
    assert "write" in str(refused("host_dir", str(tmp_path), offload="auto"))


@pytest.mark.parametrize("value", [3, "sum", torch.tensor(1.0), False])
def test_what_is_no_loss(value: Any):
    refused("loss", value)


@pytest.mark.parametrize("value", ["AdamX", nn.Linear, nn.Linear(2, 2), True, torch.optim])
def test_what_is_no_optimizer(value: Any):
    refused("optimizer", value)


@pytest.mark.parametrize("value", [None, nn.Linear, lambda x: x, "model", [nn.Linear(2, 2)]])
def test_what_is_no_model(value: Any):
    with pytest.raises(ArgumentError, match="Module") as caught:
        read_model(value)
    assert caught.value.argument == "model"


def test_a_long_value_is_cut_short():
    assert len(str(refused("offload", "x" * 10**6))) < 400
    assert len(str(refused("reserve", list(range(10**6))))) < 400


class Unshown:
    def __repr__(self) -> str:
        raise RuntimeError


def test_a_value_that_cannot_be_shown_is_refused_all_the_same():
    refused("offload", Unshown())


def test_options_are_the_same_arguments(tmp_path: Path):
    given = {
        "budget": "1 GiB",
        "reserve": "1 KiB",
        "accumulate": True,
        "offload": "only",
        "host_limit": "2 GiB",
        "host_dir": str(tmp_path),
        "exact": False,
        "budget_on": "reserved",
    }
    assert set(given) <= set(BACKEND_OPTIONS)
    budget = given.pop("budget")
    expected = Arguments.read(budget, **given)  # type: ignore[arg-type]
    assert Arguments.read_options({"budget": budget, **given}) == expected


def test_options_that_cannot_be_read():
    for options in (None, {}, {"reserve": 1}):
        with pytest.raises(BudgetError, match="no budget"):
            Arguments.read_options(options)
    with pytest.raises(ArgumentError, match="bugdet") as caught:
        Arguments.read_options({"bugdet": 1.0, "budget": 1.0})
    assert caught.value.argument == "bugdet"
    assert all(name in str(caught.value) for name in BACKEND_OPTIONS)
    for name, value in {"exact": 1, "accumulate": "yes", "offload": 0}.items():
        with pytest.raises(ArgumentError) as caught:
            Arguments.read_options({"budget": 1.0, name: value})
        assert caught.value.argument == name


def test_an_argument_that_does_not_exist_is_refused_as_python_would():
    with pytest.raises(TypeError, match="bugdet"):
        Arguments.read(1.0, bugdet=1.0)
    with pytest.raises(TypeError, match="bugdet"):
        fxremat.estimate(MODEL, X, bugdet=1.0)


def test_the_budget_is_refused_as_a_budget():
    for value in (True, None, float("nan"), -1, "much"):
        with pytest.raises(BudgetError, match="budget is"):
            Arguments.read(value)  # type: ignore[arg-type]


MODEL, X = nn.Linear(4, 4), torch.ones(2, 4)


@pytest.mark.parametrize(
    "arguments",
    [
        {"reserve": 0.5},
        {"reserve": True},
        {"reserve": float("nan")},
        {"offload": np.float64(0)},
        {"host_limit": "1 GiB"},
        {"host_dir": ""},
        {"offload": "auto", "host_dir": ""},
        {"offload": "auto", "host_limit": float("inf")},
        {"exact": 0},
        {"accumulate": None},
        {"loss": 1},
        {"drop_unused": True},
        {"optimizer": "AdamX"},
        {"budget_on": "cached"},
    ],
    ids=str,
)
def test_the_interface_reads_them_there(arguments: dict[str, Any]):
    for call in (fxremat.compile, fxremat.plan):
        with pytest.raises(ArgumentError) as caught:
            call(MODEL, X, 1.0, **arguments)
        assert caught.value.argument in arguments
    with pytest.raises(ArgumentError):
        fxremat.frontier(MODEL, X, **arguments)


def test_arguments_are_read_before_the_model_is_touched():
    class Untouchable(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            raise AssertionError

    with pytest.raises(ArgumentError):
        fxremat.compile(Untouchable(), X, 1.0, exact=1)  # type: ignore[arg-type]


@pytest.mark.parametrize("value", ["rotor", [], ["dynprog"], [3], None, 7], ids=repr)
def test_generators_are_names_of_solvers(value: Any):
    refused("generators", value)
    assert Arguments.read(1.0, generators=iter(["rotor", "rotor"])).generators == ("rotor",)
