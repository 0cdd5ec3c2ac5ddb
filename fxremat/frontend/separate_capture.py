"""Modules that are captured each by itself, while a call of the model goes on."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from torch import nn

from fxremat import torch_compat


class SeparateCapture:
    """A context in which modules are captured where their callers are not.

    Calls of some are never part of their caller's graph. Those of torch's own containers, which
    Dynamo passes by where it comes from code that it has left to Python, are then seen by it.

    Their forwards are others in it, and their own again once nobody is in it any more.

    Args:
        model: whose containers are seen.
        modules: of it, those that are never part of their caller's graph.
    """

    def __init__(self, model: nn.Module, modules: Sequence[nn.Module] = ()) -> None:
        self._forwards = {
            module: torch_compat.seen(module.forward)
            for module in model.modules()
            if module is not model and torch_compat.is_passed_by(module)
        }
        self._forwards |= {
            module: torch_compat.captured_separately(module.forward) for module in modules
        }
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
