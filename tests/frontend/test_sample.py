"""A sample is one call; what no step can be captured of is refused."""

import pytest
import torch
from torch import Tensor, nn

from fxremat.errors import NoGradientError, SampleError
from fxremat.frontend.sample import Sample, call_without_data, check_sample

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
    with pytest.raises(SampleError, match=r"\(4, 3\) is on meta.*on cpu.*\.to\('cpu'\)"):
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


def test_outputs_that_depend_on_data_are_left_to_the_capture():
    class Picks(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x[x > 0]

    assert call_without_data(Picks(), Sample((X,))) is None
