"""Host memory: lent to one step at a time, from the making to the giving up."""

from __future__ import annotations

import contextlib
import errno
import gc
import mmap
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from fxremat.errors import HostMemoryError, TransferError
from fxremat.runtime import memory
from fxremat.runtime.arena import Arena, HostLimit
from tests.moving import CPU, delayed, failing, ops, there_and_back

KIB = 1024
LINUX = sys.platform == "linux"


class Moved(torch.autograd.Function):
    """``x.exp() * x`` whose saved tensors wait for the backward in host memory."""

    @staticmethod
    def forward(ctx, x: Tensor, arena_id: int) -> Tensor:
        host = ops.open_arena(arena_id, 8 * KIB)
        y = x.exp()
        for offset, saved in ((0, x), (4 * KIB, y)):
            ops.offload(saved, host, offset)
        result = y * x
        ops.release(x, host, 0)
        ops.release(y, host, 4 * KIB)
        ctx.save_for_backward(host)
        return result

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None]:
        (host,) = ctx.saved_tensors
        nbytes = 4 * grad.numel()
        x, y = (ops.prefetch(host, offset, nbytes, CPU) for offset in (0, 4 * KIB))
        del host
        for fresh in (x, y):
            ops.wait(fresh)
        x, y = (fresh.view(torch.float32) for fresh in (x, y))
        return grad * (y * x + y), None


def leaf(seed: int) -> Tensor:
    return torch.randn(KIB, generator=torch.Generator().manual_seed(seed)).requires_grad_()


def gradient(seed: int) -> Tensor:
    x = leaf(seed)
    y = x.detach().exp()
    return y * x.detach() + y


def test_a_step_uses_the_same_memory_again():
    arena = Arena(8 * KIB, device=CPU)
    with delayed(0, most_s=0.005):
        for seed in range(6):
            x = leaf(seed)
            out = Moved.apply(x, arena.id)
            assert arena.leases == 1
            out.sum().backward()
            assert x.grad is not None
            assert x.grad.equal(gradient(seed))
            del out
            assert arena.leases == 0
    assert arena.allocated_bytes == 8 * KIB


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 2, 0)])
def test_forwards_before_backwards_never_share(order: tuple[int, ...]):
    arena = Arena(8 * KIB, device=CPU)
    with delayed(1, most_s=0.005):
        for round_ in range(5):
            xs = [leaf(10 * round_ + i) for i in range(3)]
            outs = [Moved.apply(x, arena.id) for x in xs]
            assert arena.leases == 3
            for i in order:
                outs[i].sum().backward()
            for i, x in enumerate(xs):
                assert x.grad is not None
                assert x.grad.equal(gradient(10 * round_ + i))
            del outs
            assert arena.leases == 0
    assert arena.allocated_bytes == 3 * 8 * KIB


def test_gradients_are_accumulated_over_steps_of_two_modules():
    arenas = [Arena(8 * KIB, device=CPU) for _ in range(2)]
    x = leaf(3)
    with delayed(2, most_s=0.005):
        total = sum(Moved.apply(x, arena.id).sum() for arena in arenas for _ in range(2))
        assert isinstance(total, Tensor)
        total.backward()
    once = gradient(3)
    assert x.grad is not None
    assert x.grad.equal(once + once + once + once)
    assert [arena.allocated_bytes for arena in arenas] == [16 * KIB] * 2


def test_the_backward_can_be_run_twice():
    arena = Arena(8 * KIB, device=CPU)
    x = leaf(4)
    out = Moved.apply(x, arena.id).sum()
    out.backward(retain_graph=True)
    out.backward()
    assert x.grad is not None
    assert x.grad.equal(2 * gradient(4))


def test_a_lease_ends_with_the_last_tensor_on_it():
    arena = Arena(8 * KIB, device=CPU)
    host = ops.open_arena(arena.id, 4 * KIB)
    assert (host.dtype, host.shape) == (torch.uint8, (4 * KIB,))
    part = host[100:200].view(10, 10)
    del host
    assert arena.leases == 1
    other = ops.open_arena(arena.id, 8 * KIB)
    part.fill_(1)
    assert not other.any()
    del part
    assert arena.leases == 1
    del other
    assert arena.leases == 0
    assert arena.allocated_bytes == 2 * arena.nbytes


