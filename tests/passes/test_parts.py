"""What is apart from what may well be computed again."""

from __future__ import annotations

import torch
from torch import Tensor, fx, nn

from fxremat.passes.fuse.kinds import Kind, Part, kinds_of, parts_of
from fxremat.passes.joint.graph import is_tensor
from tests.fused import MeanAlone, fused, taken_apart, units_in
from tests.harness import Captured


def once_in(step: Captured) -> set[fx.Node]:
    return of_part(step, Part.ONCE)


def of_part(step: Captured, part: Part) -> set[fx.Node]:
    found = parts_of(step.joint, kinds_of(step.joint))
    return {node for node, own in found.items() if own is part}


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


def test_statistics_of_a_norm_are_apart_from_what_it_gives():
    """They are of few bytes; what it gives is of many, and soon computed of them."""
    step = taken_apart(Norm(), torch.randn(4, 8))
    sums = of_part(step, Part.SUMS)
    assert {"var_mean", "rsqrt"} <= {str(n.target).split(".")[1] for n in sums if is_operation(n)}
    assert all(n.meta["val"].numel() == 8 for n in sums if is_operation(n) and is_tensor(n))
    units = [
        {node.target.operations for node in units_in(fused(step)) if name in node.target.operations}
        for name in ("var_mean", "relu")
    ]
    assert all(units)
    assert units[0].isdisjoint(units[1])


def is_operation(node: fx.Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload)


class Rows(nn.Module):
    """Sums along rows of a product; the loss reads what nothing else does."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        rows = (x @ x).softmax(-1)
        return rows @ x, (rows @ x).softmax(-1).sin().square().mean()


def test_what_leads_to_a_sum_alone_is_computed_with_it_and_sums_of_rows_are_not_apart():
    step = taken_apart(Rows(), torch.randn(8, 8, requires_grad=True))
    sums = of_part(step, Part.SUMS)
    rows = [n for n in step.joint.forward if "amax" in str(n.target)]
    assert [n in sums for n in rows] == [False, True]
    last = units_in(fused(step))[1].target.operations
    assert {"amax", "exp", "sin", "mean"} <= {*last}


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


def test_results_of_one_operation_are_never_apart():
    step = taken_apart(MeanAlone(), torch.randn(8, requires_grad=True))
    once = once_in(step)
    for node in step.joint.forward:
        if kinds_of(step.joint)[node] is Kind.VALUE:
            assert (node in once) == (node.args[0] in once)
    assert once
