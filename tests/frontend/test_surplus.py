"""Optimizer state and the loss outside the model, found by trial."""

import warnings

import pytest
import torch
from torch import Tensor, nn

import fxremat
from fxremat.frontend import surplus
from fxremat.frontend.outputs import Unused
from fxremat.frontend.surplus import needs_of_loss, optimizer_bytes

MODEL = nn.Linear(100, 50)
BYTES = sum(p.nbytes for p in MODEL.parameters())


def real_state_bytes(optimizer: torch.optim.Optimizer) -> int:
    """What the state takes after a real step."""
    for parameter in MODEL.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    MODEL.zero_grad()
    states = optimizer.state.values()
    return sum(t.nbytes for s in states for t in s.values() if isinstance(t, torch.Tensor))


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (torch.optim.SGD, {"lr": 0.1}),
        (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
        (torch.optim.Adam, {"amsgrad": True}),
        (torch.optim.AdamW, {"lr": torch.tensor(0.1)}),
        (torch.optim.RMSprop, {"momentum": 0.5}),
        (torch.optim.Adagrad, {}),
    ],
)
def test_the_state_of_an_optimizer(kind, options):
    optimizer = kind(MODEL.parameters(), **options)
    fresh = not optimizer.state
    found = sum(optimizer_bytes(optimizer, MODEL))
    assert fresh == (not optimizer.state), "the trial leaves no state behind"
    assert found == real_state_bytes(kind(MODEL.parameters(), **options))


def test_a_class_stands_for_its_defaults():
    assert sum(optimizer_bytes(torch.optim.AdamW, MODEL)) == real_state_bytes(
        torch.optim.AdamW(MODEL.parameters())
    )
    assert optimizer_bytes(None, MODEL) == ()


def test_each_tensor_of_the_state_rounds_up_for_itself(monkeypatch: pytest.MonkeyPatch):
    weight, bias = MODEL.weight.nbytes, MODEL.bias.nbytes
    whole = optimizer_bytes(torch.optim.Adam, MODEL)
    assert sorted(whole) == sorted([weight, weight, bias, bias, 4, 4])
    monkeypatch.setattr(surplus, "allocated_bytes", lambda n, _device: -(-n // 512) * 512)
    assert weight % 512, "nothing would be rounded"
    assert bias < 256, "two would fit where one does"
    rounded = optimizer_bytes(torch.optim.Adam, MODEL)
    assert sorted(rounded) == [512] * 4 + [-(-weight // 512) * 512] * 2


class Counting(torch.optim.Optimizer):
    """Keeps its count of steps, and a number more, on a device of their own."""

    def __init__(self, parameters, device: str):
        super().__init__(parameters, {"device": device})

    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                state["step"] = torch.ones((), device=group["device"])
                state["scale"] = torch.ones(3, device=group["device"])
                state["mean"] = torch.zeros_like(parameter, dtype=torch.float64)


def test_what_lies_on_another_device_is_not_counted():
    means = [2 * p.nbytes for p in MODEL.parameters()]
    assert sorted(optimizer_bytes(Counting(MODEL.parameters(), "meta"), MODEL)) == sorted(means)
    here = optimizer_bytes(Counting(MODEL.parameters(), "cpu"), MODEL)
    assert sorted(here) == sorted([*means, 4, 4, 12, 12])


def test_state_of_a_parameters_dtype_is_found_in_that_dtype():
    model = nn.Linear(100, 50, dtype=torch.bfloat16)
    groups = [{"params": list(model.parameters())}, {"params": list(MODEL.parameters())}]
    found = optimizer_bytes(torch.optim.SGD(groups, lr=0.1, momentum=0.9), model)
    assert sorted(found) == sorted([p.nbytes for g in groups for p in g["params"]])


def test_each_group_has_its_own_options():
    groups = [
        {"params": [MODEL.weight], "momentum": 0.9},
        {"params": [MODEL.bias], "momentum": 0.0},
    ]
    assert optimizer_bytes(torch.optim.SGD(groups, lr=0.1), MODEL) == (MODEL.weight.nbytes,)


def test_an_optimizer_that_needs_a_closure_is_refused():
    with pytest.raises(TypeError, match=r"LBFGS.*reserve="):
        optimizer_bytes(torch.optim.LBFGS(MODEL.parameters()), MODEL)


def test_a_loss_is_measured_on_made_up_outputs():
    outputs = {"logits": torch.empty(10, 100), "label": None}

    def loss(values):
        return values["logits"].exp().sum()

    # exp, its gradient and that of the logits; the sum's gradient is expanded.
    nbytes = outputs["logits"].nbytes
    found = needs_of_loss(loss, outputs)
    assert 2 * nbytes <= found.nbytes <= 3 * nbytes + 64
    assert found.unused is None


def test_outputs_that_a_loss_does_not_use():
    outputs = {"loss": torch.empty(()), "logits": torch.empty(10, 100), "ids": torch.ones(3).int()}
    found = needs_of_loss(lambda values: values["loss"], outputs)
    assert found.unused == Unused((1,), count=3)
    assert found.nbytes < 64


def test_a_larger_batch_has_a_larger_loss_and_target():
    """Another size is another capture, with symbols: what was told is of the sample."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16))

    def costly(outputs: Tensor, target: Tensor) -> Tensor:
        return ((outputs - target).unsqueeze(0) * torch.ones(20, 1, 1)).square().sum()

    small, large = ((torch.randn(n, 16), torch.randn(n, 16)) for n in (8, 256))
    compiled = fxremat.compile(model, small[0], "min", loss=costly, target=small[1])
    with warnings.catch_warnings():
        warnings.simplefilter("error", fxremat.BudgetWarning)
        for x, target in (small, *[large] * 5):
            costly(compiled(x), target).backward()
            compiled.zero_grad()
    x, target = large
    step = fxremat.measure_step(model, lambda: costly(compiled(x), target).backward())
    assert step.peak_bytes <= compiled.plan.budget_bytes
