"""Stages that do not fit in memory are measured by operation, and no bytes are others for that."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

from fxremat.costs.measured.cache import CostCache
from fxremat.costs.measured.cost import Measured, stage_blocks
from fxremat.costs.measured.stages import _Measurer, measure_line
from fxremat.passes.stages.block import BlockCache
from fxremat.progress import silent
from tests.harness import Captured, capture, captured

DEVICE_BYTES = 1 << 40
FREE = {"memory": True}


@torch.library.custom_op("fxremat_tests::spacious", mutates_args=())
def spacious(x: Tensor) -> Tensor:
    if not FREE["memory"]:
        raise torch.OutOfMemoryError("there is none")
    return x.sin()


@spacious.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


spacious.register_autograd(
    lambda ctx, gradient: gradient * ctx.saved_tensors[0].cos(),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
)


class Spacious(nn.Module):
    """Layers that differ before and after an operation which may not fit."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for i, layer in enumerate(self.layers):
            x = layer(x)
            x = spacious(x) if i % 2 else x.tanh()
        return x


def measure(step: Captured, cache: CostCache) -> Measured:
    real = dict(zip(step.joint.primals, step.primals, strict=True))
    blocks = BlockCache(step.line)
    return measure_line(step.line, blocks, real=real, cache=cache, progress=silent)


@pytest.mark.parametrize("name", ["gpt", "resnet50", "integers", "siamese"])
def test_operations_by_themselves_take_the_bytes_of_their_stages(
    name: str, monkeypatch: pytest.MonkeyPatch
):
    step = captured(name)
    whole = measure(step, CostCache())

    def too_little(*_args: object) -> None:
        raise torch.OutOfMemoryError("a stage is too large")

    monkeypatch.setattr(_Measurer, "_measure_whole", too_little)
    state = torch.get_rng_state()
    single = measure(step, CostCache())
    assert torch.equal(state, torch.get_rng_state())
    assert not single.too_large
    for field in ("workspace_bytes", "storage_bytes", "displaced", "asked"):
        assert getattr(single.costs, field) == getattr(whole.costs, field), field
    assert [i for i, _ in single.costs.again_s] == [i for i, _ in whole.costs.again_s]
    for index, seconds in enumerate(single.stages):
        blocks = stage_blocks(step.line, step.blocks, index)
        measured = seconds.forward_s, seconds.rebuild_s, seconds.backward_s
        assert [value > 0 for value in measured] == [bool(block.nodes) for block in blocks]


def test_what_does_not_fit_by_itself_takes_all_memory_until_it_fits(
    monkeypatch: pytest.MonkeyPatch,
):
    properties = SimpleNamespace(total_memory=DEVICE_BYTES)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _device: properties)
    step, cache = capture(Spacious(), (torch.randn(3, 16),)), CostCache()
    monkeypatch.setitem(FREE, "memory", False)
    measured = measure(step, cache)
    assert len(measured.too_large) == 1  # both have the same key
    taking = {i for i, _, n in measured.costs.workspace_bytes
              if n == DEVICE_BYTES}  # fmt: skip
    order = {i: node for node, i in step.line.order.items()}
    assert {order[i].target for i in taking} == {torch.ops.fxremat_tests.spacious.default}
    assert len(taking) == 2
    assert all(seconds > 0 for _, seconds in measured.costs.again_s)
    monkeypatch.setitem(FREE, "memory", True)
    again = measure(step, cache)
    assert not again.too_large
    assert max(nbytes for _, _, nbytes in again.costs.workspace_bytes) < DEVICE_BYTES
