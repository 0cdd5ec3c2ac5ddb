"""Calls of CUDA fail at any instant: what is raised says so, and nothing is left of it."""

from __future__ import annotations

import faulthandler
import gc
import sys
import time
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import fxremat
from fxremat import torch_compat
from fxremat.costs.link import bandwidth
from fxremat.costs.measured import cache, workspaces
from fxremat.runtime import streams
from fxremat.runtime.arena import Arena
from tests.efforts import SPLITS, WHOLE
from tests.models.bits import assert_bitwise_equal
from tests.moving import ops
from tests.on_cuda.stood_in import (
    CUDA,
    Offload,
    Trained,
    batch_of,
    built,
    needs_stand_in,
    stood_in,
    to_device,
)

if stood_in:
    import cuda_stand_in as stand_in

pytestmark = needs_stand_in

ALL = None
"""Calls that fail: from the one that is told on."""

MOST_S = 120
"""A test that takes longer than that for one failure waits for what never comes."""

once_and_for_good = pytest.mark.parametrize("times", [1, ALL], ids=["once", "for_good"])


@pytest.fixture(autouse=True)
def nothing_fails_otherwise() -> Iterator[None]:
    """Copies are late, so that one that nobody awaits is seen; circles stay."""
    torch._dynamo.reset()
    gc.collect()
    gc.disable()
    stand_in.mode("late")
    yield
    stand_in.fail(None)
    stand_in.mode("eager")
    gc.enable()
    torch._dynamo.reset()


def held_bytes() -> tuple[int, int]:
    """On the device, and of host memory that it copies to and from."""
    return torch.cuda.memory_allocated(), stand_in.pinned_bytes()


def is_told(error: BaseException) -> bool:
    """Whether an error is one of ours, or what torch itself raises where CUDA fails."""
    if isinstance(error, fxremat.FxrematError):
        return True
    torchs = (RuntimeError, torch.OutOfMemoryError, torch.AcceleratorError)
    return type(error) in torchs and "CUDA" in str(error)


def fails(
    call: str, nth: int, times: int | None, run: Callable[[], object], model: nn.Module
) -> bool:
    """Run while a call of CUDA fails; whether that was told, after which nothing is held.

    Where it was not, somebody has made good for it. Gradients that the model has got by then are
    the user's.
    """
    torch.cuda.empty_cache()
    before = held_bytes()
    faulthandler.dump_traceback_later(MOST_S, exit=True, file=sys.__stderr__)
    stand_in.fail(call, nth, times)
    try:
        run()
    except Exception as error:
        assert is_told(error), f"{call} {nth}: {type(error).__name__}: {error}"
        model.zero_grad(set_to_none=True)
    else:
        return False
    finally:
        stand_in.fail(None)
        faulthandler.cancel_dump_traceback_later()
    # Autograd's own thread may still be leaving the backward that has raised.
    end_s = time.monotonic() + 5
    while held_bytes() != before and time.monotonic() < end_s:
        time.sleep(1e-3)
    assert held_bytes() == before, f"after {call} {nth}"
    return True


def calls_of(run: Callable[[], object]) -> dict[str, int]:
    """How many calls it makes that can fail."""
    torch.cuda.empty_cache()
    before = stand_in.calls()
    run()
    return {name: count - before[name] for name, count in stand_in.calls().items()}


def step_calls(trained: Trained) -> dict[str, int]:
    """The same of a step."""
    batch = trained.batch(1)
    found = calls_of(lambda: trained.step(batch))
    trained.gradients()
    return found


def check_steps(trained: Trained, kinds: dict[str, int], times: int | None) -> None:
    """Every one of so many calls of a step fails in turn.

    What the allocator asks for is asked for again once its cache is empty: one failure is none.
    """
    for kind, count in kinds.items():
        for nth in range(1, count + 1):
            batch = trained.batch(1)
            failed = stand_in.failed()
            told = fails(kind, nth, times, lambda batch=batch: trained.step(batch), trained.model)
            happened = stand_in.failed() > failed
            if not told:
                assert_bitwise_equal(trained.gradients(), trained.expected(1))
            made_good = kind in ("cudaMalloc", "cuMemCreate") and times == 1
            assert told == (happened and not made_good), f"{kind} {nth}"
            del batch
            trained.check(2)


@pytest.mark.parametrize(
    ("name", "times"),
    [
        ("gpt", 1),
        ("mlp", ALL),
        pytest.param("gpt", ALL, marks=pytest.mark.slow),
        pytest.param("mlp", 1, marks=pytest.mark.slow),
    ],
)
def test_what_fails_in_a_step_that_offloads_is_told_and_leaves_nothing(
    name: str, times: int | None
):
    trained = Trained(name, "only", effort=WHOLE)
    kinds = step_calls(trained)
    least = ("cudaEventCreate", "cudaEventRecord", "cudaStreamWaitEvent", "cudaMemcpyAsync")
    assert all(kinds[kind] >= 8 for kind in least), kinds
    check_steps(trained, kinds, times)


@once_and_for_good
@pytest.mark.parametrize("offload", [False, "only"])
def test_a_step_that_cannot_have_its_memory_leaves_nothing(offload: Offload, times: int | None):
    trained = Trained("bulk", offload, warm=2, effort=WHOLE)
    count = step_calls(trained)["cudaMalloc"]
    assert count >= 4
    check_steps(trained, {"cudaMalloc": count}, times)


