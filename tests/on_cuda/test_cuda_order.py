"""Whatever order the device chooses, no two accesses of a step race: told by vector clocks.

Only on the stand-in, whose log has what every operator and copy reads and writes.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from fxremat.calls.plans import RESOLVED
from fxremat.runtime.memory import Block
from fxremat.runtime.streams import Lane, PinnedBlock, StreamLease, Traffic
from tests.cuda import CUDA, ENTRIES, Mode, Share, compiled, copies, forget, needs_cuda
from tests.models import ZooModel, hf
from tests.models.zoo import drawn_once, sum_of_squares
from tests.on_cuda.happens_before import Found, checked
from tests.on_cuda.training_loops import LOOPS, STEPS, Training, on_two_streams
from tests.on_cuda.transfer_programs import PROGRAMS, run, steps_on_two_streams, streams
from tests.stream_waits import Wait, left_out, waits

pytestmark = [
    *needs_cuda,
    pytest.mark.skipif("STAND_IN_LIB" not in os.environ, reason="not the CUDA stand-in"),
]

MODES = ("eager", "random", "late", "early")


@pytest.fixture(autouse=True)
def _eager() -> Iterator[None]:
    import cuda_stand_in

    cuda_stand_in.mode("eager")
    yield
    torch.cuda.synchronize()
    cuda_stand_in.mode(os.environ.get("STAND_IN_MODE", "eager"))


def _mlp() -> nn.Module:
    blocks = [nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(4)]
    return nn.Sequential(*blocks)


def _rows(seed: int) -> tuple[tuple[Tensor], dict[str, Any]]:
    return (torch.randn(128, 64, generator=torch.Generator().manual_seed(seed)),), {}


OTHERS = {
    "mlp": ZooModel("mlp", drawn_once(_mlp), _rows, sum_of_squares),
    "llama": hf.llama(
        "llama",
        vocabulary=128,
        width=64,
        inner=128,
        layers=2,
        heads=4,
        key_value_heads=2,
        batch=4,
        length=32,
    ),
}
NAMES = ("mlp", "gpt", "llama", "resnet50")


def entry_of(name: str) -> ZooModel:
    return OTHERS.get(name) or ENTRIES[name]


def plans() -> Iterator[Any]:
    """All plans; those that move the most are quick enough for every run."""
    for name in NAMES:
        for mode in ("only", "auto"):
            for share in ("min", 0.5, 1.0):
                marks = [] if (mode, share) == ("only", "min") else [pytest.mark.slow]
                yield pytest.param(name, mode, share, marks=marks)


def tell(found: Found) -> None:
    print(f"{found.items} items, {found.accesses} accesses, {found.compared} pairs compared")


@pytest.mark.parametrize(("name", "mode", "share"), list(plans()))
def test_no_accesses_of_training_steps_race(name: str, mode: Mode, share: Share):
    entry = entry_of(name)
    forget(CUDA)
    training = Training(entry, compiled(entry, mode, share))
    model = training.trained.model
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    for _ in range(1 + RESOLVED):  # libraries wait when they are loaded, and so do new plans
        training.step()
    with checked() as found:
        for _ in range(STEPS):
            training.loss().backward()
            optimizer.step()
            optimizer.zero_grad()
    tell(found)
    assert found.races == []
    assert found.host_waits == 0, "what the host has waited for is ordered whatever streams do"
    assert found.copies_beside == STEPS * copies(training.trained.call)
    assert found.compared > found.accesses > found.items


def gpt(mode: Mode) -> Training:
    """At its least budget."""
    training = Training(ENTRIES["gpt"], compiled(ENTRIES["gpt"], mode, "min"))
    training.step()
    return training


@functools.cache
def gpt_that_offloads() -> Training:
    return gpt("only")


@pytest.fixture(scope="module", autouse=True)
def nothing_is_left() -> Iterator[None]:
    """On the device, for the peaks that other files measure."""
    yield
    gpt_that_offloads.cache_clear()
    forget(CUDA)


budget_may_change = pytest.mark.filterwarnings("ignore::fxremat.errors.BudgetWarning")
"""Where two are at once, or on other streams."""
loops = pytest.mark.parametrize("loop", LOOPS)


@budget_may_change
@loops
@pytest.mark.parametrize("device_mode", ["eager", pytest.param("late", marks=pytest.mark.slow)])
def test_nor_do_those_of_other_loops(loop: Callable[[Training], None], device_mode: str):
    import cuda_stand_in

    training = gpt_that_offloads()
    cuda_stand_in.mode(device_mode)
    with checked() as found:
        loop(training)
    tell(found)
    assert found.races == []
    assert found.copies_beside


@pytest.mark.slow
@budget_may_change
@loops
def test_nor_where_some_is_recomputed(loop: Callable[[Training], None]):
    training = gpt("auto")
    with checked() as found:
        loop(training)
    assert found.races == []
    if loop is not on_two_streams:  # its plans have room for what cuBLAS takes there, and more
        assert found.copies_beside


@pytest.mark.parametrize("device_mode", MODES)
@pytest.mark.parametrize("program", PROGRAMS)
def test_nor_do_those_of_the_operators(program: Callable[..., None], device_mode: str):
    import cuda_stand_in

    cuda_stand_in.mode(device_mode)
    with checked() as found:
        run(program)
    assert found.races == []
    assert found.copies_beside


def shown_by() -> list[str]:
    """The programs that show what is left out."""
    shown = []
    for program in PROGRAMS:
        with checked() as found:
            run(program)
        if found.races:
            shown.append(program.__name__)
    print(", ".join(shown))
    return shown


IN_A_FAILING_STEP = (("_Copy", "wait_until_copied"), ("StreamLease", "_wait_for_unfinished"))
"""The host waits where the device takes no events: tests/runtime/test_streams.py has these fail."""

ORDINARY = [wait for wait in waits() if wait.function not in IN_A_FAILING_STEP]


@pytest.mark.parametrize("wait", ORDINARY, ids=str)
def test_each_wait_and_each_record_is_missed(wait: Wait):
    with left_out(wait):
        assert shown_by()


def _abandon_here(self: StreamLease, token: Any) -> None:
    torch.cuda.current_stream(self.device).wait_event(token.event)


def _drop_here(copy: Any, _process: int) -> None:
    torch.cuda.current_stream(CUDA).wait_event(copy.event)


def _know_only_the_last(self: Traffic, stream: Any, begin: int, end: int) -> Any:
    event = torch.cuda.Event()
    event.record(stream)
    self._events = {(begin, end): event}
    return event


def _know_only_the_lease(self: StreamLease, block: PinnedBlock, **rest: Any) -> None:
    _lease_init(self, block, **rest)
    block.written, block.read = Traffic(), Traffic()


_lease_init = StreamLease.__init__


def _one_event_for_all(self: Lane, compute: Any) -> None:
    _shared_event().record(compute)
    self.stream.wait_event(_shared_event())


@functools.cache
def _shared_event() -> torch.cuda.Event:
    return torch.cuda.Event()


CHANGES = {
    "one event is recorded before every copy": (
        Lane, "wait_for_compute", _one_event_for_all, ["another_thread_in_between"]
    ),
    "who drops what comes back waits on the stream that is current": (
        StreamLease, "abandon", _abandon_here, ["dropped_on_another_stream"]
    ),
    "so does who drops what leaves": (
        StreamLease, "_drop", staticmethod(_drop_here), ["dropped_on_another_stream"]
    ),
    "a block knows its last copy alone": (Traffic, "record", _know_only_the_last, ["held"]),
    "a block forgets its copies with each lease": (
        StreamLease, "__init__", _know_only_the_lease, ["steps_on_two_streams"]
    ),
    "memory is unmapped as if no device used it": (
        PinnedBlock, "_before_unmapping", None, ["given_up_after_an_offload"]
    ),
}  # fmt: skip


@pytest.mark.parametrize("change", CHANGES)
def test_what_is_done_otherwise_is_seen(change: str, monkeypatch: pytest.MonkeyPatch):
    of, name, function, programs = CHANGES[change]
    monkeypatch.setattr(of, name, function or _only_unpin)
    assert set(programs) <= set(shown_by())


def _only_unpin(self: Block, memory: Any) -> None:
    torch.cuda.cudart().cudaHostUnregister(memory.ctypes.data)


IN_NO_STEP = "StreamLease._prefetch-self.block.written.hold_back-0"
"""A plan has every storage released before it comes back: the computations have waited then."""


@pytest.mark.slow
@budget_may_change
@pytest.mark.parametrize("wait", ORDINARY, ids=str)
def test_what_whole_steps_miss(wait: Wait):
    training = gpt_that_offloads()
    shown = []
    for loop in LOOPS:
        with left_out(wait), checked() as found:
            loop(training)
        if found.races:
            shown.append(loop.__name__)
    print(", ".join(shown))
    assert bool(shown) == (str(wait) != IN_NO_STEP)


def test_the_order_that_a_device_chooses_hides_nothing():
    import cuda_stand_in

    hold_back = next(wait for wait in waits() if wait.function == ("Traffic", "hold_back"))
    seen = []
    with left_out(hold_back):
        for mode in MODES:
            cuda_stand_in.mode(mode)
            with checked() as found:
                run(steps_on_two_streams)
            seen.append([what.split(" at ")[0] for what in found.races])
    assert seen[0]
    assert all(other == seen[0] for other in seen)


WRITES: dict[str, Callable[[Tensor], object]] = {
    "in place": lambda x: x.add_(1),
    "out": lambda x: torch.mul(x.detach().clone(), 2, out=x),
    "a list": lambda x: torch._foreach_mul_([x], 2),
    "an optimizer": lambda x: torch.optim.SGD([_with_gradient(x)], lr=0.1, fused=True).step(),
    "statistics": lambda x: functional.batch_norm(
        torch.ones(8, 16, device=CUDA), x, x, training=True
    ),
    "places": lambda x: x.index_put_((torch.arange(4, device=CUDA),), x.new_zeros(4)),
    "a part": lambda x: x[8:].zero_(),
    "a copy": lambda x: x.copy_(x.new_ones(16)),
    "from the host": lambda x: x.copy_(torch.ones(16).pin_memory(), non_blocking=True),
    "bytes": lambda x: x.view(torch.uint8).fill_(0),
}
READS: dict[str, Callable[[Tensor], object]] = {
    "a sum": lambda x: x.sum(),
    "a part": lambda x: x[8:].exp(),
    "a list": lambda x: torch.cat([x, x]),
    "another's write": lambda x: x.new_zeros(16).add_(x),
    "a copy": lambda x: x.clone(),
    "to the host": lambda x: torch.empty(16).pin_memory().copy_(x, non_blocking=True),
    "attention": lambda x: functional.scaled_dot_product_attention(*[x.view(1, 1, 4, 4)] * 3),
}


def _with_gradient(x: Tensor) -> Tensor:
    x.grad = torch.ones_like(x)
    return x


@pytest.mark.parametrize("ordered", [False, True])
@pytest.mark.parametrize(
    ("first", "second"),
    [
        *(
            pytest.param(use, lambda x: x.sum(), id=f"writes {name}")
            for name, use in WRITES.items()
        ),
        *(
            pytest.param(use, lambda x: x.zero_(), id=f"reads {name}")
            for name, use in READS.items()
        ),
    ],
)
def test_what_operators_read_and_write_is_known(
    first: Callable[[Tensor], object], second: Callable[[Tensor], object], ordered: bool
):
    x = torch.ones(16, device=CUDA)
    with streams() as (one, other), checked() as found:
        with torch.cuda.stream(one):
            held = [first(x)]
        if ordered:
            other.wait_stream(one)
        with torch.cuda.stream(other):
            held.append(second(x))
    assert bool(found.races) == (not ordered)


@pytest.mark.parametrize("told", [False, True])
def test_memory_that_another_stream_reads_is_dropped(told: bool):
    with streams() as (first, second), checked() as found:
        with torch.cuda.stream(first):
            x = torch.ones(1 << 16, device=CUDA)
        second.wait_stream(first)
        with torch.cuda.stream(second):
            total = x.sum()
        if told:
            x.record_stream(second)
        address = x.data_ptr()
        del x
        with torch.cuda.stream(first):
            held = [torch.zeros(1 << 16, device=CUDA) for _ in range(8)]
        if not told:
            assert address in [again.data_ptr() for again in held]
        del total
    assert bool(found.races) == (not told)


@pytest.mark.parametrize("waits_for_it", [False, True])
def test_the_host_writes_pinned_memory_that_is_copied_from(waits_for_it: bool):
    import cuda_stand_in

    cuda_stand_in.mode("late")
    batch = torch.ones(1 << 16).pin_memory()
    with checked() as found:
        there = batch.to(CUDA, non_blocking=True)
        event = torch.cuda.Event()
        event.record()
        if waits_for_it:
            event.synchronize()
        batch.fill_(2)
        cuda_stand_in.host_access(
            "the loader", batch.data_ptr(), batch.untyped_storage().nbytes(), writes=True
        )
    del there
    assert bool(found.races) == (not waits_for_it)
