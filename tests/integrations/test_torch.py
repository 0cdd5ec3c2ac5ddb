"""torch.compile's own partitioner with measured seconds: what it saves, and what stays so."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxremat
from fxremat.integrations.torch import activation_memory_budget
from tests.models import ZOO
from tests.models.bits import assert_bitwise_equal
from tests.models.reference import run_step

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

BACKEND = "aot_eager"


def mlp(blocks: int = 4, width: int = 32) -> nn.Module:
    def block() -> nn.Module:
        return nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    return nn.Sequential(*(block() for _ in range(blocks)))


def saved_bytes(call: Callable[..., Any], *args: Any) -> int:
    """Of distinct storages that a forward leaves for its backward."""
    found: dict[int, int] = {}

    def note(tensor: Tensor) -> Tensor:
        found[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        kept = call(*args)
    del kept
    return sum(found.values())


def saved_at(share: float, x: Tensor) -> int:
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = mlp()
    with activation_memory_budget(share):
        return saved_bytes(torch.compile(model, backend=BACKEND, fullgraph=True), x)


def test_a_smaller_share_saves_less() -> None:
    x = torch.randn(64, 32)
    saved = [saved_at(share, x) for share in (1.0, 0.5, 0.2)]
    assert saved == sorted(set(saved), reverse=True)


@pytest.mark.parametrize("share", [0.6, 0.05])
def test_dropout_draws_the_masks_that_it_draws_without(share: float) -> None:
    """Bits are those of the step that torch.compile makes where it recomputes no draw."""
    entry = ZOO["gpt"]

    def step() -> Any:
        torch._dynamo.reset()
        model = entry.build()
        return run_step(entry, model, torch.compile(model, backend=BACKEND, fullgraph=True))

    expected = step()
    with activation_memory_budget(share):
        found = step()
    assert_bitwise_equal(found.loss, expected.loss)
    assert_bitwise_equal(found.gradients, expected.gradients)


def test_after_the_context_all_is_saved_again() -> None:
    x = torch.randn(64, 32)
    torch.manual_seed(0)
    model = mlp()
    before = saved_bytes(torch.compile(model, backend=BACKEND), x)
    less = saved_at(0.2, x)
    torch._dynamo.reset()
    assert saved_bytes(torch.compile(model, backend=BACKEND), x) == before > less


def test_measuring_settles_no_symbol_of_a_size_and_draws_no_number() -> None:
    model, sizes = mlp(), (64, 96)
    with activation_memory_budget(0.3):
        compiled = torch.compile(model, backend=BACKEND, dynamic=True, fullgraph=True)
        before = torch.random.get_rng_state()
        x = torch.ones(sizes[0], 32)
        compiled(x).sum().backward()
        assert torch.equal(torch.random.get_rng_state(), before)
        with torch.compiler.set_stance("fail_on_recompile"):
            compiled(torch.ones(sizes[1], 32)).sum().backward()


def test_inductor_asks_too() -> None:
    x = torch.randn(64, 32)
    saved = []
    for share in (1.0, 0.2):
        torch._dynamo.reset()
        model = mlp()
        with activation_memory_budget(share):
            compiled = torch.compile(model, fullgraph=True)
            saved.append(saved_bytes(compiled, x))
            compiled(x).sum().backward()
        assert all(p.grad is not None for p in model.parameters())
    assert saved[1] < saved[0]


@pytest.mark.parametrize("share", [0, 0.0, -0.1, 1.5, math.nan, True, "0.5", None])
def test_what_is_no_share_is_refused(share: Any) -> None:
    with pytest.raises(fxremat.ArgumentError) as caught, activation_memory_budget(share):
        pass
    assert caught.value.argument == "share"


def test_a_torch_without_hooks_is_named_with_its_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch._inductor.custom_graph_pass", None)
    with (
        pytest.raises(fxremat.FxrematError, match="compile") as caught,
        activation_memory_budget(0.5),
    ):
        pass
    assert torch.__version__ in str(caught.value)
    assert caught.value.code == "FXR801"
