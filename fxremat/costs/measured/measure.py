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
    """Peak memory and time of a training step, as :func:`measure_step` measures them.

    Attributes:
        peak_bytes: most bytes of device memory allocated at any instant of the step. It includes
            everything allocated before: parameters, buffers, gradients, optimizer state, the batch.
        seconds: wall time of the step, as the median over the repetitions.
        resident_bytes: bytes allocated before the step.
    """

    peak_bytes: int
    seconds: float
    resident_bytes: int


def measure_step(
    model: nn.Module, step: Callable[[], object], *, repeat: int = 1
) -> StepMeasurement:
    """Run a training step and measure its peak memory and time.

    On CUDA the peak is ``torch.cuda.max_memory_allocated()``, whose statistics are reset before the
    step. On the CPU it is derived from the events of the allocator during the step, and from the
    bytes that are resident before it. These are the tensors of ``model``, and every tensor that
    ``step`` can reach through the names it uses: closures, globals, defaults, optimizers.

    Args:
        model: the model, whose device is measured. Its parameters, buffers and gradients are
            resident.
        step: one training step. It is called ``repeat + 1`` times: the first call measures the
            peak, the others the time.
        repeat: number of timed runs.

    Raises:
        ValueError: ``repeat`` is less than 1.
    """
    if repeat < 1:
        raise ValueError(f"repeat is {repeat}, but must be at least 1")
    device = device_of(model)
    resident = resident_bytes(model, step)
    peak = peak_of(step, device=device, resident_bytes=resident)
    seconds = [seconds_of(step, device=device) for _ in range(repeat)]
    return StepMeasurement(peak, statistics.median(seconds), resident)


def device_of(model: nn.Module) -> torch.device:
    """Return the device of the model's first parameter or buffer; the CPU if it has none."""
    for tensor in (*model.parameters(), *model.buffers()):
        return tensor.device
    return torch.device("cpu")


def peak_of(step: Callable[[], object], *, device: torch.device, resident_bytes: int = 0) -> int:
    """Return the most bytes allocated while ``step`` runs; on a CPU plus ``resident_bytes``."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        step()
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device)
    with _existing_garbage_kept(), torch_compat.AllocationLog() as log:
        step()
    return resident_bytes + log.peak_bytes


@contextlib.contextmanager
def _existing_garbage_kept() -> Iterator[None]:
    """Keep existing reference cycles alive: freed during the step, they would reduce its peak.

    Cycles that the step makes are collected as usual. If the process has frozen objects already,
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
    """Return the seconds of one run of ``step``, measured with CUDA events on a GPU."""
    if device.type == "cuda":
        return _on_cuda_s(step, device)[0]
    begin = time.perf_counter()
    step()
    return time.perf_counter() - begin


def _on_cuda_s(
    run: Callable[[], object], device: torch.device, *, held_s: float = 0.0
) -> tuple[float, float]:
    """Return the seconds of ``run`` on the device, and the seconds in which the host launched it.

    The device is first delayed by ``held_s``, which does not count.
    """
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
    """Return the seconds of one run on a CPU: CPU time of a single thread, else wall time.

    CPU time of a thread does not depend on other load on the machine.
    """
    clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
    begin = clock()
    run()
    return clock() - begin


@dataclass(slots=True)
class KernelClock:
    """Times a few operations as they run within a step that has more to do.

    Within a step the host runs ahead of a GPU, so a kernel does not take longer because it has to
    be launched. For that, the device is delayed until all kernels are launched. The time measured
    is at least that of the launches, which the host needs in any case.

    Attributes:
        device: the device.
        launched_s: seconds that launching took the last time.
    """

    device: torch.device
    launched_s: float = 1e-3

    def seconds_of(self, run: Callable[[], object]) -> float:
        """Return the seconds of one run of ``run``, which may be called twice.

        On CUDA a second run counts if launching the first took longer than the device was delayed.
        """
        if self.device.type != "cuda":
            return on_cpu_s(run)
        held_s = min(LAUNCH_FACTOR * self.launched_s, MOST_HELD_S)
        if self.launched_s < MOST_HELD_S:  # else no delay is long enough
            seconds = self._seconds_after(held_s, run)
            if self.launched_s < held_s:
                return seconds
        # Launching takes longer than the delay, or waited for the device and thus for the delay.
        return self._seconds_after(0.0, run)

    def _seconds_after(self, held_s: float, run: Callable[[], object]) -> float:
        """Return the seconds of ``run`` after a delay: the device's, or the launches' if more."""
        device_s, self.launched_s = _on_cuda_s(run, self.device, held_s=held_s)
        return max(device_s, self.launched_s)


LAUNCH_FACTOR = 3
"""How long the device is delayed, in multiples of the previous launch time."""

MOST_HELD_S = 0.02
"""Longest delay in seconds. An operation that waits for the device would increase it forever."""


def resident_bytes(model: nn.Module, step: Callable[[], object]) -> int:
    """Return the bytes of distinct storages on the model's device that exist before ``step``."""
    device = device_of(model)
    return sum(torch_compat.storages_on(device, _tensors((step, model), {})).values())


def _tensors(item: object, visited: dict[int, object]) -> Iterator[torch.Tensor]:
    """Yield every tensor reachable from ``item``, and gradients of leaves.

    ``visited`` has what was visited, by id, and keeps it alive.
    """
    if id(item) in visited:
        return
    visited[id(item)] = item
    if isinstance(item, torch.Tensor):
        yield item
        if item.is_leaf and item.grad is not None:
            yield item.grad
        return
    for part in _references(item):
        yield from _tensors(part, visited)


def _references(item: object) -> Iterable[object]:
    """Return the objects that ``item`` refers to and that may contain tensors."""
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
