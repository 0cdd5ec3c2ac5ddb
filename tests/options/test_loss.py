"""The loss of a step, with what it compares the outputs with."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import fxremat
from fxremat.errors import ArgumentError
from fxremat.options.loss import own_loss

Y = torch.ones(3)


@pytest.mark.parametrize(
    ("argument", "given"),
    [
        ("loss", (3,)),
        ("loss", (None,)),
        ("loss", ("mine",)),
        ("loss", (nn.MSELoss(),)),
        ("loss", (nn.functional.mse_loss,)),
        ("target", ("own", Y)),
        ("target", (lambda out: out.sum(), Y)),
        ("drop_unused", ("own", None, 1)),
    ],
)
def test_what_is_no_loss(argument: str, given: tuple[Any, ...]) -> None:
    with pytest.raises(ArgumentError) as caught:
        fxremat.Loss(*given)
    assert caught.value.argument == argument


def test_a_loss_is_a_function_of_the_outputs() -> None:
    assert fxremat.Loss("own").of_outputs is own_loss
    assert fxremat.Loss(torch.sum).of_outputs is torch.sum
    compared = fxremat.Loss(nn.MSELoss(), target=Y).of_outputs
    assert compared(torch.zeros(3)) == 1
