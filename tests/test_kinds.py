"""What an operation is to a compiler of kernels, and what runs once."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn import functional

from fxremat.passes.fuse.kinds import Kind, kinds_of, run_once
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


def once_in(step: Captured) -> frozenset[fx.Node]:
    return run_once(step.joint, kinds_of(step.joint))


class Norm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(8)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x).relu()


def test_new_statistics_of_a_norm_run_once_and_the_norm_does_not():
    step = taken_apart(Norm(), torch.randn(4, 8))
    once = once_in(step)
    new = set(step.joint.forward_outputs[: len(step.joint.mutated)])
    assert len(new) == 3
    assert new <= once
    needed_again = {n for n in step.joint.forward if set(n.users).intersection(step.joint.backward)}
    assert needed_again
    assert not once & needed_again
    for node in once - new:
        assert once.issuperset(node.users)


class ReadsBefore(nn.Module):
    """Returns what it computes from the old value of a buffer, and goes on with it."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.ones(8))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        told = (self.seen * 3).exp()
        self.seen.add_(1)
        return told, (told * x).sin()


def test_what_reads_an_old_value_runs_once_and_its_readers_do_not():
    step = taken_apart(ReadsBefore(), torch.randn(8, requires_grad=True))
    once = once_in(step)
    assert {n.name for n in once} == {"mul", "exp", "add"}


class MeanAlone(nn.Module):
    """One of two results leads to a buffer alone."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        variance, mean = torch.var_mean(x.sin())
        self.seen.copy_(variance + 1)
        return x.sin() * mean


def test_results_of_one_operation_are_never_apart():
    step = taken_apart(MeanAlone(), torch.randn(8, requires_grad=True))
    once = once_in(step)
    for node in step.joint.forward:
        if kinds_of(step.joint)[node] is Kind.VALUE:
            assert (node in once) == (node.args[0] in once)
    assert once
