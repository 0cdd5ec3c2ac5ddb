"""What a step would take, without running it: held against what compile finds by running it."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import fxremat
from fxremat import Sample, torch_compat
from fxremat.costs.estimated.devices import DEVICES
from fxremat.errors import (
    ArgumentError,
    BudgetError,
    CaptureError,
    CostError,
    NoGradientError,
    SampleError,
)
from fxremat.report.areas import areas_of
from fxremat.report.memory import Kind
from fxremat.report.peak import summed
from tests.models import ZOO

NAMES = (
    pytest.param("gpt", marks=pytest.mark.slow),
    "hf_gpt2", "lora", "buffers", "outputs",
    *(pytest.param(name, marks=pytest.mark.slow) for name in ("tied", "inplace", "unet")),
    pytest.param("hf_llama", marks=pytest.mark.slow),
    pytest.param("siamese", marks=pytest.mark.slow),
)  # fmt: skip


def mlp(width: int = 64) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(8, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 8)
    )


def deep(width: int = 64) -> nn.Sequential:
    """Keeps much that is soon computed again."""
    return nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(6)))


def on_meta(build: Any, *args: Any) -> Any:
    with torch.device("meta"):
        return build(*args)


@pytest.mark.parametrize("name", NAMES)
def test_bytes_are_those_of_compile(name: str) -> None:
    entry = ZOO[name]
    model, sample = entry.build(), Sample(*entry.sample(0))
    with entry.context():
        real = fxremat.compile(model, sample, 1.0).plan
        found = fxremat.estimate(model, sample)
        same = fxremat.estimate(model, sample, costs=real)
        assert real.measured is not None
        none = tuple((i, mode, 0) for i, mode, _ in real.measured.workspace_bytes)
        bare = replace(real, measured=replace(real.measured, workspace_bytes=none))
        without = fxremat.estimate(model, sample, costs=bare)
    assert replace(same.kept, origin=real.origin) == real
    assert same.workspace_bytes == 0
    assert found.peak_bytes - found.workspace_bytes == without.peak_bytes
    assert found.kept.measured is not None
    assert found.kept.measured.storage_bytes == real.measured.storage_bytes


def test_a_model_without_workspaces_needs_what_compile_says() -> None:
    model, x = mlp(), torch.randn(32, 8)
    real = fxremat.compile(model, x, 1.0).plan
    found = fxremat.estimate(model, x)
    assert found.peak_bytes == real.baseline_peak_bytes
    assert found.least_budget_bytes == real.least_budget_bytes
    assert found.workspace_bytes == 0


def test_a_model_on_meta_is_one_with_data() -> None:
    real = fxremat.estimate(mlp(), torch.randn(32, 8), budget=0.8)
    meta = fxremat.estimate(on_meta(mlp), torch.empty(32, 8, device="meta"), budget=0.8)
    assert meta == real


def test_nothing_is_allocated() -> None:
    side = 1 << 17
    model = on_meta(nn.Linear, side, side)
    with torch_compat.AllocationLog() as log:
        found = fxremat.estimate(model, torch.empty(4, side, device="meta"))
    assert log.peak_bytes < 1 << 20
    assert found.peak_bytes > 2 * 4 * side**2


class Counting(nn.Module):
    """Counts its calls, in a buffer and in a number, and caches what it saw."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = mlp()
        self.register_buffer("seen", torch.zeros(()))
        self.plain = torch.ones(8)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.cached = x
        self.seen += 1
        return functional.dropout(self.inner(x + self.plain), 0.5)


@pytest.mark.parametrize("training", [True, False])
def test_the_model_is_not_changed(training: bool) -> None:
    model = Counting().train(training)
    before = {name: (tensor, tensor.clone()) for name, tensor in model.state_dict().items()}
    parameters, plain, x = list(model.parameters()), model.plain, torch.randn(4, 8)
    state = torch.get_rng_state()
    fxremat.estimate(model, x)
    for name, now in model.state_dict().items():
        tensor, values = before[name]
        assert now.data_ptr() == tensor.data_ptr()
        assert torch.equal(now, values)
    assert all(a is b for a, b in zip(model.parameters(), parameters, strict=True))
    assert model.plain is plain
    assert model.calls == 0
    assert not hasattr(model, "cached")
    assert model.training is training
    assert torch.equal(torch.get_rng_state(), state)
    model(x).sum().backward()


