"""What pinned memory and overlap are worth: the inputs of convolutions and poolings, moved.

After Hascoet et al., Reducing the Memory Cost of Training Convolutional Neural Networks by
CPU Offloading (2019), table 2. A VGG trains while the inputs of its convolutions and
poolings go to host memory and come back:

* blocking, in memory that is allocated for each of them: pageable, on a GPU; where the step
  runs on a CPU, a file that is mapped and touched for the first time;
* blocking, in memory that is allocated once: pinned; on a CPU the arena's file;
* overlapped: fxremat with ``offload="only"``, at the least peak that it can reach, and half way
  from there to the full one. It moves what its plan says, not more; on a CPU a worker thread
  copies.

The VGG is VGG-19 with a small classifier. On a CPU its first level has eight convolutions in
place of two: kernels there copy their operands, so that the last of the backward would else
have the peak, with nothing left to move.

Run: python -m benchmarks.offload_ablation [--device cpu] [--batch N] [--size N] [--tiny]
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import fxremat
from benchmarks.common import RESULTS, Spread, interleave, save, show
from benchmarks.devices import describe, device_named
from benchmarks.gpu_networks import VGG, Classifier
from fxremat.ir import Copy
from fxremat.measure import peak_of, seconds_of
from fxremat.runtime.arena import Arena
from fxremat.runtime.memory import file_memory, folder_of
from fxremat.units import format_bytes
from tests.models.images import images, labels
from tests.models.zoo import drawn_once

Host = Callable[[int, int], Tensor]
"""Bytes on the host, given where they would begin in an arena, and how many they are."""

ALIGNMENT_BYTES = 512

Loss = Callable[..., Tensor]


@dataclass(slots=True)
class Away:
    """A tensor on the host.

    Attributes:
        host: its bytes.
        readers: how many of those who saved it have not read it yet.
        back: the tensor, from its first reader to its last.
    """

    host: Tensor
    shape: torch.Size
    dtype: torch.dtype
    readers: int
    back: Tensor | None = None


@dataclass(slots=True)
class BlockingOffload:
    """Moves saved tensors that are inputs of convolutions and poolings, the host waiting.

    A ReLU in place saves the same tensor as the layer that reads its result: it moves once,
    and comes back once.

    Attributes:
        host: where to.
        device: from where.
        tensors: of what a forward saves, by the order in which it does, which tensor that
            is; those alone that are meant, as found by :meth:`learn`.
        readers: how often each of them is saved.
        total_bytes: what they take on the host.
    """

    host: Host
    device: torch.device
    tensors: dict[int, int] = field(default_factory=dict)
    readers: Counter[int] = field(default_factory=Counter)
    total_bytes: int = 0
    _saved: int = 0
    _offset: int = 0
    _away: dict[int, Away] = field(default_factory=dict)

    def learn(self, model: nn.Module, loss: Loss, inputs: tuple[Tensor, ...]) -> None:
        """Run one forward to see which saved tensors lie where a layer's input does."""
        read: set[int] = set()
        saved: list[tuple[int, int]] = []

        def note(_layer: nn.Module, arguments: tuple[Tensor, ...]) -> None:
            read.add(arguments[0].data_ptr())

        def pack(x: Tensor) -> Tensor:
            saved.append((x.data_ptr(), x.nbytes))
            return x

        layers = [m for m in model.modules() if isinstance(m, nn.Conv2d | nn.MaxPool2d)]
        hooks = [layer.register_forward_pre_hook(note) for layer in layers]
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            loss(*inputs)
        for hook in hooks:
            hook.remove()
        meant = read - {x.data_ptr() for x in inputs}  # those the caller holds anyway
        # All that was saved was there at once: no two had the same address.
        self.tensors = {i: at for i, (at, _) in enumerate(saved) if at in meant}
        self.readers = Counter(self.tensors.values())
        self.total_bytes = sum(
            _aligned(nbytes) for at, nbytes in dict(saved).items() if at in meant
        )

    def forward(self, loss: Loss, inputs: tuple[Tensor, ...]) -> Tensor:
        """The loss, its inputs on the host."""
        self._saved = self._offset = 0
        self._away = {}
        with torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack):
            return loss(*inputs)

    def _pack(self, x: Tensor) -> Tensor | Away:
        tensor = self.tensors.get(self._saved)
        self._saved += 1
        if tensor is None:
            return x
        if tensor not in self._away:
            host = self.host(self._offset, x.nbytes)
            host.copy_(x.reshape(-1).view(torch.uint8))
            self._offset += _aligned(x.nbytes)
            self._away[tensor] = Away(host, x.shape, x.dtype, self.readers[tensor])
        return self._away[tensor]

    def _unpack(self, packed: Tensor | Away) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        if packed.back is None:
            whole = torch.empty(packed.host.numel(), dtype=torch.uint8, device=self.device)
            packed.back = whole.copy_(packed.host).view(packed.dtype).view(packed.shape)
        found = packed.back
        packed.readers -= 1
        if not packed.readers:
            packed.back = None
        return found


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def afresh(device: torch.device) -> Host:
    """Memory that nobody has touched, each time."""
    if device.type == "cuda":
        return lambda _begin, nbytes: torch.empty(nbytes, dtype=torch.uint8)
    folder = folder_of(None)
    return lambda _begin, nbytes: torch.frombuffer(
        file_memory(nbytes, folder=folder), dtype=torch.uint8
    )


@dataclass(slots=True)
class Variant:
    """A way to train.

    Attributes:
        what: for the table.
        step: gradients dropped, forward, backward.
        base: the variant that does the same and moves nothing.
        row: what goes into the JSON file.
    """

    what: str
    step: Callable[[], None]
    base: str
    row: dict[str, Any] = field(default_factory=dict)


