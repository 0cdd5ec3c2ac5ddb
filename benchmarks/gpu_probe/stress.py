"""Twenty steps while copies are late, on another stream, with dropped forwards: same bits."""

from __future__ import annotations

import contextlib
import hashlib
import random
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

import fxremat
from benchmarks.devices import deterministic_kernels, forget, math_attention
from benchmarks.gpu_probe.probe import Finding, Probe
from fxremat.ir import Copy
from tests.models.gpt import GPT, GPTConfig, tokens
from tests.models.zoo import drawn_once
from tests.moving import intercept_copies

STEPS = 20

LATE_CYCLES = 5_000_000
"""Some three milliseconds on a GPU, before each copy: all of them together take far longer than
a step of this model computes."""

LATE_S = 0.003

Around = Callable[[int], contextlib.AbstractContextManager[object]]
"""What a step, of that number, runs inside of."""


class Stress:
    """A GPT with dropout, and the digests of its steps with everything kept."""

    def __init__(self, probe: Probe) -> None:
        self._device = probe.device
        self._batch, self._length = (2, 64) if probe.tiny else (8, 256)
        self._config = GPTConfig(
            vocabulary=96 if probe.tiny else 512,
            context=self._length,
            width=64 if probe.tiny else 256,
            blocks=3 if probe.tiny else 6,
            dropout=0.1,
        )
        self._steps = 4 if probe.tiny else STEPS
        self._build = drawn_once(lambda: GPT(self._config))
        self._expected: list[str] | None = None

    def reference(self) -> Finding:
        """Twice everything kept: what the others are compared with."""
        model, call = self._planned(1.0, offload=False)
        self._expected = self._digests(model, call)
        again = self._digests(model, call)
        same = self._expected == again
        return Finding("same bits" if same else "OTHER bits", "same bits", same)

    def variant(
        self, *, offload: Any, around: Around | None = None, dropped: bool = False
    ) -> Finding:
        """The same steps within the least budget, inside of what goes wrong."""
        model, call = self._planned("min", offload=offload)
        copies = sum(isinstance(e.op, Copy) for e in call.plan.timeline.events)
        found = self._digests(model, call, around=around, dropped=dropped)
        if self._expected is None:
            raise RuntimeError("there is nothing to compare with: the reference failed")
        wrong = [i for i, (a, b) in enumerate(zip(found, self._expected, strict=True)) if a != b]
        return Finding(
            f"{len(found) - len(wrong)} of {len(found)} steps the same, {copies} copies",
            "all the same",
            not wrong,
            {"different_steps": wrong, "copies": copies, "host_bytes": call.plan.host_bytes},
        )

    def _planned(self, budget: Any, *, offload: Any) -> tuple[GPT, fxremat.CompiledModule]:
        forget(self._device)
        model = self._build().to(self._device)
        return model, fxremat.compile(model, self._data(0), budget, offload=offload)

    def _data(self, seed: int) -> tuple[Tensor, ...]:
        drawn = tokens(
            seed, vocabulary=self._config.vocabulary, batch=self._batch, length=self._length
        )
        return tuple(x.to(self._device) for x in drawn)

    def _digests(
        self,
        model: GPT,
        call: fxremat.CompiledModule,
        *,
        around: Around | None = None,
        dropped: bool = False,
    ) -> list[str]:
        """Of loss and gradients of each step."""
        found = []
        for seed in range(self._steps):
            with around(seed) if around else contextlib.nullcontext():
                if dropped and seed % 2:
                    torch.manual_seed(1000 + seed)
                    call(*self._data(1000 + seed))  # its loss dies at once
                model.zero_grad(set_to_none=True)
                torch.manual_seed(seed)
                loss = call(*self._data(seed))
                loss.backward()
                gradients = [p.grad for p in model.parameters() if p.grad is not None]
                found.append(_digest([loss.detach(), *gradients]))
        return found


def _digest(tensors: list[Tensor]) -> str:
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(tensor.detach().cpu().flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def stress(probe: Probe) -> None:
    """Every disturbance alone, then all at once."""
    with deterministic_kernels(), math_attention():
        made = Stress(probe)
        probe.ask("everything kept, twice", made.reference)
        probe.ask("recomputed", lambda: made.variant(offload=False))
        late = lambda _step: late_copies(probe)
        for offload in ("only", "auto"):
            ask = lambda what, o=offload, **how: probe.ask(
                f"{what}, offload={o!r}", lambda: made.variant(offload=o, **how)
            )
            ask("undisturbed")
            ask("late copies", around=late)
            ask("dropped forwards", dropped=True)
            ask("late copies, dropped forwards", around=late, dropped=True)
            if probe.cuda:
                ask("another stream", around=lambda _step: another_stream(probe.device))
                ask("streams in turns", around=lambda s: _in_turns(probe.device, s))
                ask("all at once", around=lambda s: _all_at_once(probe, s), dropped=True)


@contextlib.contextmanager
def late_copies(probe: Probe) -> Iterator[None]:
    """Each copy begins after a while, on its own stream or thread; how long is drawn."""
    draw = random.Random(0)

    def wait_first(copy: Callable[[], None]) -> None:
        if probe.cuda:
            sleep: Any = torch.cuda._sleep
            sleep(int(draw.random() * LATE_CYCLES))
        else:
            time.sleep(draw.random() * LATE_S)
        copy()

    with intercept_copies(wait_first):
        yield


@contextlib.contextmanager
def another_stream(device: torch.device) -> Iterator[None]:
    """Everything inside runs on a new stream, ordered with what is before and after."""
    stream: Any = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        yield
    torch.cuda.current_stream(device).wait_stream(stream)


def _in_turns(device: torch.device, step: int) -> contextlib.AbstractContextManager[object]:
    return another_stream(device) if step % 2 else contextlib.nullcontext()


@contextlib.contextmanager
def _all_at_once(probe: Probe, step: int) -> Iterator[None]:
    with late_copies(probe), _in_turns(probe.device, step):
        yield
