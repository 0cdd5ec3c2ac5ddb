"""What the tests on a GPU share: two models whose kernels are deterministic, and their steps.

Attention is computed as products and a softmax, pooling takes means: every kernel of these
models gives the same bits each time, and torch refuses one that would not. So a difference is
never the device's.
"""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Callable, Iterator
from typing import Any, Literal

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._pytree import tree_map

import fxremat
from benchmarks.devices import deterministic_kernels, forget, math_attention
from fxremat.ir import Copy
from fxremat.module.compiled import CompiledModule
from tests.models import ZooModel
from tests.models.gpt import GPTConfig, gpt_entry
from tests.models.images import image_entry
from tests.models.reference import StepResult, compile_reference, move, run_step
from tests.models.resnet import ResNet
from tests.models.zoo import drawn_once

# Read once, when cuBLAS is first used: so before any test runs.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

needs_cuda = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

CUDA = torch.device("cuda", 0)

Mode = Literal["auto", "only", False]
Share = float | Literal["min"]


def _resnet() -> ResNet:
    model = ResNet(width=16, classes=10)
    model.stem[-1] = nn.AvgPool2d(3, stride=2, padding=1)
    return model


_GPT = GPTConfig(vocabulary=512, context=256, width=256, blocks=6, dropout=0.1)
ENTRIES: dict[str, ZooModel] = {
    "gpt": gpt_entry("gpt", _GPT, batch=16, length=256),
    # Sizes that are no multiples of what the allocator rounds up to.
    "resnet50": image_entry("resnet50", drawn_once(_resnet), batch=9, size=125, classes=10),
}


MODES: dict[str, Mode] = {"recompute": False, "auto": "auto", "only": "only"}


def cases(*few: str) -> pytest.MarkDecorator:
    """Parametrize ``name`` and ``mode`` over all models and modes; all but ``few`` are slow."""
    found = [
        pytest.param(name, mode, id=f"{name}-{label}", marks=_unless(f"{name}-{label}" in few))
        for name in ENTRIES
        for label, mode in MODES.items()
    ]
    return pytest.mark.parametrize(("name", "mode"), found)


def _unless(is_quick: bool) -> list[pytest.MarkDecorator]:
    return [] if is_quick else [pytest.mark.slow]


@pytest.fixture
def same_bits_each_time() -> Iterator[None]:
    """Only deterministic kernels; nothing that one test compiled is there in another."""
    forget(CUDA)
    with deterministic_kernels(), math_attention():
        yield
    forget(CUDA)


@dataclasses.dataclass(frozen=True)
class Trained:
    """A fresh model and what trains it.

    Attributes:
        model: on the GPU.
        call: its plan.
    """

    model: nn.Module
    call: CompiledModule


def compiled(entry: ZooModel, mode: Mode, share: Share, **options: Any) -> Trained:
    """Compiled at ``share`` of the way from the least budget to the full peak."""
    if share == "min":
        return _planned(entry, mode, "min", **options)
    least, full = _ends(entry, mode)
    return _planned(entry, mode, least + int(share * (full - least)), **options)


@functools.cache
def _ends(entry: ZooModel, mode: Mode) -> tuple[int, int]:
    """The least budget and the full peak."""
    plan = _planned(entry, mode, "min").call.plan
    forget(CUDA)
    return plan.least_budget_bytes, plan.baseline_peak_bytes


def _planned(entry: ZooModel, mode: Mode, budget: int | str, **options: Any) -> Trained:
    model = entry.build().to(CUDA)
    args, kwargs = move(entry.sample(0), CUDA)
    loss = None if entry.loss_inside else entry.loss
    sample = fxremat.Sample(args, kwargs)
    call = fxremat.compile(model, sample, budget, loss=loss, offload=mode, **options)
    return Trained(model, call)


@functools.cache
def reference_steps(name: str, count: int, *, accumulate: bool = False) -> list[StepResult]:
    """The same steps through ``aot_eager``; on the CPU, so that no peak has them."""
    entry = ENTRIES[name]
    model = entry.build().to(CUDA)
    found = steps(entry, model, compile_reference(entry, model), count, accumulate=accumulate)
    del model
    forget(CUDA)
    return found


def steps(
    entry: ZooModel, model: nn.Module, call: Callable[..., Any], count: int, *, accumulate: bool
) -> list[StepResult]:
    """Steps with other data and other random numbers each time; on the CPU what they leave."""
    results = []
    for seed in range(count):
        if not accumulate:
            model.zero_grad(set_to_none=True)
        result = run_step(entry, model, call, data_seed=seed, step_seed=seed)
        fields = {f.name: getattr(result, f.name) for f in dataclasses.fields(result)}
        results.append(dataclasses.replace(result, **tree_map(_on_the_cpu, fields)))
    return results


def _on_the_cpu(value: object) -> object:
    return value.cpu() if isinstance(value, Tensor) else value


def step_of(entry: ZooModel, trained: Trained) -> Callable[[], None]:
    """A step whose data is on the device already."""
    args, kwargs = move(entry.sample(0), CUDA)
    target = torch.zeros(len(args[0]), dtype=torch.int64, device=CUDA)

    def step() -> None:
        trained.model.zero_grad(set_to_none=True)
        outputs = trained.call(*args, **kwargs)
        loss = outputs if entry.loss_inside else functional.cross_entropy(outputs, target)
        del outputs
        loss.backward()

    return step


def copies(call: CompiledModule) -> int:
    """How many transfers a step of this plan has."""
    return sum(isinstance(event.op, Copy) for event in call.plan.timeline.events)
