"""Stand-ins for tensors: without data, sharing what those share."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fxremat import torch_compat
from fxremat.errors import SampleError
from fxremat.sizing.fake import FakeCopies


@pytest.mark.parametrize("where", ["cpu", "meta"])
def test_a_shell_is_like_its_tensor(where: str) -> None:
    tensor = torch.empty(4, 6, dtype=torch.float64, device=where).t()[1:]
    copied = FakeCopies().of(tensor)
    assert torch_compat.is_fake(copied)
    assert copied.device.type == "cpu"
    assert (copied.shape, copied.stride(), copied.dtype) == (
        tensor.shape,
        tensor.stride(),
        tensor.dtype,
    )
    assert copied.storage_offset() == tensor.storage_offset()
    assert copied.untyped_storage().nbytes() == tensor.untyped_storage().nbytes()


def test_a_tensor_has_one_shell_and_views_share_a_storage() -> None:
    copies, tensor = FakeCopies(), torch.empty(4, 6)
    one, view = copies.of(tensor), copies.of(tensor[1:])
    assert copies.of(tensor) is one
    assert copies.of(one) is one
    assert one is not view
    assert torch_compat.storage_key(one) == torch_compat.storage_key(view)
    other = copies.of(torch.empty(4, 6))
    assert torch_compat.storage_key(one) != torch_compat.storage_key(other)


def test_gradients_are_asked_for_as_before() -> None:
    copies = FakeCopies()
    parameter = nn.Parameter(torch.empty(3))
    assert isinstance(copies.of(parameter), nn.Parameter)
    assert copies.of(parameter).requires_grad
    assert not copies.of(nn.Parameter(torch.empty(3), requires_grad=False)).requires_grad
    assert copies.of(torch.empty(3, requires_grad=True)).requires_grad
    assert not copies.of(torch.empty(3)).requires_grad


def test_what_is_no_tensor_stays() -> None:
    assert FakeCopies().of("x") == "x"


def test_a_sparse_tensor_is_refused() -> None:
    with pytest.raises(SampleError):
        FakeCopies().of(torch.eye(3).to_sparse())


def test_a_model_is_as_before_even_after_an_error() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    model[1].weight = model[0].bias  # tied
    model.plain = torch.ones(3)  # type: ignore[assignment]
    before = dict(model.named_parameters()) | dict(model.named_buffers())
    plain = model.plain

    def inside() -> None:
        with FakeCopies().inside(model):
            held = (*model.parameters(), *model.buffers(), model.plain)
            assert all(map(torch_compat.is_fake, held))
            assert model[1].weight is model[0].bias
            raise KeyError

    with pytest.raises(KeyError):
        inside()
    after = dict(model.named_parameters()) | dict(model.named_buffers())
    assert all(after[name] is tensor for name, tensor in before.items())
    assert model.plain is plain
