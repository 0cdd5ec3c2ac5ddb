"""What a loss outside the model needs."""

import warnings

import torch
from torch import Tensor, nn

import fxremat
from fxremat.capture.unused_outputs import Unused
from fxremat.options.measured_needs import needs_of_loss


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
    compiled = fxremat.compile(model, small[0], "min", loss=fxremat.Loss(costly, target=small[1]))
    with warnings.catch_warnings():
        warnings.simplefilter("error", fxremat.BudgetWarning)
        for x, target in (small, *[large] * 5):
            costly(compiled(x), target).backward()
            compiled.zero_grad()
    x, target = large
    step = fxremat.measure_step(model, lambda: costly(compiled(x), target).backward())
    assert step.peak_bytes <= compiled.plan.budget_bytes
