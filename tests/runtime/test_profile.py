"""Steps that are watched: what they allocate, phase by phase, whoever else uses the profiler."""

from __future__ import annotations

import gc
import threading
import warnings
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

import fxremat
from fxremat import torch_compat
from fxremat.errors import BudgetWarning
from fxremat.module.compiled import CompiledModule
from fxremat.runtime.profile import MemoryProfile, Watcher
from tests.models.zoo import seeded

CPU = torch.device("cpu")
KIB = 1 << 10


class Step:
    """Anything that may be watched."""


def some(kib: int) -> Tensor:
    return torch.empty(kib * KIB, dtype=torch.uint8)


def in_a_backward(run: Callable[[], object]) -> None:
    x = torch.ones(1, requires_grad=True)
    y = x * 1
    y.register_hook(lambda _: run() and None)
    y.backward(torch.ones(1))


class Recorder:
    """Who is told what was seen."""

    def __init__(self) -> None:
        self.seen: list[MemoryProfile] = []

    def __call__(self, found: MemoryProfile) -> None:
        self.seen.append(found)


def watched_forward(watcher: Watcher, told: Recorder) -> tuple[Step, list[Tensor]]:
    """150 KiB at most, of which 100 are left."""
    assert watcher.begin(CPU, told)
    kept = [some(100)]
    some(50)
    step = Step()
    watcher.left(step)
    return step, kept


def watched_backward(watcher: Watcher, step: Step, *, gone: tuple[int, ...] = ()) -> None:
    """70 KiB more."""

    def run() -> None:
        watcher.back(step, gone=gone)
        some(70)

    in_a_backward(run)


EXPECTED = MemoryProfile(
    forward_bytes=150 * KIB,
    left_bytes=100 * KIB,
    loss_point_bytes=130 * KIB,
    taken_bytes=130 * KIB,
    backward_bytes=200 * KIB,
)


def nearly(found: MemoryProfile, expected: MemoryProfile) -> bool:
    """But for the few numbers of the backward that runs around."""
    pairs = zip(
        (found.forward_bytes, found.left_bytes, found.loss_point_bytes, found.backward_bytes),
        (
            expected.forward_bytes,
            expected.left_bytes,
            expected.loss_point_bytes,
            expected.backward_bytes,
        ),
        strict=True,
    )
    if (found.taken_bytes is None) != (expected.taken_bytes is None):
        return False
    taken = (found.taken_bytes or 0) - (expected.taken_bytes or 0)
    return max(abs(taken), *(abs(a - b) for a, b in pairs)) < KIB


def test_each_phase_has_its_most():
    watcher, told = Watcher(), Recorder()
    step, kept = watched_forward(watcher, told)
    kept.append(some(30))
    watched_backward(watcher, step)
    after = some(500)  # when the backward has ended, it is no part of the step
    assert watcher.is_watching(step)
    watcher.end()
    (seen,) = told.seen
    assert nearly(seen, EXPECTED)
    assert seen.peak_bytes == seen.backward_bytes
    assert not watcher.is_watching(step)
    del after


def test_what_was_there_before_and_goes_unseen_is_told():
    watcher, told = Watcher(), Recorder()
    step, kept = watched_forward(watcher, told)
    kept.append(some(30))
    watched_backward(watcher, step, gone=(12 * KIB, 8 * KIB))
    watcher.end()
    (seen,) = told.seen
    assert EXPECTED.taken_bytes is not None
    less = replace(
        EXPECTED,
        taken_bytes=EXPECTED.taken_bytes - 20 * KIB,
        backward_bytes=EXPECTED.backward_bytes - 20 * KIB,
    )
    assert nearly(seen, less)


def test_what_an_earlier_watch_has_seen_made_goes_once():
    watcher, told = Watcher(), Recorder()
    step, kept = watched_forward(watcher, told)
    before = [some(20)]
    watched_backward(watcher, step)
    watcher.end()
    kept.clear()
    step, kept = watched_forward(watcher, told)
    before.clear()
    kept.append(some(30))
    watched_backward(watcher, step, gone=(20 * KIB,))
    watcher.end()
    assert EXPECTED.taken_bytes is not None
    less = replace(
        EXPECTED,
        taken_bytes=EXPECTED.taken_bytes - 20 * KIB,
        loss_point_bytes=EXPECTED.loss_point_bytes - 20 * KIB,
        backward_bytes=EXPECTED.backward_bytes - 20 * KIB,
    )
    assert nearly(told.seen[1], less)


