"""Loaded at the end of ``import torch``, by its entry point: right numbers, and what can be asked.

>>> import cuda_stand_in
>>> cuda_stand_in.mode("random", seed=3)
>>> cuda_stand_in.faults()
[]
"""

import atexit
import ctypes
import mmap
import os
import sys
import time
from functools import cache
from pathlib import Path

_COUNTS = (
    "h2d", "d2h", "d2d", "h2h", "kernels", "ops", "waits", "records", "syncs", "mallocs", "frees",
    "registered", "faults", "triton",
)  # fmt: skip

AUTOGRAD_S = 0.2
"""At the end of a process, for threads that let go of what a backward has held."""


def load() -> None:
    """Wrap torch's operators. Does nothing where the stand-in's runtime is not loaded."""
    folder = os.environ.get("STAND_IN_LIB", "")
    if not folder:
        return
    import torch

    _runtime()
    host_memory(os.environ.get("STAND_IN_HOST_MEMORY", ""))
    torch.ops.load_library(Path(folder) / "libstandin_values.so")
    if os.environ.get("TRITON_INTERPRET") == "1":
        import cuda_stand_in_triton

        cuda_stand_in_triton.load()
    atexit.register(_at_exit)


def host_memory(amount: str) -> None:
    """The machine has ``amount`` of host memory, such as ``256g``, for programs in Python that ask
    the system for it and map it; that a program touches less than is there is its own duty.
    """
    if not amount:
        return
    scale = {"k": 10, "m": 20, "g": 30}.get(amount[-1].lower())
    nbytes = int(amount[:-1]) << scale if scale else int(amount)
    ask = os.sysconf
    pages = nbytes // ask("SC_PAGE_SIZE")
    os.sysconf = lambda name: pages if name == "SC_PHYS_PAGES" else ask(name)  # type: ignore[assignment]
    mmap.MAP_ANONYMOUS |= _MAP_NORESERVE  # type: ignore[misc]


_MAP_NORESERVE = 0x4000
"""Linux's: without it, one mapping of more than the machine's memory is refused."""


@cache
def _runtime() -> ctypes.CDLL:
    folder = os.environ.get("STAND_IN_LIB", "")
    if not folder:
        raise RuntimeError("the CUDA stand-in is not loaded: start the program with run.sh")
    runtime = ctypes.CDLL(next(map(str, Path(folder).glob("libcudart.so.*"))))
    runtime.standin_take_faults.restype = ctypes.c_char_p
    runtime.standin_count.restype = runtime.standin_queued.restype = ctypes.c_uint64
    runtime.standin_host_seconds.restype = ctypes.c_double
    runtime.standin_failing_name.restype = ctypes.c_char_p
    runtime.standin_failing_calls.restype = runtime.standin_failed.restype = ctypes.c_uint64
    runtime.standin_pinned_bytes.restype = ctypes.c_uint64
    return runtime


@cache
def _values() -> ctypes.CDLL:
    return ctypes.CDLL(str(Path(os.environ["STAND_IN_LIB"]) / "libstandin_values.so"))


def mode(name: str, seed: int = 0) -> None:
    """From now on streams run ``eager``, ``random``, ``late`` or ``early``."""
    _runtime().standin_set_mode(name.encode(), ctypes.c_uint64(seed))


def faults() -> list[str]:
    """What went wrong since it was asked last."""
    return _runtime().standin_take_faults().decode().splitlines()


def counts() -> dict[str, int]:
    """How often each thing was asked of the device."""
    return {name: int(_runtime().standin_count(i)) for i, name in enumerate(_COUNTS)}


def memory(nbytes: int) -> None:
    """The device has ``nbytes``."""
    _runtime().standin_set_memory(ctypes.c_uint64(nbytes))


def fail(call: str | None, nth: int = 1, times: int | None = 1) -> None:
    """The ``nth`` call of CUDA's ``call`` from now on fails, and those after it until ``times``
    have, all where that is ``None``. So does nothing else; ``fail(None)``: nothing does.
    """
    count = (1 << 64) - 1 if times is None else times
    asked = (call or "").encode(), ctypes.c_uint64(nth), ctypes.c_uint64(count)
    if not _runtime().standin_fail(*asked):
        raise ValueError(f"{call} cannot be made to fail, {', '.join(_failing())} can")


def calls() -> dict[str, int]:
    """How often each of those was called that can be made to fail."""
    return {name: int(_runtime().standin_failing_calls(i)) for i, name in enumerate(_failing())}


def failed() -> int:
    """How many calls have failed because somebody asked for it."""
    return int(_runtime().standin_failed())


def pinned_bytes() -> int:
    """Host memory that the device copies to and from on its own, allocated and registered."""
    return int(_runtime().standin_pinned_bytes())


@cache
def _failing() -> list[str]:
    names: list[str] = []
    while name := _runtime().standin_failing_name(len(names)):
        names.append(name.decode())
    return names


def log_to(path: str) -> None:
    """Write a line for each call from now on; an empty path ends it."""
    import torch

    torch.cuda.init()
    _values().standin_watch_allocator()
    _runtime().standin_log_to(path.encode())


def host_access(what: str, address: int, nbytes: int, *, writes: bool) -> None:
    """Log that the program itself reads or writes pinned memory, now."""
    _runtime().standin_host_access(
        what.encode(), ctypes.c_void_p(address), ctypes.c_size_t(nbytes), int(writes)
    )


def _at_exit() -> None:
    """Report the number of faults, once autograd's threads are done.

    A thread that waits for the interpreter's lock when that ends would abort the process.
    """
    import torch

    if torch.cuda.is_initialized():
        time.sleep(AUTOGRAD_S)
    found = int(_runtime().standin_count(_COUNTS.index("faults")))
    if found:
        print(f"stand-in: {found} FAULTS in process {os.getpid()}", file=sys.stderr)
