"""Kernels: settings that choose them, the workspaces of libraries, a device's time."""

from __future__ import annotations

import functools
import os
from typing import Any

import torch


def kernel_settings() -> dict[str, object]:
    """Global settings that choose kernels or change their results, by torch's names.

    Not among them: which attention is chosen, which the captured graph says, and autotuning,
    without which emitted graphs run. Some 4 µs.
    """
    backends = torch.backends
    precision: Any = torch._C._get_fp32_precision_getter
    found: dict[str, object] = {
        "torch.use_deterministic_algorithms": torch.are_deterministic_algorithms_enabled(),
        "torch.backends.cudnn.enabled": backends.cudnn.enabled,
        "torch.backends.cudnn.deterministic": backends.cudnn.deterministic,
        "torch.backends.mkldnn.enabled": torch._C._get_mkldnn_enabled(),
        "CUBLAS_WORKSPACE_CONFIG": os.environ.get("CUBLAS_WORKSPACE_CONFIG"),
    }
    for backend, operation in _PRECISIONS:
        found[f"torch.backends.{backend}.{operation}.fp32_precision"] = precision(
            backend, operation
        )
    matmul = backends.cuda.matmul
    found["torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction"] = (
        matmul.allow_fp16_reduced_precision_reduction
    )
    found["torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction"] = (
        matmul.allow_bf16_reduced_precision_reduction
    )
    return found


_PRECISIONS = (
    ("cuda", "matmul"), ("cuda", "conv"), ("cuda", "rnn"), ("mkldnn", "matmul"),
    ("mkldnn", "conv"), ("mkldnn", "rnn"),
)  # fmt: skip


class without_autotuning:  # noqa: N801, a context manager; one of contextlib's takes a microsecond
    """No trying out of algorithms (``torch.backends.cudnn.benchmark``) inside.

    It takes workspaces of any size, anew in each thread, and what is computed again may take
    another algorithm than the first time.
    """

    def __enter__(self) -> None:
        self._was_on = torch._C._get_cudnn_benchmark()
        if self._was_on:
            torch._C._set_cudnn_benchmark(False)

    def __exit__(self, *_raised: object) -> None:
        if self._was_on:
            torch._C._set_cudnn_benchmark(True)


def clear_library_workspaces() -> None:
    """Free the workspaces that torch holds for cuBLAS, which are allocated again when needed."""
    clear: Any = torch._C._cuda_clearCublasWorkspaces
    clear()


def delay_device(device: torch.device, seconds: float) -> None:
    """Have the current stream of a CUDA device do nothing for about ``seconds``."""
    sleep: Any = torch.cuda._sleep
    with torch.cuda.device(device):
        sleep(int(seconds * _CYCLES_PER_S))


_CYCLES_PER_S = 2e9
"""Clock of a GPU, rather too fast: a delay must not be shorter than asked for."""


@functools.cache
def out_variant(target: Any, device: str) -> tuple[Any, str] | None:
    """The variant of an operator that writes its one result to a tensor, and the argument that is
    this tensor. ``None``: it has none whose kernel for the type of ``device`` does so itself.
    """

    def taken(operator: Any) -> list[tuple[str, str]]:
        return [(a.name, str(a.type)) for a in operator._schema.arguments if not a.is_out]

    for name in target.overloadpacket.overloads():
        variant = getattr(target.overloadpacket, name)
        given = [a.name for a in variant._schema.arguments if a.is_out]
        keys = [torch._C._dispatch_key_for_device(device), "CompositeExplicitAutograd"]
        if len(given) == 1 and taken(variant) == taken(target):
            has_kernel, is_made_of_it = (
                torch._C._dispatch_has_kernel_for_dispatch_key(variant.name(), key) for key in keys
            )
            if has_kernel and not is_made_of_it:
                return variant, given[0]
    return None
