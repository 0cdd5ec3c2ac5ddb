"""Arguments: read in one place; an error names the argument, the value and what it may be."""

from __future__ import annotations

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
from fxremat.options.arguments import Arguments, read_model
from fxremat.options.readers import MOST_BYTES
from fxremat.options.table import BACKEND, RENAMED, names_of

MODEL, X = nn.Linear(4, 4), torch.ones(2, 4)


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


@pytest.mark.parametrize(
    "value",
    [
        0.5, 1.0, float("nan"), float("inf"), np.float64(3), np.float32(3), True, False, np.True_,
        -1, np.int64(-1), "-1 GiB", "much", "", b"1 GiB", Decimal(4), Fraction(4), 1j, [1], {},
        torch.tensor(3), np.array(3), np.array([1, 2]),
    ],
    ids=repr,
)  # fmt: skip
def test_what_is_no_number_of_bytes(value: Any):
    error = refused("reserve", value)
    assert "bytes" in str(error) and "MiB" in str(error)


@pytest.mark.parametrize(
    ("value", "nbytes"),
    [(0, 0), (7, 7), (np.int64(7), 7), (np.uint8(7), 7), ("7", 7), ("1.5 KiB", 1536), ("0", 0)],
)
def test_bytes_that_can_be_read(value: Any, nbytes: int):
    found = Arguments.read(1.0, reserve=value).reserve_bytes
    assert found == nbytes and type(found) is int


def test_nothing_is_reserved_unless_asked_for():
    assert Arguments.read(1.0).reserve_bytes == 0
    refused("reserve", None)


def test_a_reserve_beyond_all_memory_is_refused():
    assert Arguments.read(1.0, reserve=MOST_BYTES).reserve_bytes == MOST_BYTES
    refused("reserve", MOST_BYTES + 1)


@pytest.mark.parametrize("argument", ["accumulate", "strict"])
@pytest.mark.parametrize("value", [0, 1, 0.0, "False", "", None, torch.tensor(True), [True]])
def test_only_a_bool_is_one(argument: str, value: Any):
    assert "True or False" in str(refused(argument, value, loss=torch.sum))


@pytest.mark.parametrize("argument", ["accumulate", "strict"])
@pytest.mark.parametrize("value", [True, False, np.True_, np.False_])
def test_bools_of_python_and_numpy(argument: str, value: Any):
    found = getattr(Arguments.read(1.0, loss=torch.sum, **{argument: value}), argument)
    assert found is bool(value)


def test_a_budget_is_for_what_is_allocated_unless_asked_otherwise():
    assert Arguments.read(1.0).budget_on == "allocated"
    assert Arguments.read("1 GiB reserved").budget_on == "reserved"


EFFORTS: list[tuple[str, tuple[str, ...], bool, object]] = [
    ("exact", ("parts", "norms"), True, "exact"),
    ("exact", ("norms",), True, False),
    ("rounding", ("parts", "norms"), False, True),
    ("rounding", ("parts",), True, True),
    ("rounding", ("norms",), False, False),
    ("rounding", (), True, False),
]


@pytest.mark.parametrize(("bits", "forms", "exact", "split"), EFFORTS)
def test_bits_and_forms_say_what_may_be_rebuilt_and_split(
    bits: Any, forms: Any, exact: bool, split: object
):
    read = Arguments.read(1.0, bits=bits, effort=fxremat.Effort(forms=forms))
    assert (read.exact, read.split) == (exact, split)


@pytest.mark.parametrize("value", ["Exact", "", True, None, 1, ["exact"]])
def test_what_is_no_kind_of_bits(value: Any):
    message = str(refused("bits", value))
    assert "exact" in message and "rounding" in message


def test_bits_are_verified_as_often_as_asked():
    assert Arguments.read(1.0).verify_bits == 0
    assert Arguments.read(1.0, bits=fxremat.Bits(verify_every=7)).verify_bits == 7


def test_regions_are_one_graph_or_as_the_graph_breaks_or_named():
    auto, one, names = (
        Arguments.read(1.0, regions=given) for given in ("auto", "one", iter(["layers.0"]))
    )
    assert (auto.fullgraph, auto.regions) == (False, ())
    assert (one.fullgraph, one.regions) == (True, ())
    assert (names.fullgraph, names.regions) == (False, ("layers.0",))
    assert Arguments.read(1.0, regions=[]) == auto


@pytest.mark.parametrize("value", ["all", "", True, None, [1], 7])
def test_what_is_no_name_of_a_module(value: Any):
    assert "names of modules" in str(refused("regions", value))


