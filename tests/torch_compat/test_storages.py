"""Storages of tensors: identity and bytes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from fxremat import torch_compat
from tests.models.wrappers import Packed


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize(
    "make", [torch.sparse_csr_tensor, torch.sparse_csc_tensor, torch.sparse_coo_tensor]
)
def test_a_sparse_tensor_has_storages_of_values_and_of_where_these_are(
    make: Callable[..., torch.Tensor],
):
    values = torch.ones(4)
    indices = [torch.arange(5), torch.arange(4)]
    if make is torch.sparse_coo_tensor:
        indices = [torch.arange(4).repeat(2, 1)]
    sparse = make(*indices, values, (4, 4))
    found = torch_compat.storages_of(sparse)
    assert sum(found.values()) == sum(own.nbytes for own in (*indices, values))
    assert torch_compat.storages_of(sparse.detach()) == found
    assert torch_compat.storages_on(sparse.device, [sparse]) == found


def test_views_have_the_storage_of_their_base():
    base = torch.empty(6)
    assert torch_compat.storages_of(base[2:]) == {torch_compat.storage_key(base): 24}


def test_a_tensor_whose_memory_torch_does_not_show_has_no_storage():
    assert torch_compat.storages_of(torch.ones(3, 3).to_mkldnn()) == {}


def test_a_wrapper_has_the_storages_of_what_it_wraps():
    weight = Packed.of(torch.randn(6, 4))
    found = torch_compat.storages_of(weight)
    assert sum(found.values()) == torch_compat.nbytes_of(weight) == 6 * 4 + 6 * 4
    assert torch_compat.storages_on(weight.device, [weight]) == found
    assert torch_compat.storages_on(torch.device("meta"), [weight]) == {}