def test_the_limit_counts_all_steps_that_overlap():
    arena = Arena(8 * KIB, device=CPU, limit=HostLimit(20 * KIB))
    held = [arena.open(), arena.open()]
    with pytest.raises(
        HostMemoryError, match=r"before 2 earlier steps .* 24.0 KiB .*limit="
    ) as info:
        arena.open()
    assert info.value.asked_bytes == 24 * KIB
    held.pop()
    arena.open()


def test_what_was_dropped_in_a_circle_makes_room():
    arena = Arena(8 * KIB, device=CPU, limit=HostLimit(8 * KIB))
    gc.disable()
    try:
        circle: list[object] = [arena.open()]
        circle.append(circle)
        del circle
        assert arena.leases == 1
        arena.open()
    finally:
        gc.enable()


def test_arenas_of_a_module_keep_to_one_limit_together():
    limit = HostLimit(20 * KIB)
    small = Arena(4 * KIB, device=CPU, limit=limit)
    large = Arena(12 * KIB, device=CPU, limit=limit)
    used = small.open()
    with pytest.raises(HostMemoryError, match=r"earlier steps .* 24.0 KiB .*limit="):
        held = [large.open(), small.open(), small.open()]
    held = [large.open()]
    assert limit.lent_bytes == 16 * KIB
    assert limit.allocated_bytes <= 20 * KIB
    # What no step uses makes room for what one does.
    del held
    more = [small.open() for _ in range(3)]
    assert limit.allocated_bytes == limit.lent_bytes == 16 * KIB
    del used, more
    x = torch.randn(KIB)
    assert there_and_back(x, large.open()).equal(x)
    assert limit.allocated_bytes <= 20 * KIB


def test_a_limit_below_the_need_is_an_error_when_made():
    message = r"needs 8.0 KiB \(8192 bytes\) .* HostMemory\(limit=\) allows 8.0 KiB \(8191\)"
    with pytest.raises(HostMemoryError, match=message) as info:
        Arena(8 * KIB, device=CPU, limit=HostLimit(8 * KIB - 1))
    assert info.value.asked_bytes == 8 * KIB
    Arena(8 * KIB, device=CPU, limit=HostLimit(8 * KIB))


@pytest.mark.parametrize(
    ("nbytes", "device", "why"),
    [(0, "cpu", "arena of 0 bytes"), (-1, "cpu", "arena of -1"), (1, "meta", "between meta and")],
)
def test_impossible_arenas_are_refused(nbytes: int, device: str, why: str):
    with pytest.raises(ValueError, match=why):
        Arena(nbytes, device=device)


def test_more_than_the_arena_has_is_refused():
    arena = Arena(KIB, device=CPU)
    with pytest.raises(TransferError, match=r"asks for 1025 bytes .* has 1024"):
        ops.open_arena(arena.id, KIB + 1)
    assert arena.leases == 0


def test_a_module_that_is_gone():
    arena = Arena(KIB, device=CPU)
    arena_id = arena.id
    del arena
    for gone in (arena_id, -3):
        with pytest.raises(
            TransferError, match=f"(?s)host memory {gone} .* owned it was deleted.*FXR724"
        ):
            ops.open_arena(gone, 1)
    closed = Arena(KIB, device=CPU)
    closed.close()
    closed.close()
    with pytest.raises(TransferError, match="owned it was deleted"):
        ops.open_arena(closed.id, 1)
    with pytest.raises(TransferError, match="which is closed"):
        closed.open()


def mapped_bytes(folder: Path) -> int:
    """Bytes of files in ``folder`` that this process has mapped."""
    total = 0
    for line in Path("/proc/self/maps").read_text().splitlines():
        if str(folder) in line:
            begin, end = line.split()[0].split("-")
            total += int(end, 16) - int(begin, 16)
    return total


@pytest.mark.skipif(not LINUX, reason="reads /proc")
def test_memory_is_given_up_with_its_owner(tmp_path: Path):
    arena = Arena(1 << 20, device=CPU, host_dir=tmp_path)
    assert mapped_bytes(tmp_path) == 1 << 20
    gc.disable()
    try:
        del arena
        assert mapped_bytes(tmp_path) == 0
    finally:
        gc.enable()


@pytest.mark.skipif(not LINUX, reason="reads /proc")
def test_a_step_may_end_after_its_module(tmp_path: Path):
    arena = Arena(1 << 20, device=CPU, host_dir=tmp_path)
    idle = arena.open()
    x = leaf(5)
    out = Moved.apply(x, arena.id)
    del idle
    assert mapped_bytes(tmp_path) == 2 << 20
    arena.close()
    assert mapped_bytes(tmp_path) == 1 << 20
    out.sum().backward()
    assert x.grad is not None
    assert x.grad.equal(gradient(5))
    del out
    assert mapped_bytes(tmp_path) == 0


