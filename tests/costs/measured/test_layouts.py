"""How kernels leave their results, where fake ones say otherwise."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree

import fxremat
from fxremat.costs.measured.cache import CostCache
from fxremat.costs.measured.layouts import KernelLayouts
from tests.efforts import WHOLE
from tests.models.zoo import sum_of_squares

aten = torch.ops.aten

ROWS, LENGTH, WIDTH = 4, 96, 32

GRADIENT = torch.randn(4, 6, 8).transpose(0, 1)
"""Lies otherwise than what it is the gradient of."""

DENSE = torch.randn(6, 4, 8)

NORM = (torch.zeros(6, 4, 1), torch.ones(6, 4, 1), torch.ones(8), torch.zeros(8), [True] * 3)


@pytest.mark.parametrize(
    ("target", "args"),
    [
        (aten.native_layer_norm_backward.default, (GRADIENT, DENSE, [8], *NORM)),
        (aten.native_dropout_backward.default, (GRADIENT, DENSE > 0, 2.0)),
        (aten._log_softmax_backward_data.default, (GRADIENT, DENSE, 1, torch.float32)),
        (aten.hardswish_backward.default, (GRADIENT, DENSE)),
        (aten.hardtanh_backward.default, (GRADIENT, DENSE, -1.0, 1.0)),
        (aten.add.Tensor, (GRADIENT, DENSE)),
        (aten.sum.dim_IntList, (GRADIENT, [1], True)),
    ],
)
def test_they_lie_as_the_real_kernel_leaves_them(
    target: Callable[..., Any], args: tuple[Any, ...]
) -> None:
    with FakeTensorMode() as mode:
        fakes = pytree.tree_map_only(torch.Tensor, mode.from_tensor, args)
    found = KernelLayouts(CostCache()).left(target, fakes, {})
    real = pytree.tree_leaves(target(*args))
    assert found is not None
    assert [own.stride for own in found] == [t.stride() for t in real]
    assert [own.storage_bytes for own in found] == [t.untyped_storage().nbytes() for t in real]


def test_what_reads_only_contiguous_tensors_is_not_run() -> None:
    with FakeTensorMode() as mode:
        fake = mode.from_tensor(DENSE)
    layouts = KernelLayouts(CostCache())
    assert layouts.left(aten.add.Tensor, (fake, fake), {}) is None
    assert layouts.left(aten.transpose.int, (fake, 0, 1), {}) is None
    assert not layouts.measuring_bytes


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.dropout, self.norm = nn.Dropout(0.1), nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.dropout(self.b(nn.functional.gelu(self.a(x)))) + x)


class PostNorm(nn.Module):
    """Fake kernels of dropout's and layer norm's backward lay gradients as the other one does."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(Block(), Block())
        self.conv = nn.Conv1d(WIDTH, WIDTH, 4, stride=4)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(self.blocks(x).transpose(1, 2))


class Padded(nn.Module):
    """The padding's gradient lies with channels last, and is traced as if contiguous."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.conv = nn.Linear(WIDTH, WIDTH), nn.Conv2d(8, 8, 3)

    def forward(self, x: Tensor) -> Tensor:
        images = self.a(x).reshape(len(x), LENGTH, 4, 8).permute(0, 3, 1, 2)
        return self.conv(nn.functional.pad(images, (1, 1, 1, 1), mode="replicate"))


class Dropped(nn.Module):
    """``aot_eager`` fails in the backward: a view was traced that there is not."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.conv = nn.Linear(WIDTH, WIDTH), nn.Conv1d(WIDTH, WIDTH, 4, stride=4)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(nn.functional.dropout(self.a(x), 0.1, self.training).transpose(1, 2))


class Clamped(nn.Module):
    """Likewise."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(nn.functional.hardtanh(self.norm(self.a(x).mT).mT))


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.filterwarnings("ignore::fxremat.BudgetWarning")
@pytest.mark.parametrize("model", [PostNorm, Padded, Dropped, Clamped])
@pytest.mark.parametrize("dynamic", [pytest.param(None, marks=pytest.mark.slow), True])
def test_what_lies_otherwise_than_traced_trains_alike(
    model: Callable[[], nn.Module], dynamic: bool | None
) -> None:
    """As with ``aot_eager``, or as it is where that fails; at another size, too."""
    planned, plain = model(), model()
    plain.load_state_dict(planned.state_dict())
    batches = [torch.randn(rows, LENGTH, WIDTH) for rows in (ROWS, ROWS + 2)]
    compiled = fxremat.compile(
        planned, batches[0], "min", loss=sum_of_squares, dynamic=dynamic, effort=WHOLE
    )
    fails = model in (Dropped, Clamped)
    reference = plain if fails else torch.compile(plain, backend="aot_eager", dynamic=dynamic)
    for x in batches:
        for each in (compiled, reference):
            each.zero_grad()
            torch.manual_seed(1)
            sum_of_squares(each(x)).backward()
        pairs = zip(planned.parameters(), plain.parameters(), strict=True)
        assert all(torch.equal(own.grad, other.grad) for own, other in pairs)
