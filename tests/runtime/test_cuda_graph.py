"""While a CUDA graph is captured, nothing is planned and no host memory is lent."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

import fxremat
from fxremat.runtime import cuda_graph
from tests.efforts import WHOLE, plan_with
from tests.test_split import Language, batch, parts_of_loss, softmaxes


@pytest.fixture
def capturing(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """As if torch had come to a device, and a graph were being captured there."""
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    return monkeypatch


def model() -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 64)) for _ in range(4)]
    return nn.Sequential(*layers)


X = torch.randn(512, 64, generator=torch.Generator().manual_seed(0))


def test_nothing_is_captured_on_a_machine_without_cuda():
    assert not cuda_graph.is_captured()


def test_nothing_is_asked_of_a_build_with_cuda_before_it_has_come_to_a_device(
    monkeypatch: pytest.MonkeyPatch,
):
    """On a machine without a GPU asking raises."""

    def raises() -> bool:
        raise RuntimeError("CUDA driver version is insufficient for CUDA runtime version")

    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", raises)
    assert not cuda_graph.is_captured()


@pytest.mark.usefixtures("capturing")
def test_a_model_is_not_compiled_then():
    for call in (fxremat.compile, fxremat.plan):
        with pytest.raises(fxremat.CaptureError, match="CUDA graph") as caught:
            call(model(), X, "min")
        assert "before torch.cuda.graph" in str(caught.value)
        assert caught.value.code == "FXR308"


def test_nor_is_another_shape_planned(capturing: pytest.MonkeyPatch):
    capturing.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    compiled = fxremat.compile(model(), X, "1 GiB")
    compiled(X).sum().backward()
    compiled.zero_grad()
    capturing.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    compiled(X).sum().backward()  # planned already, and nothing travels
    compiled.zero_grad()
    with pytest.raises(fxremat.CaptureError, match="CUDA graph"):
        compiled(X[:16])
    capturing.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    compiled(X[:16]).sum().backward()
    assert len(compiled.plans) == 2


@pytest.mark.usefixtures("capturing")
def test_nor_through_torch_compile():
    torch._dynamo.reset()
    compiled = torch.compile(model(), backend="fxremat", options={"budget": "1 GiB"})
    with pytest.raises(Exception, match="CUDA graph"):
        compiled(X)


def test_a_step_with_host_memory_does_not_run_then(capturing: pytest.MonkeyPatch):
    capturing.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    reference = fxremat.compile(model(), X, "1 GiB")
    compiled = fxremat.compile(model(), X, "min", offload="only", effort=WHOLE)
    assert compiled.plan.host_bytes
    capturing.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(fxremat.TransferError, match="offload=False") as caught:
        compiled(X)
    assert "CUDA graph" in str(caught.value)
    assert caught.value.code == "FXR723"
    capturing.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    for each in (compiled, reference):  # nothing is left behind
        each(X).sum().backward()
    pairs = zip(compiled.parameters(), reference.parameters(), strict=True)
    assert all(torch.equal(a.grad, b.grad) for a, b in pairs)


def test_gradients_beside_a_loss_are_computed_once_more_then(capturing: pytest.MonkeyPatch):
    """No number can be read: what a replay finds may be another."""
    capturing.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    plan_with(capturing, much_slower=math.inf)  # the first form that fits is taken
    torch.manual_seed(0)
    original, given = Language().double(), batch()
    least_bytes = fxremat.plan(original, given, "min", loss="own", effort=WHOLE).budget_bytes
    torch._dynamo.reset()
    compiled = fxremat.compile(original, given, 7 * least_bytes // 10, loss="own")
    assert compiled.plan.form.early_gradients
    assert parts_of_loss(compiled.plan)
    found = []
    for is_captured in (False, True, False):
        capturing.setattr(
            torch.cuda, "is_current_stream_capturing", lambda is_captured=is_captured: is_captured
        )
        original.zero_grad(set_to_none=True)
        found.append(softmaxes(compiled(*given).backward))
        truth = Language().double()
        truth.load_state_dict(original.state_dict())
        truth(*given).backward()
        pairs = zip(original.parameters(), truth.parameters(), strict=True)
        assert all(torch.equal(a.grad, b.grad) for a, b in pairs)
    assert found[0] == found[2] == 0 < found[1]
