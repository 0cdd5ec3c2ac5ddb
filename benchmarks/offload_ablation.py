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

Each is measured and freed before the next, its steps timed in turns with those of the same
without a move; rows are saved as they come.

The VGG is VGG-19 with a small classifier. On a CPU its first level has eight convolutions in
place of two: kernels there copy their operands, so that the last of the backward would else
have the peak, with nothing left to move.

Run: python -m benchmarks.offload_ablation [--device cpu] [--batch N] [--size N] [--tiny]
"""

from __future__ import annotations

import argparse
import gc
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor, nn

import fxremat
from benchmarks.common import RESULTS, Spread, interleave, ratios, show
from benchmarks.devices import describe, device_named
from benchmarks.gpu_networks import VGG, Classifier
from benchmarks.rows import Row, Rows, failure
from fxremat.costs.measured.measure import peak_of, seconds_of
from fxremat.ir import Copy
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


Step = Callable[[], None]

EAGER, PLANNED = "nothing moved", "fxremat, nothing moved"
"""What the others are compared with: the same, and nothing moves. Neither has host memory."""


class Ablation:
    """One network, trained in each way, one after the other.

    Args:
        model: on the device.
        inputs: of a step, on the device.
        device: where.
        rounds: steps of each way that are timed, in turns with those of its base.
        add: called with each row.
    """

    def __init__(
        self,
        model: nn.Module,
        inputs: tuple[Tensor, ...],
        device: torch.device,
        *,
        rounds: int,
        add: Callable[[Row], None],
    ) -> None:
        self.model, self.inputs, self.device = model, inputs, device
        self._rounds, self._add = rounds, add
        self._bases: dict[str, tuple[Step, int]] = {}

    def run(self) -> None:
        """Measure every way. What fails is a row with the reason."""
        pageable = "pageable" if self.device.type == "cuda" else "fresh file"
        self._row(EAGER, EAGER, lambda: (self._loss_step(self.model), {}))
        fresh = afresh(self.device)
        self._row(f"{pageable}, blocking", EAGER, lambda: self._blocking(lambda _n: fresh))
        self._row("pinned, blocking", EAGER, lambda: self._blocking(self._pinned))
        full = self._row(PLANNED, PLANNED, lambda: self._planned(1.0))
        overlapped = "pinned, overlapped"
        least = self._row(f"{overlapped}, least peak", PLANNED, lambda: self._planned("min"))
        if "budget_bytes" in full and "budget_bytes" in least:
            halfway = (least["budget_bytes"] + full["budget_bytes"]) // 2
            self._row(f"{overlapped}, half way", PLANNED, lambda: self._planned(halfway))

    def _row(self, what: str, base: str, make: Callable[[], tuple[Step, Row]]) -> Row:
        row: Row = {"what": what, "base": base}
        try:
            step, figures = make()
            row |= figures | self._measured(what, base, step)
            del step
        except Exception as error:  # one way's failure is a row
            row |= failure(error)
        self._add(row)
        self.model.zero_grad(set_to_none=True)
        gc.collect()  # with what holds host memory; the compiled code of a base stays
        return row

    def _measured(self, what: str, base: str, step: Step) -> Row:
        step()
        step()
        self.model.zero_grad(set_to_none=True)
        held = {*self.model.parameters(), *self.model.buffers(), *self.inputs}
        resident = sum(tensor.nbytes for tensor in held)
        peak = peak_of(step, device=self.device, resident_bytes=resident)
        if what == base:
            self._bases[base] = step, peak
        base_step, base_peak = self._bases[base]
        steps = {what: step, base: base_step}
        runs = {name: (lambda s=s: seconds_of(s, device=self.device)) for name, s in steps.items()}
        seconds = interleave(runs, rounds=self._rounds)
        return {
            "peak_bytes": peak,
            "seconds": seconds[what],
            "base_peak_bytes": base_peak,
            "base_seconds": seconds[base],
        }

    def _pinned(self, nbytes: int) -> Host:
        """Memory that is allocated once, and freed with the step that uses it."""
        memory = Arena(nbytes, device=self.device).open()
        return lambda begin, size: memory[begin : begin + size]

    def _blocking(self, host_of: Callable[[int], Host]) -> tuple[Step, Row]:
        moving = BlockingOffload(afresh(self.device), self.device)
        moving.learn(self.model, self.model, self.inputs)
        moving.host = host_of(moving.total_bytes)

        def step() -> None:
            self.model.zero_grad(set_to_none=True)
            moving.forward(self.model, self.inputs).backward()

        return step, {"moved_bytes": moving.total_bytes}

    def _loss_step(self, call: Loss) -> Step:
        def step() -> None:
            self.model.zero_grad(set_to_none=True)
            call(*self.inputs).backward()

        return step

    def _planned(self, budget: int | float | str) -> tuple[Step, Row]:
        """Through fxremat."""
        compiled = fxremat.compile(self.model, self.inputs, budget, offload="only")
        step = self._loss_step(compiled)
        step()
        plan = compiled.plan
        copies = [e.op.nbytes for e in plan.timeline.events if isinstance(e.op, Copy)]
        row: Row = {"budget_bytes": plan.budget_bytes, "moved_bytes": sum(copies) // 2}
        row["predicted_s"] = plan.predicted_s
        if copies:
            row["overlap"] = compiled.trace_step(step).overlap
        return step, row


def line(row: Row) -> list[str]:
    """A line of the table."""
    if "failed" in row:
        return [row["what"], row["failed"][:40], *[""] * 5]
    against = ratios({"own": row["seconds"], "base": row["base_seconds"]}, "own", "base")
    return [
        row["what"],
        format_bytes(row["peak_bytes"]),
        f"{row['peak_bytes'] / row['base_peak_bytes']:.2f}",
        format_bytes(row["moved_bytes"]) if row.get("moved_bytes") else "",
        Spread.of(row["seconds"]).text(1e3),
        f"{against.median:.2f}",
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
    name = "offload_ablation" if device.type == "cuda" else "offload_ablation_cpu"
    settings = {"batch": batch, "size": size, "tiny": options.tiny}
    results = Rows(name, {**describe(device), **settings}, folder=options.results)
    found = Ablation(model.to(device), inputs, device, rounds=options.rounds, add=results.add)
    found.run()
    columns = ["", "peak", "÷ base", "moved", "step ms", "÷ base", "overlap"]
    title = f"VGG, {batch} x {size}²: inputs of convolutions and poolings moved"
    show(title, columns, [line(row) for row in results.rows])
    results.save()
    if any("failed" in row for row in results.rows):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
