"""Slack: by how much blocks of CUDA's allocator are larger than what lies in them.

A cached block of some megabytes is handed out whole where a part of less than one would be left.
So what an optimizer makes in its first step may take more than it asked for, for good.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch

from fxremat import torch_compat
from fxremat.passes.joint.graph import allocated_bytes


@dataclass(slots=True)
class Slack:
    """Slack of what a model holds when its calls begin.

    Attributes:
        nbytes: most that was found.
    """

    nbytes: int = 0
    _total_bytes: int = 0  # of all on the device, when it was found

    def found(self, device: torch.device, tensors: Callable[[], Iterable[torch.Tensor]]) -> int:
        """The most slack that was found so far, this call included.

        Args:
            device: of the model.
            tensors: tells what it holds there: asked for only where there is more on the device
                than before.
        """
        total_bytes = torch_compat.slack_bytes(device)
        if total_bytes > self._total_bytes:
            self._total_bytes = total_bytes
            blocks = torch_compat.blocks_of(map(torch_compat.local_part, tensors()), device)
            nbytes = sum(size - allocated_bytes(asked, device) for size, asked in blocks)
            self.nbytes = max(self.nbytes, nbytes)
        return self.nbytes
