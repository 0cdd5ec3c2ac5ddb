"""Peak bytes and seconds of a real step, on the CPU and on CUDA."""

from __future__ import annotations

import contextlib
import functools
import gc
import inspect
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass

import torch
from torch import nn

from fxremat import torch_compat
from fxremat.runtime.watch import timed_event


@dataclass(frozen=True, slots=True)
class StepMeasurement:
    """Peak memory and time of a training step, as :func:`measure_step` finds them.

    Attributes:
        peak_bytes: most device memory allocated at any instant of the step, with all
            that was allocated before it: parameters, buffers, gradients, optimizer
            state, the batch.
        seconds: wall time of the step, as median over the repetitions.
        resident_bytes: what was allocated before the step.
    """

    peak_bytes: int
    seconds: float
    resident_bytes: int


def measure_step(
    model: nn.Module, step: Callable[[], object], *, repeat: int = 1
) -> StepMeasurement:
    """Run ``step`` and measure it.

    On CUDA the peak is ``torch.cuda.max_memory_allocated()``, whose statistics are reset
    before the step. On the CPU it is found
    from the allocator's own events during the step, plus what is resident before it:
    the tensors of ``model`` and every tensor that ``step`` can reach through the names
    it uses (closures, globals, defaults, optimizers among them).

    Args:
        model: tells the device; its parameters, buffers and gradients are resident.
        step: one training step; it is called ``repeat + 1`` times, of which the first
            finds the peak and the others the time.
        repeat: how many runs are timed.

    Raises:
        ValueError: ``repeat`` is less than 1.
    """
    if repeat < 1:
        raise ValueError(f"repeat is {repeat}, must be at least 1")
    device = device_of(model)
    resident = resident_bytes(model, step)
    peak = peak_of(step, device=device, resident_bytes=resident)
    seconds = [seconds_of(step, device=device) for _ in range(repeat)]
    return StepMeasurement(peak, statistics.median(seconds), resident)


def device_of(model: nn.Module) -> torch.device:
    """The device of the model's first parameter or buffer; the CPU if it has none."""
    for tensor in (*model.parameters(), *model.buffers()):
        return tensor.device
    return torch.device("cpu")


def peak_of(step: Callable[[], object], *, device: torch.device, resident_bytes: int = 0) -> int:
    """Most bytes allocated while ``step`` runs; ``resident_bytes`` is added on the CPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        step()
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device)
    with _garbage_left_alone(), torch_compat.AllocationLog() as log:
        step()
    return resident_bytes + log.peak_bytes


@contextlib.contextmanager
def _garbage_left_alone() -> Iterator[None]:
    """Cycles that are there stay: given back amid a step, they would hide what it takes.

    Those that the step makes are collected as ever. If the process has frozen objects already,
    unfreezing would undo that, so garbage is collected before the step instead.
    """
    if gc.get_freeze_count():
        gc.collect()
        yield
        return
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def seconds_of(step: Callable[[], object], *, device: torch.device) -> float:
    """Seconds of one run of ``step``, by CUDA events on a GPU."""
    if device.type == "cuda":
        return _on_cuda_s(step, device)[0]
    begin = time.perf_counter()
    step()
    return time.perf_counter() - begin


def _on_cuda_s(
    run: Callable[[], object], device: torch.device, *, held_s: float = 0.0
) -> tuple[float, float]:
    """Seconds that a device takes, held up for ``held_s`` before, and the host for launches."""
    with torch.cuda.device(device):  # events are recorded on its current stream
        start, end = (timed_event() for _ in range(2))
        if held_s:
            torch_compat.delay_device(device, held_s)
        start.record()
        begin = time.perf_counter()
        run()
        launched_s = time.perf_counter() - begin
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end)) / 1e3, launched_s


def on_cpu_s(run: Callable[[], object]) -> float:
    """Seconds of one run on a CPU: of one thread those that it computes, whatever else the machine
    does meanwhile.
    """
    clock = cpu_clock()
    begin = clock()
    run()
    return clock() - begin


def cpu_clock() -> Callable[[], float]:
    """By which a CPU is timed: of one thread what it computes, of several the time that goes by."""
    return time.thread_time if torch.get_num_threads() == 1 else time.perf_counter


def fastest_s(run: Callable[[], object], *, device: torch.device, runs: int) -> float:
    """Seconds of the fastest of some runs."""
    return min(seconds_of(run, device=device) for _ in range(runs))


@dataclass(slots=True)
class KernelClock:
    """Times a few operations as part of a step that has more to do.

    On a GPU the host runs ahead, so a kernel does not take longer for being launched: the
    device is held up until all are launched. They take at least the time of the launches,
    which the host cannot be spared.

    Attributes:
        device: where they run.
        launched_s: what launching took the last time.
    """

    device: torch.device
    launched_s: float = 1e-3

    def seconds_of(self, run: Callable[[], object]) -> float:
        """Seconds of one run, or of a second where the first was held up itself."""
        if self.device.type != "cuda":
            return on_cpu_s(run)
        held_s = min(LAUNCH_FACTOR * self.launched_s, MOST_HELD_S)
        taken_s = self._behind(held_s, run)
        if self.launched_s < held_s:
            return taken_s
        # Launched too slowly, or it waits for the device: then it waited for the delay as well.
        return self._behind(0.0, run)

    def _behind(self, held_s: float, run: Callable[[], object]) -> float:
        """Seconds of a run, of the device or of the launches, on a device held up before."""
        device_s, self.launched_s = _on_cuda_s(run, self.device, held_s=held_s)
        return max(device_s, self.launched_s)


LAUNCH_FACTOR = 3
"""For how long a device is held up, in multiples of what the launches took before."""

MOST_HELD_S = 0.02
"""At most that long: an operation that waits for the device would ask for ever more."""


def resident_bytes(model: nn.Module, step: Callable[[], object]) -> int:
    """Bytes of the distinct storages that exist before ``step`` on the model's device."""
    device = device_of(model)
    sizes = {
        torch_compat.storage_key(tensor): tensor.untyped_storage().nbytes()
        for tensor in _tensors((step, model), {})
        if tensor.device == device
    }
    return sum(sizes.values())


def _tensors(item: object, seen: dict[int, object]) -> Iterator[torch.Tensor]:
    """Every tensor reachable from ``item``; ``seen``, by id, keeps alive what was visited."""
    if id(item) in seen:
        return
    seen[id(item)] = item
    if isinstance(item, torch.Tensor):
        yield item
        if item.is_leaf and item.grad is not None:
            yield item.grad
        return
    for part in _parts(item):
        yield from _tensors(part, seen)


def _parts(item: object) -> Iterable[object]:
    if isinstance(item, nn.Module):
        return (*item.parameters(), *item.buffers())
    if isinstance(item, torch.optim.Optimizer):
        return (item.state, item.param_groups)
    if isinstance(item, functools.partial):
        return (item.func, item.args, item.keywords)
    if isinstance(item, Mapping):
        return tuple(item.values())
    if isinstance(item, (tuple, list, set, frozenset)):
        return tuple(item)
    if is_dataclass(item) and not isinstance(item, type):
        return tuple(getattr(item, f.name, None) for f in fields(item))
    if inspect.ismethod(item):
        return (item.__self__, item.__func__)
    if inspect.isfunction(item):
        names = inspect.getclosurevars(item)
        used = (*names.nonlocals.values(), *names.globals.values())
        return (*used, item.__defaults__ or (), item.__kwdefaults__ or {})
    return ()