def test_a_step_without_a_backward_has_a_forward_and_a_turn():
    watcher, told = Watcher(), Recorder()
    _step, kept = watched_forward(watcher, told)
    kept.append(some(30))
    watcher.end()
    (seen,) = told.seen
    assert nearly(seen, replace(EXPECTED, taken_bytes=None, backward_bytes=0))


def test_a_forward_alone_is_told_too():
    watcher, told = Watcher(), Recorder()
    assert watcher.begin(CPU, told)
    kept = some(100)
    watcher.end()
    (seen,) = told.seen
    assert seen.forward_bytes == seen.left_bytes == kept.nbytes


def test_one_is_watched_at_a_time_and_each_is_told_once():
    watcher, told, other = Watcher(), Recorder(), Recorder()
    step, _kept = watched_forward(watcher, told)
    assert not watcher.begin(CPU, other)
    watcher.left(Step())  # another's
    assert watcher.is_watching(step)
    for _ in range(2):
        watcher.end()
    assert len(told.seen) == 1
    assert watcher.begin(CPU, other)
    watcher.end()
    assert len(other.seen) == 1


def test_two_models_do_not_watch_at_once():
    """A thread has one profiler: the later watch ends the earlier one."""
    first, told, second, other = Watcher(), Recorder(), Watcher(), Recorder()
    watched_forward(first, told)
    watched_forward(second, other)
    assert len(told.seen) == 1
    first.end()
    assert not other.seen
    second.end()
    assert (len(told.seen), len(other.seen)) == (1, 1)


def test_it_ends_when_the_graph_is_gone():
    watcher, told = Watcher(), Recorder()
    step, _kept = watched_forward(watcher, told)
    graph = Step()
    watcher.until_gone(graph, step)
    assert not told.seen
    del graph
    assert len(told.seen) == 1
    _step, _kept = watched_forward(watcher, told)  # another: the first graph is not its
    gc.collect()
    assert len(told.seen) == 1
    watcher.end()


def test_a_graph_that_goes_late_ends_nobody_elses():
    watcher, told = Watcher(), Recorder()
    step, _kept = watched_forward(watcher, told)
    graph = Step()
    watcher.until_gone(graph, step)
    watcher.end()
    step, _kept = watched_forward(watcher, told)
    del graph
    assert len(told.seen) == 1
    watcher.end()


def test_inside_a_backward_none_begins_and_none_ends():
    watcher, told = Watcher(), Recorder()
    began: list[bool] = []
    in_a_backward(lambda: began.append(watcher.begin(CPU, told)))
    assert began == [False]
    watched_forward(watcher, told)
    in_a_backward(watcher.end)
    assert not told.seen
    watcher.end()
    assert len(told.seen) == 1


def in_a_thread(run: Callable[[], object]) -> None:
    errors: list[BaseException] = []

    def caught() -> None:
        try:
            run()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=caught)
    thread.start()
    thread.join()
    if errors:
        raise errors[0]


def test_other_threads_leave_it_alone():
    watcher, told, other = Watcher(), Recorder(), Recorder()
    step, kept = watched_forward(watcher, told)
    began: list[bool] = []

    def run() -> None:
        began.append(watcher.begin(CPU, other))
        watcher.left(Step())
        watcher.end()
        some(1000)

    in_a_thread(run)
    assert began == [False]
    assert watcher.is_watching(step)
    kept.append(some(30))
    watched_backward(watcher, step)
    watcher.end()
    assert not other.seen
    (seen,) = told.seen
    assert nearly(seen, EXPECTED)


def test_threads_have_watchers_of_their_own():
    first, told, second, other = Watcher(), Recorder(), Watcher(), Recorder()
    watched_forward(first, told)

    def run() -> None:
        watched_forward(second, other)
        second.end()

    in_a_thread(run)
    assert len(other.seen) == 1
    assert not told.seen
    first.end()
    assert len(told.seen) == 1


def test_the_profile_of_a_user_ends_it_and_sees_all_of_its_own():
    watcher, told = Watcher(), Recorder()
    watched_forward(watcher, told)
    with profile(activities=[ProfilerActivity.CPU]) as found:
        torch.ones(3).add(1)
    assert len(told.seen) == 1
    assert "aten::add" in {event.key for event in found.key_averages()}
    watcher.end()
    assert len(told.seen) == 1


