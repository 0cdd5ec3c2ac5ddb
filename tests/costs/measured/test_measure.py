"""Measuring a real step on the CPU: exact bytes, and nothing resident overlooked."""

from __future__ import annotations

import contextlib
import functools
import gc
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import nn

from fxremat import torch_compat
from fxremat.costs.measured import measure
from fxremat.costs.measured.cache import CostCache
from fxremat.costs.measured.execute import Operations, requests_from
from fxremat.costs.measured.measure import (
    device_of,
    measure_step,
    peak_of,
    resident_bytes,
    seconds_of,
)
from fxremat.ir import Request
from fxremat.passes.stages.block import Block, Mode

CPU = torch.device("cpu")


def floats(nbytes: int) -> torch.Tensor:
    """A tensor of ``nbytes``."""
    return torch.empty(nbytes // 4)


def model_of(nbytes: int) -> nn.Module:
    model = nn.Module()
    model.weight = nn.Parameter(torch.zeros(nbytes // 4))
    return model


def nothing() -> None:
    pass


def test_peak_is_exact_and_not_the_sum():
    def step():
        first = floats(4000)
        second = floats(8000)
        del first
        third = floats(2000)
        return second, third

    took = measure_step(model_of(1024), step)
    assert took.resident_bytes == 1024
    assert took.peak_bytes == 1024 + 4000 + 8000


@pytest.mark.parametrize("frozen", [False, True])
def test_garbage_of_before_does_not_hide_what_a_step_takes(frozen: bool):
    """Also where the process has set aside what there was, as servers and trainers do."""
    (gc.freeze if frozen else gc.unfreeze)()
    with torch_compat.AllocationLog():  # the allocator tells of its end, then
        cycle = [floats(4000)]
        cycle.append(cycle)
    del cycle

    def step():
        gc.collect()
        return floats(2000)

    assert peak_of(step, device=CPU) == 2000
    assert bool(gc.get_freeze_count()) == frozen


def test_freeing_what_was_resident_never_makes_the_peak_too_low():
    """The log does not see such a release, so the peak errs upwards only."""
    held = [floats(4000)]

    def step():
        held.clear()
        held.append(floats(4000))

    took = measure_step(model_of(16), step)
    assert took.resident_bytes == 4016
    assert took.peak_bytes >= 4016


def test_allocations_of_the_backward_count():
    class Hungry(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            floats(1_000_000)
            return gradient

    model = model_of(4)

    def step():
        Hungry.apply(model.weight).backward(torch.ones(1))
        model.weight.grad = None

    # Beside the workspace: the output, and its gradient given by the caller.
    assert measure_step(model, step).peak_bytes == 4 + 1_000_000 + 4 + 4


def test_a_step_that_allocates_nothing_peaks_at_what_is_resident():
    took = measure_step(model_of(400), nothing)
    assert took.peak_bytes == took.resident_bytes == 400


def test_an_operation_in_training_costs_its_result():
    model = model_of(4000)
    with torch.no_grad():
        assert peak_of(model.weight.neg, device=CPU) == 4000
        assert peak_of(model.weight.neg_, device=CPU) == 0


def test_the_step_runs_once_for_the_peak_and_repeat_times_for_the_seconds():
    calls = []
    took = measure_step(model_of(4), lambda: calls.append(1), repeat=4)
    assert len(calls) == 5
    assert took.seconds >= 0


def test_seconds_are_wall_time():
    from time import sleep

    assert seconds_of(lambda: sleep(0.02), device=CPU) >= 0.02


@pytest.mark.parametrize("repeat", [0, -1])
def test_repeat_must_be_positive(repeat):
    with pytest.raises(ValueError, match=f"repeat is {repeat}"):
        measure_step(model_of(4), nothing, repeat=repeat)


def test_gradients_and_buffers_are_resident():
    model = model_of(400)
    model.register_buffer("table", floats(80))
    assert resident_bytes(model, nothing) == 480
    model.weight.grad = torch.zeros_like(model.weight)
    assert resident_bytes(model, nothing) == 880


def test_storages_count_once_however_many_tensors_see_them():
    model = model_of(400)
    table = floats(800)
    views = [table, table[10:20], table.view(10, 20), model.weight.detach()]
    assert resident_bytes(model, functools.partial(len, views)) == 1200


def test_a_part_keeps_its_whole_storage():
    part = floats(4000)[:1]
    assert resident_bytes(model_of(4), lambda: part) == 4004


_GLOBAL = torch.empty(25)


def test_globals_are_reached():
    assert resident_bytes(model_of(4), lambda: _GLOBAL) == 104


def test_closures_are_reached_through_other_functions():
    batch = {"x": [floats(40)], "y": (floats(60), None, 3)}

    def forward():
        return batch["x"]

    def step():
        return forward()

    assert resident_bytes(model_of(4), step) == 104


def test_defaults_are_reached():
    def step(x=floats(40), *, y=floats(60)):  # noqa: B008
        return x, y

    assert resident_bytes(model_of(4), step) == 104


def test_partials_methods_and_dataclasses_are_reached():
    @dataclass
    class Batch:
        x: torch.Tensor
        rest: list[torch.Tensor]

        def run(self, *_more):
            pass

    batch = Batch(floats(40), [floats(60)])
    assert resident_bytes(model_of(4), batch.run) == 104
    step = functools.partial(batch.run, floats(100), floats(200))
    assert resident_bytes(model_of(4), step) == 404


def test_optimizer_state_is_reached():
    model = model_of(400)
    optimizer = torch.optim.Adam(model.parameters())

    def step():
        model.weight.grad = torch.ones_like(model.weight)
        optimizer.step()
        optimizer.zero_grad()

    assert resident_bytes(model, step) == 400
    step()
    # Two averages of the parameter's size, and a step count of 4 bytes.
    assert resident_bytes(model, step) == 400 + 800 + 4


def test_what_refers_to_itself_is_walked_once():
    loop: list[object] = [floats(40)]
    loop.append(loop)
    assert resident_bytes(model_of(4), lambda: loop) == 44


def test_tensors_elsewhere_do_not_count():
    elsewhere = torch.empty(100, device="meta")
    assert resident_bytes(model_of(4), lambda: elsewhere) == 4


def test_device_is_the_models():
    assert device_of(model_of(4)) == CPU
    assert device_of(nn.Module()) == CPU
    assert device_of(model_of(4).to("meta")) == torch.device("meta")
    only_buffer = nn.Module()
    only_buffer.register_buffer("table", torch.empty(1, device="meta"))
    assert device_of(only_buffer) == torch.device("meta")


@pytest.mark.cuda
def test_on_cuda_the_allocator_tells():
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    model = model_of(4096).cuda()
    before = torch.cuda.memory_allocated()
    took = measure_step(model, lambda: torch.empty(1 << 20, dtype=torch.uint8, device="cuda"))
    assert took.peak_bytes == before + (1 << 20)
    assert took.seconds > 0


@dataclass
class Device:
    """A GPU that is not there: a kernel takes a while, and so does its launch."""

    kernel_s: float
    launch_s: float
    waits: bool = False
    told: list[str] = field(default_factory=list)
    held_s: float = 0.0
    delays: list[float] = field(default_factory=list)

    def delay(self, _device: torch.device, seconds: float) -> None:
        self.told.append("delay")
        self.delays.append(seconds)
        self.held_s = seconds

    def run(self) -> None:
        self.told.append("run")
        time.sleep(self.launch_s + (self.held_s + self.kernel_s) * self.waits)
        self.held_s = 0.0

    def event(self) -> Any:
        device = self

        class Event:
            def record(self) -> None:
                device.told.append("event")

            def synchronize(self) -> None:
                device.told.append("wait")

            def elapsed_time(self, _end: Event) -> float:
                return device.kernel_s * 1e3

        return Event()


@pytest.fixture
def clock_of(monkeypatch: pytest.MonkeyPatch) -> Callable[[Device], measure.KernelClock]:
    def make(device: Device) -> measure.KernelClock:
        monkeypatch.setattr(measure, "timed_event", device.event)
        monkeypatch.setattr(measure.torch_compat, "delay_device", device.delay)
        monkeypatch.setattr(torch.cuda, "device", contextlib.nullcontext)
        return measure.KernelClock(torch.device("cuda", 0))

    return make


def test_kernels_are_timed_behind_a_device_that_is_held_up(clock_of):
    device = Device(kernel_s=0.5, launch_s=0.0005)
    clock = clock_of(device)
    for _ in range(500):  # a busy machine may take its time over a launch
        device.told.clear()
        assert clock.seconds_of(device.run) == 0.5
        if clock.launched_s < 2 * device.launch_s and device.told.count("run") == 1:
            break
    assert device.told == ["delay", "event", "run", "event", "wait"]
    assert device.delays[0] >= 2 * device.launch_s


def test_what_launches_slower_than_it_runs_takes_as_long_as_the_launch(clock_of):
    device = Device(kernel_s=0.0001, launch_s=0.004)
    clock = clock_of(device)
    for _ in range(3):
        assert clock.seconds_of(device.run) >= 0.004
    assert device.delays[-1] >= 2 * device.launch_s


def test_what_waits_for_the_device_is_not_charged_with_the_delay(clock_of):
    device = Device(kernel_s=0.001, launch_s=0.0002, waits=True)
    clock = clock_of(device)
    seconds = [clock.seconds_of(device.run) for _ in range(12)]
    assert min(seconds) < 0.004
    assert max(device.delays) <= measure.MOST_HELD_S
    assert device.told.count("run") == 2 * len(seconds)


@pytest.mark.parametrize(
    ("changes", "sizes", "seen"),
    [
        ((32, 128), (128, 32), ((1, 0), (0, 0))),  # a mask before what it is applied to
        ((128, 32), (128, 32), ()),  # as they are returned, and nothing else
        (  # beside workspaces
            (64, 128, -64, 32, 8, -8),
            (32, 128),
            ((-1, 64), (1, 0), (-1, -64), (0, 0), (-2, 8), (-2, -8)),
        ),
        (  # one of them of a result's size
            (32, 32, -32, 128),
            (128, 32),
            ((1, 0), (-1, 32), (-1, -32), (0, 0)),
        ),
        ((40, 128), (128, 32), ((1, 0), (0, 0))),  # a block larger than what was asked for
        ((32, 128), (128, 0, 32), ((1, 0), (2, 0), (0, 0))),  # a result that is elsewhere
        ((32,), (128, 32), ()),  # something else than was returned
        ((-8, 32), (32,), ()),  # what was there before is taken back
        ((16, 32), (32,), ((-1, 16), (0, 0), (-1, -16))),  # what is still there, and no result
        ((), (), ()),
        (  # a sum over rows on an H200: partial sums and counters
            (1024, 1 << 27, 512, -512, -1 << 27),
            (1024,),
            ((0, 0), (-2, 1 << 27), (-1, 512), (-1, -512), (-2, -1 << 27)),
        ),
    ],
)
def test_what_an_operation_asks_for(
    changes: tuple[int, ...], sizes: tuple[int, ...], seen: tuple[Request, ...]
):
    assert requests_from(changes, sizes) == seen


def test_measuring_operations_resets_no_statistics(monkeypatch: pytest.MonkeyPatch):
    """They are the user's, and may be those of a step in which a new shape is planned."""

    def reset(_device: object = None) -> None:
        raise AssertionError("the user's statistics are reset")

    for name in ("reset_peak_memory_stats", "reset_accumulated_memory_stats"):
        monkeypatch.setattr(torch.cuda, name, reset)
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    x.meta["val"] = torch.zeros(50)
    node = graph.call_function(torch.sin, (x,))
    node.meta["val"] = torch.zeros(50)
    block, cache = Block(0, Mode.FIRST, (node,), (x,), (node,), frozenset()), CostCache()
    Operations(cache, device=torch.device("cuda", 0)).run(block, {x: torch.ones(50)})
    assert list(cache.workspace_bytes.values()) == [0]


def test_one_thread_is_timed_by_what_it_computes(monkeypatch: pytest.MonkeyPatch):
    from time import sleep

    def waits() -> None:
        sleep(0.02)

    for threads, least_s, most_s in ((1, 0.0, 0.01), (2, 0.02, 10.0)):
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        assert least_s <= measure.KernelClock(CPU).seconds_of(waits) < most_s
