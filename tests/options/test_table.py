"""The table of options: everything that lists options is made from it."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from torch import nn

import fxremat
from fxremat.options.readers import READERS
from fxremat.options.table import BACKEND, BUDGET, OPTIONS, RENAMED, fields_of, names_of

MODEL, X = nn.Linear(4, 4), torch.ones(2, 4)

MOST = 16
"""Keyword arguments that anybody can remember."""


def test_its_rows_are_the_arguments_of_compile() -> None:
    parameters = inspect.signature(fxremat.compile).parameters.values()
    keywords = [p for p in parameters if p.kind is inspect.Parameter.KEYWORD_ONLY]
    assert [(p.name, p.default) for p in keywords] == [(o.name, o.default) for o in OPTIONS]
    assert len(OPTIONS) <= MOST


def test_each_row_has_a_reader_that_takes_its_default() -> None:
    assert READERS.keys() == {option.name for option in OPTIONS}
    for option in OPTIONS:
        READERS[option.name](option.name, option.default)


def test_each_row_says_what_it_is() -> None:
    for option in OPTIONS:
        assert option.doc.endswith(".") and option.values
        assert not option.fields or option.fields[0].name == option.name
        assert all(field.doc and (field.part or i == 0) for i, field in enumerate(option.fields))


def test_names_are_of_one_thing() -> None:
    names = [BUDGET.name, *(field.name for option in OPTIONS for field in option.fields)]
    assert len(names) == len(set(names))
    assert not RENAMED.keys() & {option.name for option in OPTIONS}


@pytest.mark.parametrize("function", ["plan", "frontier", "max_batch", "estimate"])
def test_functions_refuse_what_the_table_says(function: str) -> None:
    call: Any = getattr(fxremat, function)
    given = {"budget": "1 GiB"} if function in ("plan", "max_batch") else {}
    for option in OPTIONS:
        if not option.taken_by(function):
            message = f"^{function} does not take {option.name}="
            with pytest.raises(fxremat.ArgumentError, match=message) as caught:
                call(MODEL, X, **given, **{option.name: option.default})
            assert caught.value.argument == option.name


def test_the_backend_takes_plain_values() -> None:
    names = names_of(BACKEND)
    assert {"budget", "loss", "host_limit", "verify_bits", "forms", "policy"} <= set(names)
    assert not {"drop_unused", "regions", "ranks", "plan", "dynamic"} & set(names)


def test_the_command_has_flags_for_what_its_functions_take() -> None:
    flags = {name: {f.name for f in fields_of(name) if f.flag} for name in ("plan", "estimate")}
    assert flags["plan"] - flags["estimate"] == {"executor", "in_flight"}
    assert {"bits", "generators", "host_dir", "reserve"} <= flags["estimate"]