def test_a_gpu_counts_blocks_and_libraries() -> None:
    model, x = on_meta(mlp), torch.empty(32, 8, device="meta")
    cpu, gpu = fxremat.estimate(model, x), fxremat.estimate(model, x, device="H100")
    assert gpu.library_bytes > 0
    assert all(point.peak_bytes % 512 == 0 for point in gpu.frontier.points)
    assert gpu.peak_bytes > cpu.peak_bytes + gpu.library_bytes
    assert gpu.fits


def test_reserved_bytes_are_the_allocators() -> None:
    model, x = on_meta(mlp, 512), torch.empty(2048, 8, device="meta")
    taken = fxremat.estimate(model, x, device="A100", budget="100% reserved")
    handed = fxremat.estimate(model, x, device="A100")
    assert taken.peak_bytes > handed.peak_bytes


def test_a_budget_is_planned_for() -> None:
    model, x = on_meta(deep), torch.empty(512, 64, device="meta")
    free = fxremat.estimate(model, x)
    assert free.plan is None
    budget = (free.least_budget_bytes + free.peak_bytes) // 2
    found = fxremat.estimate(model, x, budget=budget)
    assert found.plan is not None
    assert found.plan.predicted_peak_bytes <= found.budget_bytes == budget
    assert found.plan.predicted_s > found.predicted_s
    assert found.fits
    assert found.frontier == free.frontier


@pytest.mark.parametrize("device", ["cpu", "L4"])
def test_what_does_not_fit_is_told(device: str) -> None:
    found = fxremat.estimate(
        on_meta(mlp), torch.empty(32, 8, device="meta"), device=device, budget=1000
    )
    assert not found.fits
    assert found.plan is None
    assert found.budget_bytes == 1000
    assert found.least_budget_bytes > 1000


def test_without_a_budget_the_devices_memory_counts() -> None:
    side = 1 << 17
    model, x = on_meta(nn.Linear, side, side), torch.empty(4, side, device="meta")
    assert not fxremat.estimate(model, x, device="H100").fits
    assert fxremat.estimate(model, x).fits


def test_the_largest_batch_is_that_of_max_batch() -> None:
    model, x = mlp(), torch.randn(5, 8)
    real = fxremat.max_batch(model, x, "1 MiB")
    found = fxremat.estimate(model, x, budget="1 MiB", dim=0).batches
    assert found is not None
    assert found.largest.size == real.largest.size
    assert found.largest.least_bytes == real.largest.least_bytes


def test_no_batch_fits() -> None:
    found = fxremat.estimate(mlp(), torch.randn(5, 8), budget=1000, dim=0)
    assert found.batches is None


@pytest.mark.parametrize("where", ["cpu", "meta"])
def test_a_loss_outside_is_counted_as_if_it_ran(where: str) -> None:
    model, x = mlp(), torch.randn(64, 8)
    target = torch.zeros(64, dtype=torch.long)
    there = torch.zeros(64, dtype=torch.long, device=where)
    real = fxremat.compile(
        model, x, 1.0, loss=lambda out: functional.cross_entropy(out, target)
    ).plan
    found = fxremat.estimate(model, x, loss=lambda out: functional.cross_entropy(out, there))
    assert found.peak_bytes == real.baseline_peak_bytes


@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.Adam])
def test_what_a_loop_holds_is_counted_as_compile_does(
    optimizer: type[torch.optim.Optimizer], accumulate: bool
) -> None:
    model, x = mlp(), torch.randn(16, 8)
    options: dict[str, Any] = {"optimizer": optimizer, "accumulate": accumulate, "reserve": 999}
    real = fxremat.compile(model, x, 1.0, **options).plan
    assert fxremat.estimate(model, x, **options).peak_bytes == real.baseline_peak_bytes
    options["optimizer"] = optimizer(model.parameters())  # type: ignore[call-arg]
    assert fxremat.estimate(model, x, **options).peak_bytes == real.baseline_peak_bytes


