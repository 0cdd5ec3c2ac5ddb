"""Modules that are captured each by itself, while a call of the model goes on."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from torch import nn

from fxremat import torch_compat


class Apart:
    """A context in which calls of some modules are no part of their caller's graph.

    Their forwards are others in it, and their own again once nobody is in it any more.

    Args:
        modules: which.
    """

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self._forwards = {module: torch_compat.apart(module.forward) for module in modules}
        self._before: dict[nn.Module, object] = {}
        self._inside = 0
        self._lock = threading.Lock()

    def __enter__(self) -> None:
        if not self._forwards:
            return
        with self._lock:
            self._inside += 1
            if self._inside > 1:
                return
            for module, forward in self._forwards.items():
                if "forward" in vars(module):
                    self._before[module] = vars(module)["forward"]
                vars(module)["forward"] = forward

    def __exit__(self, *_exc_info: object) -> None:
        if not self._forwards:
            return
        with self._lock:
            self._inside -= 1
            if self._inside:
                return
            for module in self._forwards:
                del vars(module)["forward"]
            for module, forward in self._before.items():
                vars(module)["forward"] = forward
            self._before.clear()
