"""Real models captured as chains, and their seconds as those of other devices.

``fxremat.compile`` captures a model and gives its chain. Sizes are exact; seconds are of this
machine's processor. ``Captured.on`` scales all of them alike. See ``pofo``.
"""

from __future__ import annotations

import pickle
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import (
    FlopCounterMode,
    sdpa_backward_flop_count,
    sdpa_flop_count,
)

import fxremat
from benchmarks.steps import planned
from fxremat.ir import Chain, Costs
from fxremat.passes.emit.body import GIVE
from tests.models.densenet import DenseNet
from tests.models.gpt import GPTConfig, gpt_entry
from tests.models.images import image_entry
from tests.models.resnet import ResNet
from tests.models.zoo import ZooModel, drawn_once

_BATCH, _SIZE = 4, 224


def _images(name: str, build: Callable[[], nn.Module]) -> ZooModel:
    return image_entry(name, drawn_once(build), batch=_BATCH, size=_SIZE, classes=1000)


NETWORKS = (
    _images("ResNet-101", lambda: ResNet(depths=(3, 4, 23, 3), classes=1000)),
    _images("ResNet-152", lambda: ResNet(depths=(3, 8, 36, 3), classes=1000)),
    _images(
        "DenseNet-161",
        lambda: DenseNet(growth=48, depths=(6, 12, 36, 24), classes=1000, chained=True),
    ),
    gpt_entry(
        "GPT, 24 blocks of 768",
        GPTConfig(vocabulary=8192, context=1024, width=768, heads=12, blocks=24),
        batch=1,
        length=1024,
    ),
)


@dataclass(frozen=True, slots=True)
class Device:
    """What a GPU is taken to do; beside what they have at most, see ``DEVICES``."""

    name: str
    flop_per_s: float
    memory_bytes_per_s: float
    link_bytes_per_s: float

    def seconds(self, work: Work) -> float:
        """Of ``work``."""
        return work.flop / self.flop_per_s + work.nbytes / self.memory_bytes_per_s


DEVICES = (
    Device("V100, 12 GB/s", 12.5e12, 800e9, 12e9),
    Device("H200, 55 GB/s", 300e12, 4e12, 55e9),
)
"""At most 14 TFLOP/s in float32 and 900 GB/s; 495 TFLOP/s in TF32 and 4.8 TB/s."""


@dataclass(frozen=True, slots=True)
class Work:
    """Operations of a step, and bytes that they read and write."""

    flop: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Captured:
    """A network as a chain, its seconds those of this machine."""

    name: str
    chain: Chain
    costs: Costs
    work: Work

    def on(self, device: Device) -> Costs:
        """The costs with the seconds of a device."""
        kept_s = sum(s.forward_s + s.backward_s for s in self.costs.stages)
        return _scaled(self.costs, device.seconds(self.work) / kept_s)


def captured(entry: ZooModel, folder: Path | None) -> Captured:
    """The chain of a model, from ``folder`` if it is there."""
    path = folder / f"{entry.name}.pickle" if folder else None
    if path and path.exists():
        kept: Captured = pickle.loads(path.read_bytes())
        return kept
    start = time.perf_counter()
    _, compiled = planned(entry, 1.0)
    costs = with_gradients_fixed(compiled.plan.costs, parameter_gradients(compiled))
    found = Captured(entry.name, compiled.plan.chain, costs, work_of(entry))
    print(f"{entry.name}: {len(found.chain)} stages in {time.perf_counter() - start:.0f} s")
    if path:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(pickle.dumps(found))
    return found


def parameter_gradients(compiled: fxremat.CompiledModule) -> dict[int, int]:
    """By stage: bytes of the parameter gradients that its backward finishes.

    Costs have them among all that the backward holds; the emitted graph tells them apart.
    """
    body = compiled._training.latest[1].backward.body
    made = {v: (str(s.target), i) for s in body.statements for i, v in enumerate(s.makes)}
    found: dict[int, int] = {}
    for gradient in (
        v for s in body.statements if s.target == GIVE for v in s.arguments[1].values()
    ):
        name, index = made[gradient]
        graph: Any = body.stages[name].graph
        stage = int(name.removeprefix("stage").split("_")[0])
        nbytes = graph.output_node().args[0][index].meta["val"].nbytes
        found[stage] = found.get(stage, 0) + nbytes
    return found


def with_gradients_fixed(costs: Costs, finished: dict[int, int]) -> Costs:
    """All parameter gradients held during the whole step, not from when they are finished."""
    stages = list(costs.stages)
    done = 0
    for i in reversed(range(len(stages))):
        left = stages[i].gradient_bytes - done
        assert left >= 0
        stages[i] = replace(stages[i], gradient_bytes=left)
        done += finished.get(i, 0)
    return Costs(tuple(stages), costs.fixed_bytes + done)


class _Traffic(TorchDispatchMode):
    """Adds up what operations read and write; views do neither."""

    def __init__(self) -> None:
        super().__init__()
        self.nbytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func.namespace == "aten" and not func.is_view:
            leaves = tree_leaves((args, kwargs, out))
            self.nbytes += sum(x.nbytes for x in leaves if isinstance(x, torch.Tensor))
        return out


def work_of(entry: ZooModel) -> Work:
    """Of a step, counted without computing anything."""
    aten = torch.ops.aten
    attention = {
        aten._scaled_dot_product_flash_attention_for_cpu: (
            lambda q, k, v, *_, **__: sdpa_flop_count(q, k, v)
        ),
        aten._scaled_dot_product_flash_attention_for_cpu_backward: (
            lambda gradient, q, k, v, *_, **__: sdpa_backward_flop_count(gradient, q, k, v)
        ),
    }
    args, kwargs = entry.sample(0)
    model = entry.build()
    with FakeTensorMode(allow_non_fake_inputs=True) as fake:
        shapes = {
            name: nn.Parameter(fake.from_tensor(p.detach())) for name, p in model.named_parameters()
        }
        shapes |= {name: fake.from_tensor(b) for name, b in model.named_buffers()}
        counter = FlopCounterMode(display=False, custom_mapping=attention)
        with counter, _Traffic() as traffic:
            outputs = torch.func.functional_call(model, shapes, args, kwargs)
            entry.loss(outputs).backward()
    return Work(counter.get_total_flops(), traffic.nbytes)


def _scaled(costs: Costs, factor: float) -> Costs:
    stages = [
        replace(
            stage,
            forward_s=stage.forward_s * factor,
            backward_s=stage.backward_s * factor,
            rebuild_s=stage.rebuild_s * factor,
        )
        for stage in costs.stages
    ]
    return Costs(tuple(stages), costs.fixed_bytes)
