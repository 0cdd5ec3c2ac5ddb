"""Whatever else a program does on CUDA: steps keep to their budget, with the bits of no plan."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxremat
from fxremat.costs.link import bandwidth
from tests.efforts import WHOLE
from tests.models.bits import assert_bitwise_equal
from tests.on_cuda.stood_in import (
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

offloads = pytest.mark.parametrize("offload", [False, "only"], ids=["recompute", "only"])


@pytest.fixture(autouse=True)
def streams_in_any_order() -> Iterator[None]:
    torch._dynamo.reset()
    gc.collect()
    torch.cuda.empty_cache()
    stand_in.mode("random", seed=1)
    yield
    stand_in.memory(4 << 30)
    stand_in.mode("eager")
    torch._dynamo.reset()


def test_a_device_too_small_for_the_budget_is_out_of_memory_and_nothing_else():
    """A budget is no promise that the device has it."""
    trained = Trained("bulk", False, warm=2, budget="1 GiB")
    batch = trained.batch(1)
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    stand_in.memory(torch.cuda.memory_reserved() + (16 << 20))
    with pytest.raises(torch.OutOfMemoryError):
        trained.step(batch)
    assert torch.cuda.memory_allocated() == before
    stand_in.memory(4 << 30)
    del batch
    trained.check(2)


@offloads
def test_a_device_that_has_just_what_the_plan_takes_is_enough(offload: Offload):
    trained = Trained("tower", offload, warm=2)
    plain = built("tower")
    batch = trained.batch(1)
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    room = trained.call.plan.budget_bytes - torch.cuda.memory_allocated()
    # In segments: 12 MiB for each 11, and 2 for small blocks.
    stand_in.memory(torch.cuda.memory_reserved() + room * 12 // 11 + (4 << 20))
    with pytest.raises(torch.OutOfMemoryError):
        plain(*batch).sum().backward()
    plain.zero_grad()
    del plain, batch
    trained.check(2)


def test_the_link_is_measured_where_little_of_the_device_is_left():
    model = built("mlp")
    batch = to_device(batch_of("mlp", 0))
    torch.cuda.empty_cache()
    bandwidth._links.clear()
    stand_in.memory(torch.cuda.memory_reserved() + (40 << 20))
    call = fxremat.compile(model, *batch, "min", loss=torch.sum, offload="only", effort=WHOLE)
    assert call.plan.host_bytes
    bandwidth._links.clear()


def test_a_step_that_a_cuda_graph_would_capture_is_refused_before_anything_changes(
    monkeypatch: pytest.MonkeyPatch,
):
    """The stand-in captures nothing; the step is told that somebody does."""
    trained = Trained("gpt", "only")
    batch, model = trained.batch(1), built("mlp", torch.device("cpu"))
    torch.manual_seed(5)
    state = torch.cuda.get_rng_state()
    before = torch.cuda.memory_allocated(), stand_in.pinned_bytes()
    calls = stand_in.calls()
    with monkeypatch.context() as patch:
        patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        with pytest.raises(fxremat.TransferError, match="or compile with offload=False"):
            trained.call(*batch)
        with pytest.raises(fxremat.CaptureError, match="CUDA graph is being captured"):
            fxremat.compile(model, torch.ones(4, 64), "min")
    assert stand_in.calls() == calls
    assert (torch.cuda.memory_allocated(), stand_in.pinned_bytes()) == before
    assert torch.equal(torch.cuda.get_rng_state(), state)
    del batch
    trained.check(2)


@offloads
def test_outputs_may_be_used_on_another_stream(offload: Offload):
    trained = Trained("mlp", offload)
    other = torch.cuda.Stream()
    batch = trained.batch(1)
    kept = []

    def step() -> None:
        torch.manual_seed(3)
        outputs = trained.call(*batch)
        other.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(other):
            kept.append(outputs.detach().mul(2).sum(dtype=torch.float64))
        outputs.record_stream(other)
        loss = outputs.sum()
        del outputs
        loss.backward()

    step()
    trained.gradients()
    extra_bytes = 512 + 512 * 64 * 4 * 2  # what the user computes of it meanwhile
    kept.clear()
    peak = trained.peak_of(step)
    assert peak <= trained.call.plan.budget_bytes + extra_bytes
    assert_bitwise_equal(trained.gradients(), trained.expected(1))
    with torch.no_grad():
        model = built("mlp")
        assert float(kept[0]) == float(model(*batch).mul(2).sum(dtype=torch.float64))
        del model
    batch = ()
    trained.check(2)


@offloads
@pytest.mark.parametrize("where", ["between steps", "before the backward", "in a hook"])
def test_the_allocators_cache_may_be_emptied(offload: Offload, where: str):
    trained = Trained("mlp", offload)
    emptied = []

    def empty(*_given: object) -> None:
        torch.cuda.empty_cache()
        emptied.append(where)

    call, step = trained.call, trained.step

    def run(batch: tuple[Tensor, ...]) -> None:
        if where == "between steps":
            empty()
        if where != "before the backward":
            step(batch)
            return
        torch.manual_seed(3)
        loss = call(*batch).sum()
        empty()
        loss.backward()

    trained.step = run  # type: ignore[method-assign]
    if where == "in a hook":
        for weight in list(trained.model.parameters())[3::4]:
            weight.register_post_accumulate_grad_hook(empty)
    for seed in (1, 2, 0):
        trained.check(seed)
    assert len(emptied) >= 3


def trained_in_half(call: Callable[..., Any], model: nn.Module, peaks: list[int]) -> Any:
    """Steps as of torch's own recipe for float16; what is left, losses and scales."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cuda", init_scale=2.0**40, growth_interval=2)
    told = []
    for seed in (0, 1, 2, 0, 1, 2, 0, 1, 2, 0, 1, 2):
        batch = to_device(batch_of("mlp", seed))
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        with torch.autocast("cuda", torch.float16):
            loss = call(*batch).float().square().mean()
        scaler.scale(loss).backward()
        peaks.append(torch.cuda.max_memory_allocated())
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        told.append((float(loss), scaler.get_scale()))
        del loss, batch
    return told, [p.detach().cpu() for p in model.parameters()]