class Ablation:
    """One network, trained in each way."""

    def __init__(self, model: nn.Module, inputs: tuple[Tensor, ...], device: torch.device) -> None:
        self.model, self.inputs, self.device = model, inputs, device
        self.variants: dict[str, Variant] = {}
        self._arena: Arena | None = None

    def run(self, rounds: int) -> list[dict[str, Any]]:
        """Measure every way and return a row for each."""
        self._add("nothing moved", self._loss_step(self.model), base="nothing moved")
        fresh = self._blocking(afresh(self.device))
        pageable = "pageable" if self.device.type == "cuda" else "fresh file"
        self._add(f"{pageable}, blocking", fresh, base="nothing moved")
        self._add("pinned, blocking", self._blocking(self._arena_memory), base="nothing moved")
        full_bytes = self._plan("fxremat, nothing moved", 1.0)
        least_bytes = self._plan("pinned, overlapped, least peak", "min")
        halfway_bytes = (least_bytes + full_bytes) // 2
        self._plan("pinned, overlapped, half way", halfway_bytes)
        seconds = {name: self._timed(v.step) for name, v in self.variants.items()}
        for name, values in interleave(seconds, rounds=rounds).items():
            self.variants[name].row["seconds"] = values
        return [{"what": v.what, "base": v.base, **v.row} for v in self.variants.values()]

    def _arena_memory(self, begin: int, nbytes: int) -> Tensor:
        assert self._arena is not None
        return self._host[begin : begin + nbytes]

    def _blocking(self, host: Host) -> Callable[[], None]:
        moving = BlockingOffload(host, self.device)
        moving.learn(self.model, self.model, self.inputs)
        if self._arena is None:
            self._arena = Arena.create(moving.total_bytes, device=self.device)
            self._host = self._arena.open()

        def step() -> None:
            self.model.zero_grad(set_to_none=True)
            moving.forward(self.model, self.inputs).backward()

        return step

    def _loss_step(self, call: Loss) -> Callable[[], None]:
        def step() -> None:
            self.model.zero_grad(set_to_none=True)
            call(*self.inputs).backward()

        return step

    def _plan(self, what: str, budget: int | float | str) -> int:
        """Through fxremat. Returns the budget."""
        compiled = fxremat.compile(self.model, self.inputs, budget, offload="only")
        self._add(what, self._loss_step(compiled), base="fxremat, nothing moved")
        plan, row = compiled.plan, self.variants[what].row
        copies = [e.op.nbytes for e in plan.timeline.events if isinstance(e.op, Copy)]
        row |= {"budget_bytes": plan.budget_bytes, "moved_bytes": sum(copies) // 2}
        row["predicted_s"] = plan.predicted_s
        if copies:
            row["overlap"] = compiled.trace_step(self.variants[what].step).overlap
        return plan.budget_bytes

    def _add(self, what: str, step: Callable[[], None], *, base: str) -> None:
        step()
        step()
        self.model.zero_grad(set_to_none=True)
        held = {*self.model.parameters(), *self.model.buffers(), *self.inputs}
        resident = sum(tensor.nbytes for tensor in held)
        peak = peak_of(step, device=self.device, resident_bytes=resident)
        row: dict[str, Any] = {"peak_bytes": peak}
        if "blocking" in what:
            assert self._arena is not None
            row["moved_bytes"] = self._arena.nbytes
        self.variants[what] = Variant(what, step, base, row)

    def _timed(self, step: Callable[[], None]) -> Callable[[], float]:
        return lambda: seconds_of(step, device=self.device)


def line(row: dict[str, Any], rows: list[dict[str, Any]]) -> list[str]:
    """A line of the table."""
    (base,) = (other for other in rows if other["what"] == row["base"])
    spread = Spread.of(row["seconds"])
    return [
        row["what"],
        format_bytes(row["peak_bytes"]),
        f"{row['peak_bytes'] / base['peak_bytes']:.2f}",
        format_bytes(row["moved_bytes"]) if row.get("moved_bytes") else "",
        spread.text(1e3),
        f"{spread.median / Spread.of(base['seconds']).median:.2f}",
        f"{row['overlap']:.0%}" if "overlap" in row else "",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--batch", type=int, help="32, or 4 on a CPU")
    parser.add_argument("--size", type=int, help="of the images: 128, or 64 if tiny")
    parser.add_argument("--tiny", action="store_true", help="small layers, to try the script")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--results", type=Path, default=RESULTS, help="where the file goes")
    options = parser.parse_args()
    device = device_named(options.device, remedy="--device cpu runs it on the CPU")
    size = options.size or (64 if options.tiny else 128)
    batch = options.batch or (32 if device.type == "cuda" else 4)
    width, hidden = (16, 16) if options.tiny else (64, 512)
    depths = (2 if device.type == "cuda" else 8, 2, 4, 4, 4)
    make = drawn_once(
        lambda: Classifier(VGG(depths=depths, width=width, hidden=hidden, dropout=0.0))
    )
    model = make()
    inputs = (
        images(0, batch=batch, size=size).to(device),
        labels(0, batch=batch, classes=1000).to(device),
    )
    rows = Ablation(model.to(device), inputs, device).run(options.rounds)
    columns = ["", "peak", "÷ base", "moved", "step ms", "÷ base", "overlap"]
    title = f"VGG, {batch} x {size}²: inputs of convolutions and poolings moved"
    show(title, columns, [line(row, rows) for row in rows])
    settings = {"batch": batch, "size": size, "tiny": options.tiny}
    name = "offload_ablation" if device.type == "cuda" else "offload_ablation_cpu"
    save(name, {**describe(device), **settings, "rows": rows}, folder=options.results)


if __name__ == "__main__":
    main()
