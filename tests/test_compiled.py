"""The compiled module is the user's model in all but its training forward."""

import copy
import pickle

import pytest
import torch
from torch import Tensor, nn

import fxremat


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(4))
        self.norm = nn.BatchNorm1d(32)
        self.drop = nn.Dropout(0.5)
        self.register_buffer("scale", torch.ones(32))
        self.label = "net"

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = self.drop(layer(x).tanh())
        return self.norm(x * self.scale)

    def describe(self) -> str:
        return f"{self.label} of {len(self.layers)}"


X = torch.randn(64, 32, generator=torch.Generator().manual_seed(0))


@pytest.fixture
def pair() -> tuple[Net, fxremat.CompiledModule]:
    model = Net()
    return model, fxremat.compile(model, X, "min")


def test_it_shares_what_the_model_has(pair: tuple[Net, fxremat.CompiledModule]):
    model, compiled = pair
    assert list(compiled.state_dict()) == list(Net().state_dict())
    assert [n for n, _ in compiled.named_parameters()] == [n for n, _ in model.named_parameters()]
    assert all(a is b for a, b in zip(compiled.parameters(), model.parameters(), strict=True))
    assert all(a is b for a, b in zip(compiled.buffers(), model.buffers(), strict=True))
    assert list(compiled.modules())[1:] == list(model.modules())[1:]
    other = Net()
    nn.init.zeros_(other.layers[0].weight)
    compiled.load_state_dict(other.state_dict())
    assert not model.layers[0].weight.any()


def test_attributes_are_the_models(pair: tuple[Net, fxremat.CompiledModule]):
    model, compiled = pair
    assert compiled.describe() == "net of 4"
    compiled.label = "other"
    assert model.label == "other" and compiled.describe() == "other of 4"
    compiled.extra = nn.Parameter(torch.zeros(1))
    assert "extra" in dict(model.named_parameters())
    del compiled.extra
    assert "extra" not in dict(model.named_parameters())
    with pytest.raises(AttributeError, match="missing"):
        _ = compiled.missing
    assert "Net" in repr(compiled)


def test_modes_are_the_models(pair: tuple[Net, fxremat.CompiledModule]):
    model, compiled = pair
    assert compiled.training
    assert compiled.eval() is compiled
    assert not model.training and not model.drop.training and not compiled.training
    compiled.train()
    assert model.training and model.drop.training
    model.eval()
    assert not compiled.training


def test_eval_and_no_grad_run_the_original_forward(pair: tuple[Net, fxremat.CompiledModule]):
    model, compiled = pair
    calls = []
    handle = model.register_forward_hook(lambda *_: calls.append(1))
    compiled.eval()
    assert torch.equal(compiled(X), model(X))
    assert len(calls) == 2
    compiled.train()
    with torch.no_grad():
        torch.manual_seed(3)
        found = compiled(X)
        torch.manual_seed(3)
        assert torch.equal(found, model(X))
    assert len(calls) == 4
    assert len(compiled.plans) == 1
    handle.remove()


def test_other_shapes_are_planned_anew(pair: tuple[Net, fxremat.CompiledModule]):
    compiled = fxremat.compile(Net(), X, pair[1].plan.budget_bytes)
    first = compiled.plan
    compiled(X[:32]).sum().backward()
    assert len(compiled.plans) == 2 and compiled.plan is compiled.plans[1]
    assert compiled.plan.sizes and not first.sizes
    compiled.zero_grad()
    compiled(X).sum().backward()
    assert len(compiled.plans) == 2 and compiled.plan is first
    compiled.zero_grad()
    with pytest.raises(fxremat.BudgetError, match=str(first.budget_bytes)):
        compiled(X.repeat(50, 1))


def test_moving_the_model_plans_anew():
    compiled = fxremat.compile(Net(), X, 1.0)
    assert compiled.double() is compiled
    assert compiled.layers[0].weight.dtype == torch.float64
    with pytest.raises(fxremat.BudgetError):
        compiled(X.double())  # twice the bytes, the same budget
    compiled.float()
    compiled(X).sum().backward()
    assert compiled.layers[0].weight.grad.dtype == torch.float32


def test_the_code_can_be_printed(pair: tuple[Net, fxremat.CompiledModule]):
    _, compiled = pair
    assert "stage" in compiled.forward_code and "F_" in compiled.forward_code
    assert "_backward(args)" in compiled.backward_code
    for code in (compiled.forward_code, compiled.backward_code):
        compile(code, "emitted", "exec")


def test_containers_stay_containers():
    model = nn.Sequential(nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 32))
    compiled = fxremat.compile(model, X, 1.0)
    assert len(compiled) == 3 and compiled[0] is model[0]
    assert list(compiled) == list(model)
    with pytest.raises(TypeError):
        len(fxremat.compile(Net(), X, 1.0))


def test_copies_are_refused(pair: tuple[Net, fxremat.CompiledModule]):
    _, compiled = pair
    for copied in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match="cannot be copied or pickled"):
            copied(compiled)