def test_beside_a_profile_of_the_user_nothing_is_watched():
    watcher, told = Watcher(), Recorder()
    with profile(activities=[ProfilerActivity.CPU]) as found:
        assert not watcher.begin(CPU, told)
        watcher.left(Step())
        watcher.end()
        torch.ones(3).add(1)
    assert "aten::add" in {event.key for event in found.key_averages()}
    assert not told.seen
    watched_forward(watcher, told)
    watcher.end()
    assert len(told.seen) == 1


def test_threads_do_not_stand_in_each_others_way():
    """Profiles begin in the thread whose watch is the later, when the earlier has ended."""
    first, told, second, other = Watcher(), Recorder(), Watcher(), Recorder()
    watched_forward(first, told)
    begun, ended = threading.Event(), threading.Event()
    keys: set[str] = set()

    def run() -> None:
        watched_forward(second, other)
        begun.set()
        ended.wait()
        with profile(activities=[ProfilerActivity.CPU]) as found:
            torch.ones(3).add(1)
        keys.update(event.key for event in found.key_averages())

    thread = threading.Thread(target=run)
    thread.start()
    begun.wait()
    first.end()
    ended.set()
    thread.join()
    assert "aten::add" in keys
    assert (len(told.seen), len(other.seen)) == (1, 1)


def recorded() -> set[str]:
    """Operators that a profile of this thread records."""
    with profile(activities=[ProfilerActivity.CPU]) as found:
        torch.ones(3).add(1)
    return {event.key for event in found.key_averages()}


def test_a_backward_in_another_thread_leaves_that_to_be_profiled():
    watcher, told = Watcher(), Recorder()
    step, kept = watched_forward(watcher, told)
    keys: set[str] = set()

    def run() -> None:
        watched_backward(watcher, step)
        keys.update(recorded())
        with profile(activities=[ProfilerActivity.CPU]) as found:
            watcher.done()  # of a backward that runs beside the profile
            torch.ones(3).add(1)
        keys.intersection_update(event.key for event in found.key_averages())

    in_a_thread(run)
    assert "aten::add" in keys
    watcher.end()
    assert kept
    assert len(told.seen) == 1
    assert "aten::add" in recorded()


def test_a_thread_that_is_gone_takes_its_watch_along():
    watcher, told, other = Watcher(), Recorder(), Recorder()
    in_a_thread(lambda: watched_forward(watcher, told))
    assert watcher.begin(CPU, other)
    kept = some(100)
    watcher.end()
    assert not told.seen
    assert [seen.forward_bytes for seen in other.seen] == [kept.nbytes]


def test_torchs_own_profiler_is_left_as_it_was():
    def of_fxremat() -> list[str]:
        found = vars(torch.autograd.profiler).items()
        return [name for name, v in found if "fxremat" in (getattr(v, "__module__", "") or "")]

    watcher, told = Watcher(), Recorder()
    watched_forward(watcher, told)
    watcher.end()
    in_a_thread(lambda: watched_forward(watcher, told))
    watched_forward(watcher, told)
    watcher.end()
    assert not of_fxremat()


# A compiled model whose loss, outside, takes more than anyone can know.

ROWS, WIDTH, LAYERS, COPIES = 64, 16, 12, 3

fresh = pytest.mark.usefixtures("fresh_dynamo")


def batch() -> Tensor:
    with seeded(1):
        return torch.randn(ROWS, WIDTH)


def compiled() -> CompiledModule:
    with seeded(0):
        layers = [m for _ in range(LAYERS) for m in (nn.Linear(WIDTH, WIDTH), nn.GELU())]
        return fxremat.compile(nn.Sequential(*layers), batch(), 1.0)


def greedy(y: Tensor) -> Tensor:
    return torch.cat([y] * COPIES).square().sum()


def plainly(call: CompiledModule) -> None:
    call.zero_grad()
    greedy(call(batch())).backward()


def profiled_in_between(call: CompiledModule) -> None:
    loss = greedy(call(batch()))
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as found:
        loss.backward()
    assert any("backward" in event.key.lower() for event in found.key_averages())


def profiled_around(call: CompiledModule) -> None:
    with profile(activities=[ProfilerActivity.CPU]) as found:
        plainly(call)
    assert "aten::cat" in {event.key for event in found.key_averages()}


