"""Kernels: settings that select them, workspaces of libraries, and the time of a device."""

from __future__ import annotations

import functools
import os
from typing import Any

import torch


def kernel_settings() -> dict[str, object]:
    """Return torch's global settings that select kernels or change their results, by name.

    Not included are the choice of an attention, which is in the captured graph, and autotuning,
    which is off while emitted graphs run. Takes some 4 µs.
    """
    backends = torch.backends
    precision: Any = torch._C._get_fp32_precision_getter
    settings: dict[str, object] = {
        "torch.use_deterministic_algorithms": torch.are_deterministic_algorithms_enabled(),
        "torch.backends.cudnn.enabled": backends.cudnn.enabled,
        "torch.backends.cudnn.deterministic": backends.cudnn.deterministic,
        "torch.backends.mkldnn.enabled": torch._C._get_mkldnn_enabled(),
        "CUBLAS_WORKSPACE_CONFIG": os.environ.get("CUBLAS_WORKSPACE_CONFIG"),
    }
    for backend, operation in _PRECISIONS:
        name = f"torch.backends.{backend}.{operation}.fp32_precision"
        settings[name] = precision(backend, operation)
    for dtype in ("fp16", "bf16"):
        name = f"allow_{dtype}_reduced_precision_reduction"
        settings[f"torch.backends.cuda.matmul.{name}"] = getattr(backends.cuda.matmul, name)
    return settings


_PRECISIONS = (
    ("cuda", "matmul"), ("cuda", "conv"), ("cuda", "rnn"), ("mkldnn", "matmul"),
    ("mkldnn", "conv"), ("mkldnn", "rnn"),
)  # fmt: skip


class without_autotuning:  # noqa: N801, a context manager; one of contextlib's takes a microsecond
    """A context in which cuDNN tries no algorithms (``torch.backends.cudnn.benchmark``).

    Autotuning takes workspaces of any size, again in each thread, and may choose another algorithm
    for a recomputation than for the first computation.
    """

    def __enter__(self) -> None:
        self._was_on = torch._C._get_cudnn_benchmark()
        if self._was_on:
            torch._C._set_cudnn_benchmark(False)

    def __exit__(self, *_raised: object) -> None:
        if self._was_on:
            torch._C._set_cudnn_benchmark(True)


def clear_library_workspaces() -> None:
    """Free the workspaces that torch holds for cuBLAS; they are allocated again when needed."""
    clear: Any = torch._C._cuda_clearCublasWorkspaces
    clear()


def delay_device(device: torch.device, seconds: float) -> None:
    """Let the current stream of a CUDA device idle for about ``seconds``."""
    sleep: Any = torch.cuda._sleep
    with torch.cuda.device(device):
        sleep(int(seconds * _CYCLES_PER_S))


_CYCLES_PER_S = 2e9
"""Clock rate of a GPU, rather too high, so that a delay is never shorter than requested."""


@functools.cache
def out_variant(target: Any, device: str) -> tuple[Any, str] | None:
    """Return an operator's variant that writes to a given tensor, and the name of that argument.

    Returns ``None`` if there is none with a kernel for this type of device that writes directly.
    """

    def taken(operator: Any) -> list[tuple[str, str]]:
        return [(a.name, str(a.type)) for a in operator._schema.arguments if not a.is_out]

    for name in target.overloadpacket.overloads():
        variant = getattr(target.overloadpacket, name)
        given = [a.name for a in variant._schema.arguments if a.is_out]
        keys = [torch._C._dispatch_key_for_device(device), "CompositeExplicitAutograd"]
        if len(given) == 1 and taken(variant) == taken(target):
            has_kernel, calls_target = (
                torch._C._dispatch_has_kernel_for_dispatch_key(variant.name(), key) for key in keys
            )
            if has_kernel and not calls_target:
                return variant, given[0]
    return None
