"""What is put back after a model was called without data."""

import random

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fxremat.capture.isolation import attributes_replaced, generators_restored


class Counting(nn.Module):
    """Changes every kind of plain attribute at each call."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.calls = 0
        self.table = torch.arange(3.0)
        self.cache = {"first": torch.ones(2)}
        self.seen = [torch.zeros(1)]
        self.shapes = {(0,)}
        self.gone = "here"

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.table = self.table + 1
        self.cache["second"] = x
        self.seen.append(x)
        self.shapes.add(tuple(x.shape))
        self.new = x
        del self.gone
        return self.layer(x)


def shell(value: Tensor) -> Tensor:
    return value.to("meta")


def test_attributes_end_as_they_began():
    model = Counting()
    table, cache, seen = model.table, model.cache, model.seen
    with attributes_replaced(model, shell):
        assert model.table.is_meta and model.cache["first"].is_meta and model.seen[0].is_meta
        model(torch.ones(1, 2))
        assert model.calls == 1 and hasattr(model, "new")
    assert model.table is table
    assert model.cache is cache and list(cache) == ["first"] and not cache["first"].is_meta
    assert model.seen is seen and len(seen) == 1 and not seen[0].is_meta
    assert (model.calls, model.shapes, model.gone) == (0, {(0,)}, "here")
    assert not hasattr(model, "new")


def test_attributes_end_as_they_began_after_an_error():
    model = Counting()
    with pytest.raises(ValueError, match="stop"), attributes_replaced(model, shell):
        model.calls = 5
        model.cache = {}
        raise ValueError("stop")
    assert model.calls == 0
    assert list(model.cache) == ["first"]


def test_parameters_and_buffers_are_left_alone():
    model = nn.BatchNorm1d(2)
    weight, mean = model.weight, model.running_mean
    with attributes_replaced(model, shell):
        assert model.weight is weight and not model.weight.is_meta
    assert model.weight is weight and model.running_mean is mean


def test_hooks_that_a_call_installs_stay_with_the_note_of_them():
    model = Counting()
    with attributes_replaced(model, shell):
        model.layer.register_forward_hook(lambda *_: None)
        model.hooked = True
    assert model.hooked
    assert len(model.layer._forward_hooks) == 1


def draws() -> tuple[float, float, float]:
    return random.random(), float(np.random.rand()), float(torch.rand(()))


def test_generators_end_as_they_began():
    for fails in (False, True):
        states = random.getstate(), np.random.get_state(), torch.get_rng_state()
        expected = draws()
        random.setstate(states[0])
        np.random.set_state(states[1])
        torch.set_rng_state(states[2])
        try:
            with generators_restored():
                assert draws() == expected
                if fails:
                    raise ValueError
        except ValueError:
            pass
        assert draws() == expected
