"""What an operation is to a compiler of kernels."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from fxremat.passes.fuse.kinds import Kind, kinds_of
from tests.fused import taken_apart
from tests.harness import Captured


class Mixed(nn.Module):
    """An operation of each kind."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 8))
        self.register_buffer("scale", torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        x = x @ self.weight
        left, right = torch.split(x, 4, dim=1)
        x = torch.cat([left.sin(), right.t().contiguous().t().tanh()], dim=1) * (self.scale + 1)
        self.scale.mul_(2)
        variance, mean = torch.var_mean(x, dim=1, keepdim=True)
        x = functional.dropout((x - mean) / (variance + 1), 0.5)
        x = torch.complex(x, x + 1) * torch.complex(x + 2, x)
        return x.real.sum(dim=0).cumsum(0)


@pytest.fixture(scope="module")
def mixed() -> Captured:
    return taken_apart(Mixed(), torch.randn(8, 8))


def kinds_named(step: Captured, name: str) -> set[Kind]:
    """Of the forward's operations whose name starts so."""
    kinds = kinds_of(step.joint)
    found = {kinds[n] for n in step.joint.forward if n.name.startswith(name)}
    assert found, [n.name for n in step.joint.forward]
    return found


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("sin", Kind.POINTWISE),
        ("cat", Kind.POINTWISE),
        ("div", Kind.POINTWISE),
        ("var_mean", Kind.REDUCTION),
        ("sum", Kind.REDUCTION),
        ("split", Kind.VIEW),
        ("permute", Kind.VIEW),
        ("mm", Kind.ALONE),
        ("native_dropout", Kind.ALONE),
        ("record_state", Kind.ALONE),
        ("complex", Kind.ALONE),
        ("cumsum", Kind.ALONE),
    ],
)
def test_each_operation_is_what_it_does(mixed: Captured, name: str, kind: Kind):
    assert kinds_named(mixed, name) == {kind}


def test_a_result_of_several_is_a_view_only_where_these_are_views(mixed: Captured):
    kinds = kinds_of(mixed.joint)
    picks = [n for n in mixed.joint.forward if n.name.startswith("getitem")]
    of_views = {kinds[n] for n in picks if n.args[0].name.startswith("split")}
    of_values = {kinds[n] for n in picks if not n.args[0].name.startswith("split")}
    assert (of_views, of_values) == ({Kind.VIEW}, {Kind.VALUE})


def test_products_of_a_kind_that_no_kernel_knows_are_alone(mixed: Captured):
    """Some dtypes and devices are not known, whatever the operation."""
    kinds = kinds_of(mixed.joint)
    products = [n for n in mixed.joint.forward if n.name.startswith("mul")]
    of_complex = {n: n.meta["val"].is_complex() for n in products}
    assert sorted(of_complex.values()) == [False, False, True]
    assert all((kinds[n] is Kind.ALONE) == of_complex[n] for n in products)


def test_what_lies_on_another_device_is_alone():
    step = taken_apart(Mixed(), torch.randn(8, 8))
    elsewhere = next(n for n in step.joint.forward if n.name == "sin")
    elsewhere.meta["val"] = torch.empty_like(elsewhere.meta["val"], device="meta")
    kinds = kinds_of(step.joint)
    assert {kinds[n] for n in (elsewhere, *elsewhere.users)} == {Kind.ALONE}


def test_a_copy_of_an_old_value_is_alone_and_any_other_is_not(mixed: Captured):
    kinds = kinds_of(mixed.joint)
    copies = [n for n in mixed.joint.forward if n.target is torch.ops.aten.clone.default]
    old = {n: n.args[0] in mixed.joint.mutated for n in copies}
    assert sorted(old.values()) == [False, True]
    assert all((kinds[n] is Kind.ALONE) == old[n] for n in copies)