@pytest.mark.skipif(not LINUX, reason="reads /proc")
@pytest.mark.parametrize("error", [SystemExit("killed"), OSError("no such page")], ids=type)
def test_a_failed_step_leaves_nothing(tmp_path: Path, error: BaseException):
    arena = Arena(1 << 20, device=CPU, host_dir=tmp_path)
    x = leaf(6)
    out = Moved.apply(x, arena.id)
    with failing(error, after=1), pytest.raises(TransferError, match="The step cannot go on"):
        out.sum().backward()
    assert x.grad is None
    del out
    gc.collect()
    assert arena.leases == 0
    again = Moved.apply(x, arena.id)
    again.sum().backward()
    assert x.grad is not None
    assert x.grad.equal(gradient(6))
    del again, arena
    assert mapped_bytes(tmp_path) == 0
    assert not list(tmp_path.iterdir())


def test_disk_space_is_taken_when_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    taken: list[int] = []

    def allocate(descriptor: int, offset: int, length: int) -> None:
        real(descriptor, offset, length)
        taken.append(os.fstat(descriptor).st_blocks * 512)

    real = os.posix_fallocate
    monkeypatch.setattr(os, "posix_fallocate", allocate)
    arena = Arena(1 << 20, device=CPU, host_dir=tmp_path)
    assert taken[0] >= 1 << 20
    del arena


def test_without_fallocate_zeros_are_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delattr(os, "posix_fallocate")
    arena = Arena((1 << 20) + 5, device=CPU, host_dir=tmp_path)
    x = torch.randn(1 << 18)
    host = arena.open()
    assert host.numel() == (1 << 20) + 5
    assert there_and_back(x, host, 5).equal(x)


def test_a_full_disk_is_an_error_when_made(tmp_path: Path):
    nbytes = 1 << 60
    with pytest.raises(HostMemoryError, match=rf"{tmp_path}: .*folder=.*limit=") as info:
        Arena(nbytes, device=CPU, host_dir=tmp_path)
    assert info.value.asked_bytes == nbytes
    assert info.value.code == "FXR712"
    assert not list(tmp_path.iterdir())