@once_and_for_good
def test_neither_does_one_whose_segments_expand(times: int | None):
    settings = torch.cuda.memory._set_allocator_settings
    settings("expandable_segments:True")
    try:
        trained = Trained("bulk", False, warm=2, effort=WHOLE)
        count = step_calls(trained)["cuMemCreate"]
        assert count >= 2
        check_steps(trained, {"cuMemCreate": count}, times)
        del trained
    finally:
        torch._dynamo.reset()
        gc.collect()
        torch.cuda.empty_cache()
        settings("expandable_segments:False")


def unknown(cold: bool) -> None:
    """Nothing is compiled, and what is measured once in a process is measured again."""
    torch._dynamo.reset()
    gc.collect()
    cache.COSTS.clear()
    if cold:
        bandwidth._links.clear()
        streams.lanes.cache_clear()
        workspaces._nbytes.clear()
        workspaces._measured.clear()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()


def compiles(name: str, offload: Offload, model: nn.Module) -> fxremat.CompiledModule:
    sample = fxremat.Sample(to_device(batch_of(name, 0)), {})
    loss = None if name == "gpt" else torch.sum
    parts = SPLITS[False if offload else "exact"]  # transfers, or else what is measured for parts
    return fxremat.compile(model, sample, "min", loss=loss, offload=offload, **parts)


def check_compile(
    name: str, offload: Offload, call: str, nths: list[int], times: int | None, *, cold: bool
) -> None:
    """Calls of ``fxremat.compile`` fail; as if nothing had been, it is compiled next.

    How many there are depends on how long operations take: the last ones may not come.
    """
    made_good = call == "cudaMalloc" and times == 1
    for nth in nths:
        unknown(cold)
        model, failed = built(name), stand_in.failed()
        told = fails(call, nth, times, lambda model=model: compiles(name, offload, model), model)
        assert told == (stand_in.failed() > failed and not made_good), f"{call} {nth}"
        del model
        if not told:
            gc.collect()
        Trained(name, offload, warm=2)


def compile_calls(name: str, offload: Offload, *, cold: bool) -> dict[str, int]:
    model = built(name)
    unknown(cold)
    return calls_of(lambda: compiles(name, offload, model))


def test_what_fails_while_a_model_is_compiled_is_told_and_leaves_nothing():
    kinds = compile_calls("mlp", "only", cold=True)
    for call in ("cudaEventRecord", "cudaMemcpyAsync"):
        failed = stand_in.failed()
        check_compile("mlp", "only", call, [kinds[call] // 2], ALL, cold=True)
        assert stand_in.failed() > failed
    assert compile_calls("mlp", "only", cold=False)["cudaHostRegister"] == 1
    check_compile("mlp", "only", "cudaHostRegister", [1], 1, cold=False)


@pytest.mark.slow
@once_and_for_good
@pytest.mark.parametrize("offload", [False, "only"])
@pytest.mark.parametrize("name", ["mlp", "gpt", "bulk"])
def test_whatever_fails_while_a_model_is_compiled_is_told(
    name: str, offload: Offload, times: int | None
):
    for call, count in compile_calls(name, offload, cold=True).items():
        nths = sorted({*range(1, count + 1, max(1, count // 12)), count} - {0})
        check_compile(name, offload, call, nths, times, cold=True)


def test_workspaces_that_cannot_be_had_are_not_taken_for_none():
    """What cuBLAS could not have while a model was compiled it asks for in a step."""
    Trained("mlp", False, warm=0)
    unknown(cold=True)
    model = built("mlp")
    torch_compat.clear_library_workspaces()
    torch.cuda.empty_cache()
    stand_in.fail("cudaMalloc", 1, ALL)
    with pytest.raises(torch.OutOfMemoryError):
        workspaces.library_workspaces(CUDA)
    stand_in.fail(None)
    del model
    assert sum(workspaces.library_workspaces(CUDA)) > 4 << 20
    gc.collect()
    Trained("mlp", False, warm=2)


def test_an_error_of_registering_is_not_told_of_the_next_kernel():
    """Nor when a model is being captured, in which nothing is launched but by us."""
    x = torch.ones(8, device=CUDA)
    stand_in.fail("cudaHostRegister", 1)
    with FakeTensorMode(), pytest.raises(fxremat.HostMemoryError, match="error 2"):
        Arena(4096, device=CUDA)
    assert float((x + 1).sum()) == 16.0


@pytest.mark.parametrize("call", ["cudaStreamWaitEvent", "cudaEventRecord"])
def test_a_copy_that_the_stream_cannot_be_made_to_wait_for_is_awaited_by_the_host(call: str):
    """What comes next in memory of a step that is given up is there after its copy."""
    nbytes = 4 << 20
    arena = Arena(nbytes, device=CUDA)
    host = arena.open()
    x = torch.full((nbytes,), 1, dtype=torch.uint8, device=CUDA)
    ops.offload(x, host, 0)
    ops.release(x, host, 0)
    del x
    torch.cuda.synchronize()
    if call == "cudaStreamWaitEvent":
        back = ops.prefetch(host, 0, nbytes, CUDA)
        address = back.data_ptr()
        stand_in.fail(call, 1, ALL)
        with pytest.raises(torch.AcceleratorError):
            ops.wait(back)
        del back
    else:
        address = torch.empty(nbytes, dtype=torch.uint8, device=CUDA).data_ptr()
        stand_in.fail(call, 2, ALL)  # the first is what the copy waits for
        with pytest.raises(torch.AcceleratorError):
            ops.prefetch(host, 0, nbytes, CUDA)
    stand_in.fail(None)
    other = torch.full((nbytes,), 7, dtype=torch.uint8, device=CUDA)
    assert other.data_ptr() == address
    assert int(other.sum(dtype=torch.int64)) == 7 * nbytes
    torch.cuda.synchronize()
    assert int(other.sum(dtype=torch.int64)) == 7 * nbytes