@offloads
def test_scaled_gradients_of_half_precision(offload: Offload):
    """The first steps overflow and are left out."""
    model = built("mlp")
    wanted = trained_in_half(torch.compile(model, backend="aot_eager"), model, [])
    assert len({scale for _, scale in wanted[0]}) > 3
    del model
    torch._dynamo.reset()
    gc.collect()
    model, peaks = built("mlp"), list[int]()
    sample = to_device(batch_of("mlp", 0))
    with torch.autocast("cuda", torch.float16):
        call = fxremat.compile(
            model,
            *sample,
            "min",
            loss=lambda outputs: outputs.float().square().mean(),
            offload=offload,
            reserve="1 KiB",  # the scale, and what it is multiplied with
        )
    del sample
    found = trained_in_half(call, model, peaks)
    assert_bitwise_equal(found, wanted)
    over = [peak - call.plan.budget_bytes for peak in peaks]
    assert max(over) <= 0, over


@pytest.mark.parametrize("kind", ["foreach", "fused"])
def test_steps_of_an_optimizer(kind: str):
    def steps(call: Callable[..., Any], model: nn.Module, optimizer: Any) -> Any:
        peaks = []
        for seed in (0, 1, 2, 0):
            batch = to_device(batch_of("gpt", seed))
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            torch.manual_seed(seed)
            call(*batch).backward()
            torch.cuda.synchronize()
            peaks.append(torch.cuda.max_memory_allocated())
            optimizer.step()
            optimizer.zero_grad()
        return peaks, [p.detach().cpu() for p in model.parameters()]

    model = built("gpt")
    optimizer = torch.optim.AdamW(model.parameters(), **{kind: True})
    _, wanted = steps(torch.compile(model, backend="aot_eager"), model, optimizer)
    del model, optimizer
    torch._dynamo.reset()
    gc.collect()
    model = built("gpt")
    optimizer = torch.optim.AdamW(model.parameters(), **{kind: True})
    sample = fxremat.Sample(to_device(batch_of("gpt", 0)), {})
    call = fxremat.compile(model, sample, "min", optimizer=optimizer, offload="only")
    del sample
    peaks, found = steps(call, model, optimizer)
    assert_bitwise_equal(found, wanted)
    assert max(peaks) <= call.plan.budget_bytes


