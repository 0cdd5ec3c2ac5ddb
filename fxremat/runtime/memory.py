"""Blocks of host memory: pinned for CUDA, a memory-mapped temporary file for the CPU."""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import sys
import tempfile
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt
import torch

from fxremat import torch_compat
from fxremat.errors import HostMemoryError
from fxremat.units import format_bytes

Bytes = npt.NDArray[np.uint8]

_PORTABLE = 1
"""cudaHostRegisterPortable: pinned for every device."""


class Lent(np.ndarray[Any, np.dtype[np.uint8]]):
    """A view of a block's memory, which is lent for as long as this array lives.

    ``holds`` is an object that dies with the array; no interrupt can come between.
    """

    holds: object


class Block:
    """Host memory that is allocated once and used by one step at a time.

    It is freed when it is collected.

    Attributes:
        bytes: the memory as an array; ``None`` once it is freed.
        nbytes: its size.
        place: the device that tensors are moved from, and the folder of its file.
        lent_by: id of the arena for which it was lent last.
        lent_last: grows with each loan of any block.
        lasting: whether the last loan is for longer than a step.
    """

    def __init__(self, memory: mmap.mmap) -> None:
        # Views keep this array alive, and the array keeps the mapping alive, for as long as a
        # tensor reads it.
        self.bytes: Bytes | None = np.frombuffer(memory, dtype=np.uint8)
        self.nbytes = self.bytes.nbytes
        self.place: tuple[torch.device, str] | None = None
        self.lent_by = self.lent_last = 0
        self.lasting = False
        self._user: weakref.ref[Lent] | None = None

    @property
    def free(self) -> bool:
        """Whether no step uses the block, since the view that was lent last is dead."""
        return self._user is None or self._user() is None

    def lend(self) -> Lent:
        """Return a new view of the memory, which is its user's until the view dies."""
        assert self.bytes is not None
        view = self.bytes.view(Lent)
        self._user = weakref.ref(view)
        return view

    def release(self) -> None:
        """Free the memory. It is unmapped when the last array on it dies."""
        if self.bytes is not None:
            self._before_unmapping(self.bytes)
            self.bytes = None

    def disown(self) -> None:
        """Forget the memory without freeing it, since it belongs to another process."""
        self.bytes = None

    def _before_unmapping(self, memory: Bytes) -> None:
        """Wait for copies and unpin ``memory``, if necessary, before it goes back to the system."""

    def __del__(self) -> None:
        if not sys.is_finalizing():
            self.release()


def file_memory(nbytes: int, *, folder: str) -> mmap.mmap:
    """Map ``nbytes`` of a temporary file in ``folder``.

    If the system allows it, the file never has a name, so it disappears with the memory even if the
    process is killed. Its disk space is reserved at once, because a full disk would otherwise kill
    the process at the first write.

    Raises:
        HostMemoryError: the folder does not exist or is not writable, or the disk is full.
    """
    try:
        with tempfile.TemporaryFile(dir=folder, prefix="fxremat-") as file:
            _reserve_disk_space(file, nbytes)
            return mmap.mmap(file.fileno(), nbytes)
    except (OSError, ValueError, OverflowError) as error:
        many = getattr(error, "errno", None) in (errno.EMFILE, errno.ENFILE)
        remedy = (
            "Allow the process to open more files (ulimit -n), or close some"
            if many
            else "Choose another folder with HostMemory(folder=), or a lower HostMemory(limit=)"
        )
        raise HostMemoryError(
            f"cannot allocate {format_bytes(nbytes)} of host memory as a file in {folder}: "
            f"{error}. {remedy}",
            asked_bytes=nbytes,
            code="FXR712",
        ) from error


def _reserve_disk_space(file: IO[bytes], nbytes: int) -> None:
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(file.fileno(), 0, nbytes)
        return
    piece = bytes(1 << 20)  # type: ignore[unreachable, unused-ignore]
    for begin in range(0, nbytes, len(piece)):
        file.write(piece[: nbytes - begin])
    file.flush()


