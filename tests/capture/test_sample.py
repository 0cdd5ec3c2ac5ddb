"""A sample is one call; what no step can be captured of is refused."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxremat
from fxremat.capture.sample import Sample, call_without_data, check_sample
from fxremat.errors import CaptureError, NoGradientError, SampleError

X = torch.ones(4, 3)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (X, Sample((X,))),
        ((X, None, 2), Sample((X, None, 2))),
        ([X], Sample((X,))),
        ({"x": X, "flag": True}, Sample((), {"x": X, "flag": True})),
        (Sample((X,), {"n": 1}), Sample((X,), {"n": 1})),
        ((), Sample()),
    ],
)
def test_what_a_sample_may_be(given: object, expected: Sample):
    read = Sample.of(given)
    assert len(read.args) == len(expected.args)
    assert all(a is b for a, b in zip(read.args, expected.args, strict=True))
    assert read.kwargs == expected.kwargs


@pytest.mark.parametrize("given", ["text", 3, None, X.numpy()])
def test_what_it_may_not_be(given: object):
    with pytest.raises(SampleError, match=type(given).__name__):
        Sample.of(given)


def test_tensors_are_named_by_their_place():
    sample = Sample((X, {"inner": [1, X]}), {"flag": True, "y": X})
    assert [place for place, _ in sample.tensors()] == [
        "sample[0]",
        "sample[1]['inner'][1]",
        "sample['y']",
    ]


def test_a_sample_elsewhere_names_shape_devices_and_remedy():
    with pytest.raises(SampleError, match=r"\(4, 3\) is on meta.*on cpu.*device='cpu'"):
        check_sample(nn.Linear(3, 3), Sample((X.to("meta"),)))


def test_an_input_with_a_gradient_is_enough_to_train():
    model = nn.Linear(3, 3).requires_grad_(False)
    with pytest.raises(NoGradientError, match="none of the 2 parameters of Linear"):
        check_sample(model, Sample((X,)))
    check_sample(model, Sample((X.clone().requires_grad_(),)))


class Notes(nn.Module):
    """Keeps what it computed, and refuses some inputs."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(3)
        self.last: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        assert x.dtype == torch.float32, "only float32"
        self.last = self.norm(x)
        return self.last * 2


def test_a_call_without_data_gives_shapes_and_changes_nothing():
    model = Notes()
    state = {name: value.clone() for name, value in model.state_dict().items()}
    outputs = call_without_data(model, Sample((X,)))
    assert isinstance(outputs, Tensor) and outputs.shape == (4, 3)
    assert model.last is None
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())


def test_what_the_model_raises_comes_out_as_it_is(caplog: pytest.LogCaptureFixture):
    with pytest.raises(AssertionError, match="only float32"):
        call_without_data(Notes(), Sample((X.double(),)))
    with pytest.raises(RuntimeError, match="4x3 and 2x2") as caught:
        call_without_data(nn.Linear(2, 2), Sample((X,)))
    assert caught.value.__context__ is None
    assert not caplog.records, "the error says it all"


class Weight(nn.Parameter):
    """A parameter of a class of its own, whose instances have a scale."""

    def __new__(cls, data: Tensor, scale: float = 1.0) -> Weight:
        made = super().__new__(cls, data)
        made.scale = scale
        return made

    def __deepcopy__(self, memo: dict[int, Any]) -> Weight:
        return Weight(self.data.clone(), self.scale)


class Scaled(nn.Module):
    def __init__(self, weight: Any) -> None:
        super().__init__()
        self.weight = weight

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight * self.weight.scale


def attributed() -> nn.Parameter:
    weight = nn.Parameter(torch.randn(3, 2))
    weight.scale = 2.0
    return weight


@pytest.mark.parametrize("make", [attributed, lambda: Weight(torch.randn(3, 2), 2.0)])
def test_attributes_of_parameters_are_there_in_a_call_without_data(
    make: Callable[[], nn.Parameter],
):
    outputs = call_without_data(Scaled(make()), Sample((X,)))
    assert outputs is None or outputs.shape == (4, 2)
    fxremat.compile(Scaled(make()), X, "min", loss=torch.sum)(X).sum().backward()


def test_outputs_that_depend_on_data_are_left_to_the_capture():
    class Picks(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x[x > 0]

    assert call_without_data(Picks(), Sample((X,))) is None


@pytest.mark.parametrize(
    ("model", "sample", "remedy"),
    [("meta", "cpu", "to_empty"), ("meta", "meta", "to_empty"), ("cpu", "meta", "zeros_like")],
)
def test_what_has_no_data_is_refused_with_a_remedy(model: str, sample: str, remedy: str):
    own, x = nn.Linear(3, 2, device=model), X.to(sample)
    with pytest.raises(SampleError, match=rf"on meta, without data.*{remedy}"):
        fxremat.compile(own, x, "min")


@pytest.mark.usefixtures("fresh_dynamo", "quick_search")
def test_in_inference_mode_a_model_is_planned_all_the_same():
    own = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 2))
    plain = copy.deepcopy(own)
    with torch.inference_mode():
        call = fxremat.compile(own, torch.ones(4, 3), "min")
        assert torch.is_inference_mode_enabled()
        assert torch.equal(call(X), plain(X))
    for model in (call, plain):
        model(X).sum().backward()
    assert len(call.plans) == 1
    pairs = zip(own.parameters(), plain.parameters(), strict=True)
    assert all(torch.equal(a.grad, b.grad) for a, b in pairs)


@pytest.mark.usefixtures("fresh_dynamo", "quick_search")
def test_a_model_that_was_made_in_inference_mode_is_refused_with_a_remedy_that_works():
    with torch.inference_mode():
        own = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 2))
    with pytest.raises(CaptureError, match=r"parameter 0\.weight of Sequential.*deepcopy"):
        fxremat.compile(own, X, "min")
    fxremat.compile(copy.deepcopy(own), X, "min")(X).sum().backward()


@pytest.mark.usefixtures("fresh_dynamo", "quick_search")
def test_sparse_samples_are_calls_like_others():
    class Sparse(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(3, 2))

        def forward(self, x: Tensor) -> Tensor:
            return torch.sparse.mm(x, self.weight).tanh()

    dense = torch.eye(3)[[0, 2, 1, 1]]
    for x in (dense.to_sparse(), dense.to_sparse_csr()):
        torch._dynamo.reset()
        own = Sparse()
        plain = copy.deepcopy(own)
        call = fxremat.compile(own, x, "min")
        for model in (call, plain):
            model(x).sum().backward()
        assert own.weight.grad is not None and plain.weight.grad is not None
        assert torch.equal(own.weight.grad, plain.weight.grad)
