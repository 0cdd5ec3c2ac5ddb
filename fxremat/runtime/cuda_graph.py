"""Checks for steps that run while the user captures a CUDA graph."""

from __future__ import annotations

from typing import Any

import torch

from fxremat.errors import CaptureError, TransferError


def refuse_planning() -> None:
    """Raise an error if a step is to be planned while a CUDA graph is captured.

    Raises:
        CaptureError: a CUDA graph is being captured on the current stream.
    """
    if is_captured():
        raise CaptureError(
            "a step cannot be planned while a CUDA graph is being captured: planning runs and "
            "times operations. Compile the model, and run one step of each shape, before "
            "torch.cuda.graph",
            code="FXR308",
        )


def refuse_host_memory(nbytes: int) -> None:
    """Raise an error if a step with ``nbytes`` of host memory is to run in a captured CUDA graph.

    Raises:
        TransferError: a CUDA graph is being captured on the current stream.
    """
    if is_captured():
        raise TransferError(
            f"a step that keeps {nbytes} bytes in host memory cannot run while a CUDA graph is "
            "being captured: a replay would use host memory that is another step's by then. Run "
            "it outside torch.cuda.graph, or compile with offload=False",
            code="FXR723",
        )


def is_captured() -> bool:
    """Return whether a CUDA graph is being captured on the current stream."""
    # None is before torch has initialized CUDA; asking then raises if there is no GPU.
    cuda: Any = torch.cuda
    return bool(cuda.is_initialized() and cuda.is_current_stream_capturing())
