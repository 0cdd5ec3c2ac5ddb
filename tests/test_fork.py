"""A process forked after a model was compiled: its steps never touch its parent's memory."""

from __future__ import annotations

import multiprocessing
import os
import traceback
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import fxremat
from fxremat.errors import TransferError
from fxremat.module.compiled import CompiledModule
from fxremat.runtime import streams
from fxremat.runtime.arena import Arena, HostLimit, lease_of
from tests.fake_streams import fake_device
from tests.moving import CPU, bits, ops, there_and_back

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")

STEPS = 150
WIDTH = 64


def travelling() -> tuple[nn.Module, CompiledModule]:
    """A model whose activations travel to host memory in every step."""
    torch.manual_seed(0)
    layers = [layer for _ in range(6) for layer in (nn.Linear(WIDTH, WIDTH), nn.Tanh())]
    model = nn.Sequential(*layers)
    sample = torch.randn(256, WIDTH)
    call = fxremat.compile(model, sample, "min", loss=torch.sum, offload="only")
    assert call.plan.host_bytes > 0
    return model, call


def gradients(model: nn.Module, call: Callable[[Tensor], Tensor], seed: int) -> list[Tensor]:
    x = torch.randn(256, WIDTH, generator=torch.Generator().manual_seed(seed))
    model.zero_grad(set_to_none=True)
    call(x).sum().backward()
    return [p.grad for p in model.parameters()]


def wrong_steps(model: nn.Module, call: CompiledModule, *, first: int) -> int:
    """How many of some steps give other gradients than the model as it is."""
    wrong = 0
    for seed in range(first, first + STEPS):
        ours = gradients(model, call, seed)
        plain = gradients(model, model, seed)
        wrong += not all(map(torch.equal, ours, plain))
    return wrong


def in_a_child(run: Callable[[], object], meanwhile: Callable[[], object] = lambda: None) -> object:
    """What ``run`` returns in a forked child, which never returns from it."""
    receive, send = multiprocessing.Pipe(duplex=False)
    child = os.fork()
    if not child:
        try:
            send.send(run())
        except BaseException:
            send.send(traceback.format_exc())
        finally:
            os._exit(0)
    send.close()
    meanwhile()
    found = receive.recv() if receive.poll(60) else "the child hangs"
    os.waitpid(child, 0)
    return found


def test_parent_and_child_step_side_by_side():
    model, call = travelling()
    own: list[int] = []

    def parent() -> None:
        own.append(wrong_steps(model, call, first=0))

    found = in_a_child(lambda: wrong_steps(model, call, first=STEPS), parent)
    assert found == 0
    assert own == [0]


def test_a_step_that_began_before_the_fork_ends_in_the_parent_alone():
    model, call = travelling()
    x = torch.randn(256, WIDTH)
    plain = gradients(model, model, 0)
    model.zero_grad(set_to_none=True)
    loss = call(torch.randn(256, WIDTH, generator=torch.Generator().manual_seed(0))).sum()

    def backward() -> str:
        try:
            loss.backward()
        except TransferError as error:
            assert not any(p.grad is not None for p in model.parameters())
            call(x).sum().backward()  # a step of its own
            return str(error)
        return "no error"

    assert "fork" in str(in_a_child(backward))
    loss.backward()
    assert all(map(torch.equal, plain, (p.grad for p in model.parameters())))


@pytest.mark.parametrize("late", ["offload", "release", "prefetch", "wait"])
def test_no_operation_of_a_step_works_in_a_child(late: str):
    arena = Arena(4096, device=CPU)
    host = arena.open()
    x = torch.randn(256)
    there_and_back(x, host)
    fresh = ops.prefetch(host, 0, 1024, CPU)

    def run() -> str:
        try:
            if late == "offload":
                ops.offload(x, host, 1024)
            elif late == "release":
                ops.release(x, host, 0)
            elif late == "prefetch":
                ops.prefetch(host, 0, 1024, CPU)
            else:
                ops.wait(fresh)
        except TransferError as error:
            return str(error)
        return "no error"

    assert "fork" in str(in_a_child(run))
    ops.wait(fresh)
    assert bits(fresh) == bits(x)


def test_a_child_has_the_limit_for_itself_and_gives_back_what_it_takes():
    arena = Arena(4096, device=CPU, limit=HostLimit(4096))
    host = arena.open()

    def run() -> list[object]:
        seen: list[object] = [arena.allocated_bytes, arena.leases]
        own = arena.open()
        own.fill_(7)
        seen += [arena.allocated_bytes, arena.leases, lease_of(own) is not lease_of(host)]
        del own
        seen.append(arena.leases)
        return seen

    host.fill_(5)
    assert in_a_child(run) == [0, 0, 4096, 1, True, 0]
    assert (host == 5).all()


def test_a_child_of_a_child():
    model, call = travelling()
    assert in_a_child(lambda: in_a_child(lambda: wrong_steps(model, call, first=0))) == 0


def test_a_child_of_a_process_with_pinned_memory_neither_touches_it_nor_takes_any(monkeypatch):
    """CUDA does not work in a forked child: an error, and no event and no memory is touched."""
    touched: list[str] = []
    with fake_device(0) as device:
        monkeypatch.setattr(streams, "unpin", lambda memory: touched.append("unpinned"))
        arena = Arena(64, device="cuda:0")
        host = arena.open()
        lease = lease_of(host)
        assert lease is not None
        lease.device = CPU
        x = device.allocate(64)
        lease.offload(x, offset=0)
        back = lease.prefetch(offset=0, nbytes=64, device=CPU)
        queued = len(device.compute[0].queue)

        def run() -> list[object]:
            nonlocal host, back, arena
            del host, back
            try:
                arena.open()
            except TransferError as error:
                message = str(error)
            del arena
            return [touched, len(device.compute[0].queue) - queued, "fork" in message]

        assert in_a_child(run) == [[], 0, True]
        device.progress()
        del lease, host, back, arena
        assert touched == ["unpinned"]
