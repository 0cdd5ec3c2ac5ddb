"""Settings that choose kernels: the same for what is computed and for what is computed again."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable

import pytest
import torch
from torch import nn

import fxremat
from fxremat import torch_compat
from fxremat.costs.measured import cache
from fxremat.costs.measured.cache import CostCache
from fxremat.errors import BackwardError

pytestmark = pytest.mark.usefixtures("fresh_dynamo", "quick_search")


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*[m for _ in range(12) for m in (nn.Linear(32, 32), nn.GELU())])


SAMPLE = torch.randn(1024, 32, generator=torch.Generator().manual_seed(0))
CHANGES: dict[str, tuple[Callable[[], None], Callable[[], None]]] = {
    "fp32_precision": (
        lambda: torch.set_float32_matmul_precision("medium"),
        lambda: torch.set_float32_matmul_precision("highest"),
    ),
    "use_deterministic_algorithms": (
        lambda: torch.use_deterministic_algorithms(True),
        lambda: torch.use_deterministic_algorithms(False),
    ),
}


@pytest.mark.parametrize("name", CHANGES)
@pytest.mark.parametrize("by_backend", [False, True], ids=["compile", "backend"])
def test_a_setting_around_the_forward_alone_is_refused(name: str, by_backend: bool):
    change, back = CHANGES[name]
    trained = model()
    call = (
        torch.compile(trained, backend="fxremat", options={"budget": 0.8}, fullgraph=True)
        if by_backend
        else fxremat.compile(trained, SAMPLE, 0.8)
    )
    try:
        change()
        loss = call(SAMPLE).sum()
    finally:
        back()
    with pytest.raises(BackwardError, match=rf"{name}.* was .* and is .*around both"):
        loss.backward()
    assert all(p.grad is None for p in trained.parameters())
    try:
        change()
        call(SAMPLE).sum().backward()
    finally:
        back()


def test_steps_that_overlap_under_other_settings_are_told_apart():
    """The budget is enough for one that keeps everything, and one more that does not."""
    trained = model()
    budget = int(1.5 * fxremat.plan(trained, SAMPLE, 1.0).baseline_peak_bytes)
    torch._dynamo.reset()
    call = fxremat.compile(trained, SAMPLE, budget)
    change, back = CHANGES["use_deterministic_algorithms"]
    first = call(SAMPLE).sum()
    try:
        change()
        second = call(SAMPLE).sum()
    finally:
        back()
    first.backward()
    with pytest.raises(BackwardError, match="settings changed"):
        second.backward()


def test_where_nothing_is_computed_again_settings_may_change():
    """Then the backward is that of ``aot_eager`` under the same settings."""
    trained = model()
    change, back = CHANGES["fp32_precision"]

    def gradients(call: Callable[[torch.Tensor], torch.Tensor]) -> list[torch.Tensor | None]:
        trained.zero_grad(set_to_none=True)
        loss = call(SAMPLE).sum()
        try:
            change()
            loss.backward()
        finally:
            back()
        return [p.grad for p in trained.parameters()]

    expected = gradients(torch.compile(trained, backend="aot_eager", fullgraph=True))
    torch._dynamo.reset()
    found = gradients(fxremat.compile(trained, SAMPLE, 1.0))
    assert all(map(torch.equal, expected, found))


def test_costs_are_measured_anew_under_other_settings(monkeypatch: pytest.MonkeyPatch):
    caches: dict[object, CostCache] = defaultdict(CostCache)
    monkeypatch.setattr(cache, "COSTS", caches)
    change, back = CHANGES["use_deterministic_algorithms"]
    fxremat.plan(model(), SAMPLE, 1.0)
    torch._dynamo.reset()
    try:
        change()
        fxremat.plan(model(), SAMPLE, 1.0)
    finally:
        back()
    first, second = caches.values()
    assert first.seconds.keys() == second.seconds.keys()
    assert first.seconds is not second.seconds


def test_costs_are_measured_anew_with_other_threads():
    """An operation may take another workspace then, not only other seconds."""
    before = torch.get_num_threads()
    found = cache.cost_cache()
    assert found is cache.cost_cache()
    torch.set_num_threads(before + 1)
    try:
        assert cache.cost_cache() is not found
    finally:
        torch.set_num_threads(before)
    assert cache.cost_cache() is found


@pytest.fixture
def settable(monkeypatch: pytest.MonkeyPatch) -> None:
    """Settings of torch may be assigned, which its test utilities forbid once they are imported."""
    names = torch.backends.ContextProp.__set__.__globals__  # torch.backends itself is a wrapper
    monkeypatch.setitem(names, "flags_frozen", lambda: False)


@pytest.mark.usefixtures("settable")
def test_nothing_is_tried_out_inside_a_step_and_the_users_setting_stays():
    """Nothing has kernels to try out on a CPU: its steps leave the setting as it is."""
    seen: list[bool] = []

    @torch.library.custom_op("fxremat_tests::autotuned", mutates_args=())
    def autotuned(x: torch.Tensor) -> torch.Tensor:
        seen.append(torch.backends.cudnn.benchmark)
        return x.clone()

    autotuned.register_fake(torch.empty_like)
    autotuned.register_autograd(lambda _ctx, gradient: autotuned(gradient))

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(32, 32)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return autotuned(self.layer(x))

    before = torch.backends.cudnn.benchmark
    try:
        torch.backends.cudnn.benchmark = True
        call = fxremat.compile(Model(), SAMPLE, 1.0)
        assert seen and not any(seen)  # while it was measured
        for on_cuda in (False, True):
            seen.clear()
            call._training.graphs[0].calls.on_cuda = on_cuda
            call(SAMPLE).sum().backward()
            assert seen == [not on_cuda, not on_cuda]
        assert torch.backends.cudnn.benchmark
    finally:
        torch.backends.cudnn.benchmark = before


@pytest.mark.usefixtures("settable")
def test_all_that_chooses_kernels_is_told():
    told = torch_compat.kernel_settings()
    torch.backends.cudnn.deterministic, before = True, torch.backends.cudnn.deterministic
    try:
        changed = torch_compat.kernel_settings()
    finally:
        torch.backends.cudnn.deterministic = before
    assert {name for name in told if told[name] != changed[name]} == {
        "torch.backends.cudnn.deterministic"
    }