@pytest.mark.parametrize("name", RENAMED)
def test_a_former_name_says_what_is_written_now(name: str):
    calls = (
        lambda: fxremat.compile(MODEL, X, 1.0, **{name: 1}),
        lambda: fxremat.plan(MODEL, X, 1.0, **{name: 1}),
        lambda: fxremat.estimate(MODEL, X, **{name: 1}),
    )
    for call in calls:
        with pytest.raises(ArgumentError, match=f"^{name}= is now ") as caught:
            call()
        assert (caught.value.argument, caught.value.value) == (name, 1)


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


def test_host_memory_is_limited_for_each_model_by_itself(tmp_path: Path):
    host = fxremat.HostMemory("only", limit="1 GiB", folder=tmp_path)
    one, other = (Arguments.read(1.0, offload=host).host for _ in range(2))
    assert one is not None and other is not None
    assert (one.only, one.conv, one.limit_bytes) == (True, False, 1 << 30)
    assert one.folder == str(tmp_path)
    assert one.limit is not other.limit


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
        "offload": fxremat.HostMemory("only", limit="2 GiB", folder=tmp_path),
        "bits": fxremat.Bits("rounding", verify_every=3),
        "effort": fxremat.Effort(2.0, generators=("join", "rotor")),
    }
    written = {
        **given,
        "offload": "only",
        "host_limit": "2 GiB",
        "host_dir": str(tmp_path),
        "bits": "rounding",
        "verify_bits": 3,
        "effort": 2.0,
        "generators": "join, rotor",
    }
    assert set(written) <= set(names_of(BACKEND))
    expected = Arguments.read(**given)  # type: ignore[arg-type]
    for options in (given, written):
        assert Arguments.read_options(options) == expected


def test_options_that_cannot_be_read():
    for options in (None, {}, {"reserve": 1}):
        with pytest.raises(BudgetError, match="no budget"):
            Arguments.read_options(options)
    with pytest.raises(ArgumentError, match="bugdet") as caught:
        Arguments.read_options({"bugdet": 1.0, "budget": 1.0})
    assert caught.value.argument == "bugdet"
    assert all(name in str(caught.value) for name in names_of(BACKEND))
    for name, value in {"bits": 1, "accumulate": "yes", "offload": 0, "regions": "one"}.items():
        with pytest.raises(ArgumentError) as caught:
            Arguments.read_options({"budget": 1.0, name: value})
        assert caught.value.argument == name


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"split": True}, "split= is now"),
        ({"target": X}, "target= is now"),
        ({"host_limit": "1 GiB"}, "unless offload= is given"),
        ({"offload": fxremat.HostMemory(), "host_limit": "1 GiB"}, "set it there"),
        ({"loss": fxremat.Loss(torch.sum, drop_unused=True)}, "drop_unused=True"),
    ],
)
def test_options_that_do_not_go_together(options: dict[str, Any], told: str):
    with pytest.raises(ArgumentError, match=told):
        Arguments.read_options({"budget": 1.0, **options})


def test_an_argument_that_does_not_exist_is_refused_as_python_would():
    with pytest.raises(TypeError, match="bugdet"):
        Arguments.read(1.0, bugdet=1.0)
    with pytest.raises(TypeError, match="bugdet"):
        fxremat.estimate(MODEL, X, bugdet=1.0)


def test_the_budget_is_refused_as_a_budget():
    for value in (True, None, float("nan"), -1, "much"):
        with pytest.raises(BudgetError, match="budget is"):
            Arguments.read(value)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "arguments",
    [
        {"reserve": 0.5},
        {"reserve": True},
        {"reserve": float("nan")},
        {"offload": np.float64(0)},
        {"bits": 0},
        {"accumulate": None},
        {"loss": 1},
        {"effort": -1},
        {"optimizer": "AdamX"},
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
        fxremat.compile(Untouchable(), X, 1.0, bits=1)  # type: ignore[arg-type]


def test_generators_are_names_of_solvers():
    with pytest.raises(ArgumentError, match=r"rotor, equiv_chain.*dynprog") as caught:
        fxremat.compile(MODEL, X, 1.0, effort=fxremat.Effort(generators=("rotor", "dynprog")))
    assert caught.value.argument == "generators"


@pytest.mark.parametrize("value", [-1, "much", True, None, float("nan"), [1]])
def test_what_is_no_effort(value: Any):
    refused("effort", value)
