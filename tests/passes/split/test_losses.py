"""A loss made of one number a row has the bits that it has of all classes' scores."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn import functional

from fxremat.passes.joint.build import rebuilt
from fxremat.passes.split.losses import by_rows
from tests.harness import capture, flatten, run_traced


class Loss(nn.Module):
    """A cross entropy whose classes come from a product."""

    def __init__(self, reduction: str, ignored: int) -> None:
        super().__init__()
        self.head, self.reduction, self.ignored = nn.Linear(4, 9), reduction, ignored

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        return functional.cross_entropy(
            self.head(x), target, reduction=self.reduction, ignore_index=self.ignored
        )


@pytest.mark.parametrize("ignored", [-100, 0, 3])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_no_bit_changes(reduction: str, ignored: int) -> None:
    target = torch.randint(0, 9, (301,))
    target[::7] = ignored
    step = capture(Loss(reduction, ignored), (torch.randn(301, 4), target))
    module = by_rows(step.joint.module)
    assert len(module.graph.nodes) > len(step.joint.module.graph.nodes)
    theirs = run_traced(step)
    run = fx.Interpreter(rebuilt(step.joint, module).module).run
    with torch.no_grad():
        found = flatten(run(*step.primals, *step.tangents, enable_io_processing=False))
    for ours, expected in zip(found, [*theirs.outputs, *theirs.gradients], strict=True):
        assert (ours is None) == (expected is None)
        assert ours is None or torch.equal(ours, expected)