def profiled_before(call: CompiledModule) -> None:
    with profile(activities=[ProfilerActivity.CPU]) as found:
        loss = greedy(call(batch()))
    loss.backward()
    assert "aten::cat" in {event.key for event in found.key_averages()}


def profiled_afterwards(call: CompiledModule) -> None:
    loss = greedy(call(batch()))
    loss.backward()
    with profile(activities=[ProfilerActivity.CPU]) as found:
        torch.ones(3).add(1)
    assert "aten::add" in {event.key for event in found.key_averages()}


def another_planned(call: CompiledModule) -> None:
    loss = greedy(call(batch()))
    other = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU())
    fxremat.compile(other, batch(), "min")(batch()).sum().backward()
    loss.backward()


def measured_in_between(call: CompiledModule) -> None:
    loss = greedy(call(batch()))
    layer = nn.Linear(WIDTH, WIDTH)
    fxremat.measure_step(layer, lambda: layer(batch()).sum().backward())
    loss.backward()


def dropped(call: CompiledModule) -> None:
    call(batch())


def never_back(call: CompiledModule) -> None:
    greedy(call(batch()))


def failing(call: CompiledModule) -> None:
    with pytest.raises(ZeroDivisionError):
        raise ZeroDivisionError(greedy(call(batch())))


def back_in_a_thread(call: CompiledModule) -> None:
    loss = greedy(call(batch()))
    in_a_thread(loss.backward)


def forward_in_a_thread(call: CompiledModule) -> None:
    losses: list[Tensor] = []
    in_a_thread(lambda: losses.append(greedy(call(batch()))))
    losses.pop().backward()


def all_in_a_thread(call: CompiledModule) -> None:
    in_a_thread(lambda: plainly(call))


def logged(call: CompiledModule) -> None:
    """As anyone who watches the allocator."""
    loss = greedy(call(batch()))
    with torch_compat.AllocationLog() as log:
        loss.backward()
    assert log.peak_bytes > 0


DISTURBING = [
    plainly, profiled_in_between, profiled_around, profiled_before, profiled_afterwards,
    another_planned, measured_in_between, dropped, never_back, failing, back_in_a_thread,
    forward_in_a_thread, all_in_a_thread, logged,
]  # fmt: skip


@fresh
@pytest.mark.parametrize("disturb", DISTURBING, ids=lambda disturb: disturb.__name__)
def test_what_is_not_known_is_learned_whatever_disturbs(disturb: Callable[..., None]):
    call = compiled()
    found: list[list[warnings.WarningMessage]] = []
    for step in (disturb, plainly, plainly, plainly, plainly):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            step(call)
        found.append([w for w in caught if issubclass(w.category, BudgetWarning)])
    assert any(found)
    assert not found[-1]
    call.zero_grad()
    measured = fxremat.measure_step(call, lambda: greedy(call(batch())).backward())
    assert measured.peak_bytes <= call.plan.budget_bytes


@fresh
def test_of_a_step_that_was_watched_nothing_stays():
    """No profiler runs on, and nothing is slowed down."""
    call = compiled()
    for _ in range(4):
        plainly(call)
    assert not torch.autograd._profiler_enabled()


def test_each_call_of_a_step_is_told_its_own():
    """Two calls, then their backwards in the opposite order, with something between all."""
    watcher, first, second = Watcher(), Recorder(), Recorder()
    one, kept = watched_forward(watcher, first)
    kept.append(some(30))
    assert watcher.join(second)
    kept.append(some(7))
    two = Step()
    watcher.left(two)
    kept.append(some(11))
    some(13)

    def backwards() -> None:
        watcher.back(two)
        some(70)
        watcher.after(two)
        some(17)
        watcher.back(one)
        some(40)

    in_a_backward(backwards)
    watcher.end()
    (seen,), (other,) = first.seen, second.seen
    assert nearly(
        seen, MemoryProfile(150 * KIB, 100 * KIB, (148 + 70) * KIB, 148 * KIB, (148 + 40) * KIB)
    )
    assert nearly(other, MemoryProfile(7 * KIB, 7 * KIB, 31 * KIB, 18 * KIB, 88 * KIB))
    begins = seen.begin_bytes, other.begin_bytes
    assert begins[0] == 0
    assert abs(begins[1] - 130 * KIB) < KIB
    assert abs(seen.after_bytes - 130 * KIB) < KIB
    assert abs(other.after_bytes - 31 * KIB) < KIB
    assert abs(other.before_bytes - 35 * KIB) < KIB
