"""The promise on a GPU, with storages that travel: bytes, bits, and a host that never waits."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import fxremat
from benchmarks.gpu import host_waits
from fxremat.compiled import CompiledModule
from fxremat.ir import Copy
from tests.models import ZooModel
from tests.models.bits import assert_bitwise_equal, bitwise_equal
from tests.models.gpt import GPTConfig, gpt_entry
from tests.models.images import image_entry
from tests.models.reference import StepResult, compile_reference, move, run_step
from tests.models.resnet import ResNet
from tests.models.zoo import drawn_once

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

CUDA = torch.device("cuda", 0)
STEPS = 6

_GPT = GPTConfig(vocabulary=512, context=256, width=256, blocks=6, dropout=0.1)
_RESNET = drawn_once(lambda: ResNet(width=16, classes=10))
ENTRIES: dict[str, ZooModel] = {
    "gpt": gpt_entry("gpt", _GPT, batch=16, length=256),
    # Sizes that are no multiples of what the allocator rounds up to.
    "resnet50": image_entry("resnet50", _RESNET, batch=9, size=125, classes=10),
}

models = pytest.mark.parametrize("name", ENTRIES)
modes = pytest.mark.parametrize("mode", ["auto", "only"])
budgets = pytest.mark.parametrize("share", ["min", 0.5, 1.0])


@pytest.fixture(autouse=True)
def _deterministic() -> Iterator[None]:
    """Same inputs, same bits, wherever torch has such kernels; no compiled code left over."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    cudnn: Any = torch.backends.cudnn
    before = (cudnn.deterministic, cudnn.benchmark)
    torch.use_deterministic_algorithms(True, warn_only=True)
    cudnn.deterministic, cudnn.benchmark = True, False
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)
        cudnn.deterministic, cudnn.benchmark = before
        torch._dynamo.reset()


def compiled(
    entry: ZooModel, mode: str, share: float | str, **options: Any
) -> tuple[nn.Module, CompiledModule]:
    """A fresh model, compiled at ``share`` of the way from the least budget to the full peak."""
    model = entry.build().to(CUDA)
    args, kwargs = move(entry.sample(0), CUDA)
    sample = fxremat.Sample(args, kwargs)
    loss = None if entry.loss_inside else entry.loss

    def at(budget: int | str) -> CompiledModule:
        return fxremat.compile(model, sample, budget, loss=loss, offload=mode, **options)

    call = at("min")
    if share == "min":
        return model, call
    least, full = call.plan.least_budget_bytes, call.plan.baseline_peak_bytes
    torch._dynamo.reset()
    return model, at(least + int(float(share) * (full - least)))


def reference_steps(entry: ZooModel, count: int, *, accumulate: bool = False) -> list[StepResult]:
    """The same steps through ``aot_eager``, if this device gives the same bits twice."""
    found = []
    for _ in range(2):
        torch._dynamo.reset()
        model = entry.build().to(CUDA)
        found.append(steps(entry, model, compile_reference(entry, model), count, accumulate))
    if not bitwise_equal(*found):
        pytest.skip("without fxremat, too, two runs of this step differ on this device")
    torch._dynamo.reset()
    return found[0]


def steps(
    entry: ZooModel, model: nn.Module, call: Callable[..., Any], count: int, accumulate: bool
) -> list[StepResult]:
    """Steps with other data and other random numbers each time."""
    results = []
    for seed in range(count):
        if not accumulate:
            model.zero_grad(set_to_none=True)
        results.append(run_step(entry, model, call, data_seed=seed, step_seed=seed))
    return results


def step_of(entry: ZooModel, model: nn.Module, call: Callable[..., Any]) -> Callable[[], None]:
    """A step whose data is on the device already."""
    args, kwargs = move(entry.sample(0), CUDA)
    batch = len(args[0])
    target = torch.zeros(batch, dtype=torch.int64, device=CUDA)

    def step() -> None:
        model.zero_grad(set_to_none=True)
        outputs = call(*args, **kwargs)
        loss = outputs if entry.loss_inside else functional.cross_entropy(outputs, target)
        del outputs
        loss.backward()

    return step


def copies(call: CompiledModule) -> int:
    return sum(isinstance(event.op, Copy) for event in call.plan.timeline.events)


@budgets
@modes
@models
def test_the_peak_is_within_the_budget_and_the_bits_are_the_same(
    name: str, mode: str, share: float | str
):
    entry = ENTRIES[name]
    expected = reference_steps(entry, 1)
    model, call = compiled(entry, mode, share)
    assert_bitwise_equal(steps(entry, model, call, 1, accumulate=False), expected)
    assert len(call.plans) == 1, "the step was captured again"
    if share == 1.0:
        assert copies(call) == 0
    elif mode == "only":
        assert copies(call) > 0
    args, kwargs = move(entry.sample(0), CUDA)

    def step() -> None:
        model.zero_grad(set_to_none=True)
        entry.loss(call(*args, **kwargs)).backward()

    step()
    measured = fxremat.measure_step(model, step).peak_bytes
    plan = call.plan
    assert plan.predicted_peak_bytes <= plan.budget_bytes
    assert measured <= plan.budget_bytes, (
        f"{measured - plan.budget_bytes} bytes over, of which "
        f"{measured - torch.cuda.memory_stats(CUDA)['requested_bytes.all.peak']} were never "
        "asked for: the allocator hands out blocks that it does not split"
    )


@modes
@models
def test_slots_are_used_again_with_other_data(name: str, mode: str):
    entry = ENTRIES[name]
    expected = reference_steps(entry, STEPS, accumulate=True)
    model, call = compiled(entry, mode, "min", accumulate=True)
    host_bytes = call.plan.host_bytes
    assert_bitwise_equal(steps(entry, model, call, STEPS, accumulate=True), expected)
    if host_bytes:
        planned = call.__dict__["_compiler"].latest.planned
        assert planned.arena.allocated_bytes == host_bytes, "a step did not give its memory back"


@modes
@models
def test_the_host_never_waits_in_a_step(name: str, mode: str):
    entry = ENTRIES[name]
    model, call = compiled(entry, mode, "min")
    step = step_of(entry, model, call)
    for _ in range(2):  # libraries wait when they are loaded
        step()
    assert host_waits(step) == {}
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()


def test_waits_are_seen_where_there_are_any():
    x = torch.ones(1 << 20, device=CUDA)

    def step() -> None:
        assert x.sum().item() == 1 << 20

    step()
    assert sum(host_waits(step).values()) >= 1


@modes
def test_steps_may_overlap(mode: str):
    entry = ENTRIES["gpt"]

    def interleaved(model: nn.Module, call: Callable[..., Any]) -> list[Any]:
        for turn in range(2):
            losses = []
            for seed in (turn, turn + 7):
                args, kwargs = move(entry.sample(seed), CUDA)
                torch.manual_seed(seed)
                losses.append(entry.loss(call(*args, **kwargs)))
            for loss in losses:
                loss.backward()
        return [p.grad for p in model.parameters()]

    model, call = compiled(entry, mode, "min", accumulate=True)
    ours = interleaved(model, call)
    torch._dynamo.reset()
    model = entry.build().to(CUDA)
    assert_bitwise_equal(ours, interleaved(model, compile_reference(entry, model)))