def test_a_disk_that_fills_up_is_an_error_at_the_step(tmp_path: Path, monkeypatch):
    arena = Arena(8 * KIB, device=CPU, host_dir=tmp_path)
    x = torch.randn(KIB)
    host = arena.open()

    def full(*_args: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(HostMemoryError, match="No space left on device"):
        ops.open_arena(arena.id, 8 * KIB)
    assert there_and_back(x, host).equal(x)
    assert arena.allocated_bytes == 8 * KIB


def test_a_folder_that_cannot_be_written(tmp_path: Path):
    file = tmp_path / "file"
    file.touch()
    for folder in (tmp_path / "nowhere", file):
        with pytest.raises(HostMemoryError, match=f"as a file in {folder}.*folder="):
            Arena(KIB, device=CPU, host_dir=folder)


ABRUPT = """
import sys, time
from fxremat.runtime.arena import Arena, HostLimit
arena = Arena(1 << 20, device="cpu", host_dir=sys.argv[1])
print("made", flush=True)
time.sleep(60)
"""


def test_no_file_is_left_by_a_process_that_is_killed(tmp_path: Path):
    with subprocess.Popen(
        [sys.executable, "-c", ABRUPT, str(tmp_path)], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "made\n"
        process.send_signal(signal.SIGKILL)
        process.wait(10)
    assert not list(tmp_path.iterdir())


def test_pinned_memory_that_cannot_be_had(monkeypatch: pytest.MonkeyPatch):
    """Errors of CUDA, without CUDA."""

    class Runtime:
        def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:  # noqa: N802
            assert address % mmap.PAGESIZE == 0
            assert (nbytes, flags) == (8 * KIB, 1)
            return 2

    monkeypatch.setattr(torch.cuda, "cudart", Runtime)
    monkeypatch.setattr(torch.cuda, "device", contextlib.nullcontext)
    monkeypatch.setattr(memory, "_forget_error", lambda device: None)
    device = torch.device("cuda", 0)
    message = r"cannot allocate 8.0 KiB of pinned host memory: .* error 2.*limit="
    with pytest.raises(HostMemoryError, match=message) as info:
        memory.pinned_memory(8 * KIB, device=device)
    assert info.value.asked_bytes == 8 * KIB
    with pytest.raises(HostMemoryError, match=r"the machine has .*limit="):
        memory.pinned_memory(1 << 60, device=device)
    monkeypatch.setattr(memory, "memory_limits", lambda: iter([(4 * KIB, "the control group")]))
    with pytest.raises(HostMemoryError, match=r"the control group has 4.0 KiB.*limit="):
        memory.pinned_memory(8 * KIB, device=device)


def test_what_was_lent_longest_ago_goes_first():
    """What every step takes stays there next to what none does any more."""
    limit = HostLimit(9 * KIB)
    sizes = KIB, 3 * KIB, 5 * KIB
    old, *used = (Arena(nbytes, device=CPU, limit=limit) for nbytes in sizes)
    held = [arena.open() for arena in (old, *used)]
    del held
    for arena in used:
        arena.open()
    Arena(KIB // 2, device=CPU, limit=limit).open()
    assert limit.allocated_bytes == (KIB // 2) + sum(sizes[1:])


def test_idle_memory_is_given_up_and_had_again():
    limit = HostLimit(4 * KIB)
    idle, busy = (Arena(KIB, device=CPU, limit=limit) for _ in range(2))
    host = busy.open()
    other = idle.open()
    assert limit.lent_bytes == 2 * KIB
    del other
    limit.drop_idle()
    assert limit.allocated_bytes == KIB
    assert (idle.leases, busy.leases) == (0, 1)
    assert idle.open().numel() == host.numel() == KIB


@pytest.mark.parametrize("limit_bytes", [None, 2 * 640 * 512])
def test_steps_of_many_sizes_share_memory(limit_bytes: int | None):
    """Not more than twice what the largest needs, in a few files, whatever the order."""
    limit = HostLimit(limit_bytes)
    sizes = [512 * (41 + (277 * n) % 600) for n in range(600)]
    arenas = [Arena(nbytes, device=CPU, limit=limit) for nbytes in sizes]
    most = 0
    for order in (1, -1):
        for arena in arenas[::order]:
            x = torch.full((arena.nbytes // 4,), float(arena.id))
            assert there_and_back(x, arena.open()).equal(x)
            assert limit.allocated_bytes <= 2 * max(sizes)
            most = max(most, len(limit.blocks))
    assert most <= 8


def test_a_larger_size_takes_the_place_of_a_smaller_one():
    limit = HostLimit()
    for nbytes in range(KIB, 9 * KIB, KIB):
        Arena(nbytes, device=CPU, limit=limit).open()
        assert limit.allocated_bytes == nbytes


def test_arenas_that_are_lent_at_once_never_share_a_byte():
    limit = HostLimit()
    large, small = (Arena(n * KIB, device=CPU, limit=limit) for n in (3, 2))
    for order in ([large, small], [small, large], [small, small, large, large]):
        hosts = [arena.open() for arena in order]
        for number, host in enumerate(hosts):
            host.fill_(number + 1)
        for number, host in enumerate(hosts):
            assert host.eq(number + 1).all()
        assert limit.lent_bytes >= sum(arena.nbytes for arena in order)
        del hosts, host
    assert limit.lent_bytes == 0


def test_steps_that_overlap_have_no_more_of_a_limit_than_they_need():
    limit = HostLimit(12 * KIB)
    large, small = (Arena(n * KIB, device=CPU, limit=limit) for n in (8, 4))
    for order in ([small, large], [large, small], [small, small, small], [small, large]):
        with contextlib.suppress(HostMemoryError):  # the first time that any overlap
            held = [arena.open() for arena in order]
            del held
        held = [arena.open() for arena in order]
        assert limit.lent_bytes == 12 * KIB
        del held


def test_memory_that_cannot_be_had_beside_what_is_idle(monkeypatch: pytest.MonkeyPatch):
    """What no step uses is given up where the system has no more."""
    limit = HostLimit()
    arenas = [Arena(n * KIB, device=CPU, limit=limit) for n in (16, 4)]
    for arena in arenas:
        arena.open()
    real = mmap.mmap

    def mapped(descriptor: int, nbytes: int) -> mmap.mmap:
        if limit.allocated_bytes:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return real(descriptor, nbytes)

    monkeypatch.setattr(mmap, "mmap", mapped)
    held = Arena(64 * KIB, device=CPU, limit=limit).open()
    assert limit.allocated_bytes == held.numel() == 64 * KIB
    with pytest.raises(HostMemoryError, match="ulimit -n"):
        arenas[0].open()