def alone(program: str, *, processes: int = 1, **environment: str) -> None:
    """Run ``program`` in processes of their own, on the stand-in as this one; no fault is told."""
    head = "import gc\nimport torch\nfrom tests.on_cuda.stood_in import *\n"
    text = head + textwrap.dedent(program)
    running = [
        subprocess.Popen(
            [sys.executable, "-c", text],
            env={**os.environ, **environment, "RANK": str(rank), "WORLD_SIZE": str(processes)},
            cwd=Path(__file__).parents[2],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(processes)
    ]
    try:
        for process in running:
            _, told = process.communicate(timeout=300)
            assert process.returncode == 0, told[-4000:]
            assert "FAULT" not in told, told[-4000:]
    finally:
        for process in running:
            process.kill()


def test_two_devices_in_one_process():
    alone(
        """
        assert torch.cuda.device_count() == 2
        second = torch.device("cuda", 1)
        both = [Trained("gpt", "only", warm=2, device=device) for device in (second, CUDA)]
        for seed in (1, 2, 0):
            for trained in both:
                trained.check(seed)
        with torch.cuda.device(1):
            for trained in both:
                trained.check(1)
        """,
        STAND_IN_DEVICES="2",
        STAND_IN_MODE="random",
    )


@pytest.mark.slow
def test_the_second_device_alone():
    alone(
        """
        second = torch.device("cuda", 1)
        expected("gpt")
        for offload in ("only", False):
            trained = Trained("gpt", offload, warm=0, device=second)
            torch.cuda.reset_peak_memory_stats(0)
            before = torch.cuda.memory_allocated(0)
            for seed in (1, 2, 0):
                trained.check(seed)
            assert torch.cuda.max_memory_allocated(0) == before
            del trained
            gc.collect()
        """,
        STAND_IN_DEVICES="2",
        STAND_IN_MODE="random",
    )


@pytest.mark.slow
def test_launches_that_block():
    alone(
        """
        for offload in ("only", False):
            trained = Trained("gpt", offload, warm=2)
            for seed in (1, 2):
                trained.check(seed)
            del trained
            gc.collect()
        """,
        CUDA_LAUNCH_BLOCKING="1",
    )


@pytest.mark.parametrize("offload", ["only", pytest.param(False, marks=pytest.mark.slow)])
def test_steps_in_a_thread_of_their_own(offload: Offload):
    """cuBLAS takes a workspace for each thread that multiplies, which is counted."""
    alone(
        f"""
        import threading, warnings
        warnings.simplefilter("error", fxremat.BudgetWarning)
        trained = Trained("gpt", {offload!r})
        errors = []

        def steps():
            try:
                for seed in (1, 2, 0):
                    batch = trained.batch(seed)
                    peak = trained.peak_of(lambda: trained.step(batch))
                    over = peak - trained.call.plan.budget_bytes
                    assert over <= 0, over
                    assert_bitwise_equal(trained.gradients(), trained.expected(seed))
            except BaseException as error:
                errors.append(error)

        for _ in range(2):
            thread = threading.Thread(target=steps, daemon=True)
            thread.start()
            thread.join(60)
            assert not thread.is_alive()
            assert not errors, errors
            trained.step(trained.batch(1))
            assert_bitwise_equal(trained.gradients(), trained.expected(1))
        """,
        STAND_IN_MODE="random",
    )


@pytest.mark.parametrize("processes", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_data_parallel_over_gloo(processes: int, tmp_path: Path):
    alone(
        f"""
        import torch.distributed as dist
        from torch.nn.parallel import DistributedDataParallel

        dist.init_process_group("gloo", init_method="file://{tmp_path}/store",
                                rank=int(os.environ["RANK"]), world_size={processes})
        model = DistributedDataParallel(built("gpt"), device_ids=[0])

        def gradients(call, seed):
            train_once(call, to_device(batch_of("gpt", (seed + dist.get_rank()) % 3)))
            return gradients_of(model)

        plain = torch.compile(model, backend="aot_eager")
        wanted = [gradients(plain, seed) for seed in SEEDS]
        del model, plain
        torch._dynamo.reset()
        gc.collect()
        model = DistributedDataParallel(built("gpt"), device_ids=[0])
        sample = fxremat.Sample(to_device(batch_of("gpt", dist.get_rank())), {{}})
        call = fxremat.compile(model, sample, "min", offload="only")
        del sample
        for seed in SEEDS:
            torch.cuda.reset_peak_memory_stats()
            found = gradients(call, seed)
            assert torch.cuda.max_memory_allocated() <= call.plan.budget_bytes
            assert_bitwise_equal(found, wanted[seed])
        dist.barrier()
        dist.destroy_process_group()
        """,
        processes=processes,
        STAND_IN_MODE="random",
    )