def test_a_gpu_holds_no_optimizers_count_of_steps() -> None:
    model, x = on_meta(mlp), torch.empty(16, 8, device="meta")
    parameters = sum(-(-p.numel() * 4 // 512) * 512 for p in model.parameters())
    plain = fxremat.estimate(model, x, device="H100").peak_bytes
    adam = fxremat.estimate(model, x, device="H100", optimizer=torch.optim.Adam).peak_bytes
    assert adam - plain == 2 * parameters


def test_storages_travel_at_the_links_speed() -> None:
    model, x = on_meta(deep), torch.empty(1 << 16, 64, device="meta")
    slow = replace(DEVICES["A100"], link_bytes_per_s=1e6)
    fast = replace(slow, link_bytes_per_s=1e15)
    free = fxremat.estimate(model, x, device=slow)
    budget = (free.least_budget_bytes + 3 * free.peak_bytes) // 4
    found = {
        device: fxremat.estimate(model, x, device=device, budget=budget, offload="auto").plan
        for device in (slow, fast)
    }
    assert found[fast] is not None and found[slow] is not None
    assert found[fast].host_bytes > 0 == found[slow].host_bytes
    assert found[fast].predicted_s < found[slow].predicted_s


def test_autocast_around_counts() -> None:
    model, x = on_meta(deep), torch.empty(512, 64, device="meta")
    plain = fxremat.estimate(model, x, device="A100")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        cast = fxremat.estimate(model, x, device="A100")
    assert cast.peak_bytes < plain.peak_bytes


def test_what_is_told_is_in_the_facts() -> None:
    found = fxremat.estimate(mlp(), torch.randn(5, 8), budget="1 MiB", dim=0)
    facts = json.loads(json.dumps(found.facts()))
    assert facts["least_budget_bytes"] == found.least_budget_bytes
    assert facts["peak_bytes"] == found.peak_bytes
    assert facts["frontier"][-1] == [found.peak_bytes, found.predicted_s]
    assert facts["batches"]["largest"] == found.batches.largest.size  # type: ignore[union-attr]
    text = "\n".join(found.lines())
    assert all(len(line) <= 100 for line in text.splitlines())


@pytest.mark.parametrize("device", ["cpu", "H100"])
@pytest.mark.parametrize("counted", ["allocated", "reserved"])
def test_what_is_held_at_a_peak_adds_up_to_it(device: str, counted: str) -> None:
    model = on_meta(deep)
    parameters = sum(p.nbytes for p in model.parameters())
    on = (device, counted)
    more = {"optimizer": torch.optim.AdamW, "reserve": 1 << 20, "budget": f"min {counted}"}
    found = fxremat.estimate(model, torch.empty(512, 64), device=device, **more)
    assert found.plan is not None
    kept, least = (summed(found.at_peak(plan)) for plan in (found.kept, found.plan))
    assert sum(kept.values()) == found.peak_bytes
    assert sum(least.values()) == found.plan.counted_bytes
    for peak in (kept, least):
        assert all(nbytes >= 0 for nbytes in peak.values())
        assert peak["reserve"] == 1 << 20
        assert peak["workspaces"] == found.workspace_bytes
        assert peak.get("libraries", 0) == found.library_bytes
        assert peak["parameters"] >= parameters
        assert peak["optimizer state"] >= 2 * parameters
        assert ("allocator cache" in peak) == (on == ("H100", "reserved"))
    assert least["activations"] < kept["activations"]
    made = found.kept.memory.most_bytes(Kind.GRADIENTS)
    assert parameters <= made
    assert made > kept["gradients"]  # the peak is before all of them are made


def test_what_was_assumed_is_told() -> None:
    model, x = mlp(), torch.randn(32, 8)
    bare = fxremat.estimate(model, x)
    assert (bare.optimizer, bare.loss) == (None, "unknown")
    assert "none given" in repr(bare)
    for optimizer in (torch.optim.AdamW, torch.optim.AdamW(model.parameters())):
        given = fxremat.estimate(model, x, optimizer=optimizer, loss=torch.sum)
        assert (given.optimizer, given.loss) == ("AdamW", "given")
        assert "none given" not in repr(given)
    own = nn.Sequential(model, nn.Flatten(0), nn.Linear(256, 1))
    assert fxremat.estimate(own, x, loss="own").loss == "own"


class Breaking(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * x.sum().item() if x.sum() > 0 else x


def test_what_cannot_be_estimated_is_refused() -> None:
    model, x = mlp(), torch.randn(4, 8)
    with pytest.raises(ArgumentError):
        fxremat.estimate(model, x, device="abacus")
    with pytest.raises(ArgumentError):
        fxremat.estimate(model, x, dim=0)
    with pytest.raises(ArgumentError):
        fxremat.estimate(model, x, dynamic=True)
    with pytest.raises(BudgetError):
        fxremat.estimate(model, x, budget="much")
    with pytest.raises(RuntimeError, match="9"):  # the model's own
        fxremat.estimate(model, torch.randn(4, 9))
    with pytest.raises(SampleError):
        fxremat.estimate(model, "text")
    with pytest.raises(NoGradientError):
        fxremat.estimate(mlp().requires_grad_(False), x)
    with pytest.raises(CaptureError):
        fxremat.estimate(Breaking(), x.requires_grad_())
    with pytest.raises(CostError):
        other = fxremat.compile(nn.Linear(8, 8), torch.randn(4, 8), 1.0).plan
        fxremat.estimate(model, x.detach(), costs=other)


SEVEN = """
import resource, time, torch, fxremat
from transformers import LlamaConfig, LlamaForCausalLM
with torch.device("meta"):
    model = LlamaForCausalLM(LlamaConfig(use_cache=False)).to(torch.bfloat16)
    ids = torch.empty(4, 2048, dtype=torch.long)
assert 6.5e9 < sum(p.numel() for p in model.parameters()) < 7e9
sample = {"input_ids": ids, "labels": ids}
begin_s = time.perf_counter()
found = fxremat.estimate(
    model, sample, device="H100", budget="80 GiB", optimizer=torch.optim.AdamW
)
print(time.perf_counter() - begin_s, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
assert found.fits and found.peak_bytes > 80 << 30
"""


@pytest.mark.slow
def test_seven_billion_parameters_take_a_minute_and_little_memory() -> None:
    pytest.importorskip("transformers")
    done = subprocess.run([sys.executable, "-c", SEVEN], capture_output=True, text=True, check=True)
    seconds, peak_bytes = map(float, done.stdout.split())
    assert seconds <= 60
    assert peak_bytes <= 4 << 30


def test_parameters_of_a_model_for_another_device_are_told_as_such():
    model = nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64), nn.Linear(64, 64)).to("meta")
    model[0].requires_grad_(False)
    sample = torch.empty(8, 64, device="meta")
    memory = fxremat.estimate(model, sample, device="H100", budget="1 GiB").plan.memory
    held = {area.kind: max(memory.held_bytes(area.lives)) for area in areas_of(memory)}
    rounded = (-(-parameter.nbytes // 512) * 512 for parameter in model.parameters())
    assert held[Kind.PARAMETERS] == sum(rounded)
    assert held[Kind.INPUTS] == sample.nbytes
    assert 0 < held[Kind.BUFFERS] <= 3 * 512


class Attention(nn.Module):
    """On a GPU it returns lengths beside tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.heads, self.out = nn.Linear(64, 192), nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        q, k, v = self.heads(x).view(batch, length, 3, 4, 16).permute(2, 0, 3, 1, 4)
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(batch, length, 64)).float().square().mean()


def test_sizes_of_an_attention_on_a_gpu_are_those_that_fit():
    model = Attention().to("meta", torch.bfloat16)

    def estimated(length: int, **options: Any) -> fxremat.Estimate:
        torch._dynamo.reset()
        x = torch.zeros(1, length, 64, device="meta", dtype=torch.bfloat16)
        return fxremat.estimate(model, x, device="H100", budget="80 MiB", loss="own", **options)

    found = estimated(512, dim=1).batches
    assert found is not None
    largest = found.largest.size
    assert estimated(largest).least_budget_bytes <= 80 << 20
    assert estimated(largest + 8).least_budget_bytes > 80 << 20


@pytest.mark.parametrize("limit", [None, "256 KiB"])
@pytest.mark.parametrize("budget", ["min", 0.5, 0.8, 1.0])
def test_optimizer_state_in_host_memory_is_what_compile_chooses(budget: Any, limit: str | None):
    rows = torch.randn(16, 64)

    def made() -> tuple[nn.Module, dict[str, Any]]:
        torch._dynamo.reset()
        model = deep()
        optimizer = torch.optim.AdamW(model.parameters())
        memory = fxremat.HostMemory("auto", limit=limit, state=True)
        return model, {"optimizer": optimizer, "loss": torch.sum, "offload": memory}

    model, options = made()
    estimate = fxremat.estimate(model, rows, budget=budget, device="cpu", **options)
    model, options = made()
    if not estimate.fits:
        with pytest.raises(BudgetError):
            fxremat.compile(model, rows, budget, **options)
        return
    plan = fxremat.compile(model, rows, budget, **options).plan
    assert estimate.plan is not None
    assert estimate.budget_bytes is not None
    # An estimate assumes what the optimizer's step allocates: 2 bytes for each of a parameter.
    assert abs(estimate.budget_bytes - plan.budget_bytes) <= 64
    placed, estimated = plan.training_state, estimate.plan.training_state
    assert (placed is None) == (estimated is None) == (budget == 1.0)
    if placed is not None and estimated is not None:
        assert estimated.state_bytes == placed.state_bytes
        assert estimated.gradient_bytes == placed.gradient_bytes