def pinned_memory(nbytes: int, *, device: torch.device) -> mmap.mmap:
    """Map ``nbytes`` of page-locked memory, which CUDA copies asynchronously.

    The memory is registered rather than taken from torch's allocator, which rounds up to a power of
    two and caches freed memory. It must be passed to :func:`unpin` before it is unmapped.

    Raises:
        HostMemoryError: the memory cannot be allocated.
    """
    for total, whose in memory_limits():
        if nbytes > total:
            raise _no_pinned_memory(nbytes, f"{whose} has {format_bytes(total)}")
    try:
        memory = page_memory(nbytes)
    except (OSError, ValueError, OverflowError) as error:
        raise _no_pinned_memory(nbytes, str(error)) from error
    address = np.frombuffer(memory, dtype=np.uint8).ctypes.data
    with torch.cuda.device(device):
        code = int(_cuda_runtime().cudaHostRegister(address, nbytes, _PORTABLE))
    if code != 0:
        _forget_error(device)
        raise _no_pinned_memory(nbytes, f"cudaHostRegister returned error {code}")
    return memory


def page_memory(nbytes: int) -> mmap.mmap:
    """Map ``nbytes`` of private anonymous memory, in huge pages, of which few need to be locked.

    A forked child sees zeros instead. If the child shared the pages, a write of the parent would
    move them, while the device goes on copying to the old place. Where the system cannot wipe pages
    on fork, the memory is shared, so that nothing moves; the child does not touch it.
    """
    if not hasattr(mmap, "MADV_HUGEPAGE"):
        return mmap.mmap(-1, nbytes)
    memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    try:
        memory.madvise(_MADV_WIPEONFORK)
    except OSError:
        memory.close()
        return mmap.mmap(-1, nbytes)
    with contextlib.suppress(OSError):  # a kernel without huge pages
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


_MADV_WIPEONFORK = 18
"""Defined by Linux since 4.14; :mod:`mmap` has no name for it."""


def _forget_error(device: torch.device) -> None:
    """Make CUDA report its last error here, and not at the next kernel."""
    # A capture, which launches nothing, may be active.
    with contextlib.suppress(RuntimeError), torch_compat.real_execution():
        torch.empty(1, device=device).add_(1)


def unpin(memory: Bytes) -> None:
    """Undo :func:`pinned_memory`. No copy may be under way."""
    _cuda_runtime().cudaHostUnregister(memory.ctypes.data)


def _cuda_runtime() -> Any:
    load: Any = torch.cuda.cudart
    return load()


def _no_pinned_memory(nbytes: int, why: str) -> HostMemoryError:
    return HostMemoryError(
        f"cannot allocate {format_bytes(nbytes)} of pinned host memory: {why}. "
        "Use less with HostMemory(limit=)",
        asked_bytes=nbytes,
        code="FXR712",
    )


def memory_limits(root: Path = Path("/")) -> Iterator[tuple[int, str]]:
    """Yield limits on memory, in bytes, each with its owner: ``"the machine"`` or a control group.

    ``root`` is the root of the file system that has ``proc`` and ``sys``.
    """
    with contextlib.suppress(AttributeError, ValueError, OSError):
        yield os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"), "the machine"
    mounted = root / "sys/fs/cgroup"
    for line in _read_text(root / "proc/self/cgroup").splitlines():
        _number, controllers, path = line.split(":", 2)
        old = "memory" in controllers.split(",")
        if controllers and not old:
            continue
        top, name = (
            (mounted / "memory", "memory.limit_in_bytes") if old else (mounted, "memory.max")
        )
        # In a container the path may be that of the host, while the group is mounted at the top.
        group = top / path.lstrip("/")
        for folder in (group, *group.parents):
            limit = _read_text(folder / name).strip()
            if limit.isdecimal():
                yield int(limit), "the control group"
            if folder == top:
                break


def _read_text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


def folder_of(host_dir: str | os.PathLike[str] | None) -> str:
    """Return the folder for temporary files: ``host_dir``, or the system's if that is ``None``."""
    return str(Path(host_dir)) if host_dir is not None else tempfile.gettempdir()
