"""A model and a call of it without data: shapes are there, nothing is allocated."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from fxremat import torch_compat
from fxremat.errors import SampleError
from fxremat.frontend.untouched import attributes_replaced

HOME = torch.device("cpu")
"""Where copies are: any torch can trace there."""


@dataclass(slots=True)
class FakeCopies:
    """Stand-ins for tensors: each gets one, and those of one storage share one.

    Attributes:
        mode: the fake mode that they are of.
    """

    mode: Any = field(default_factory=torch_compat.fake_mode)
    _known: dict[int, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)
    _storages: dict[int, torch.UntypedStorage] = field(default_factory=dict)

    def of(self, value: Any) -> Any:
        """The copy of a tensor ``value``; anything else is returned as it is.

        Raises:
            SampleError: it is of a layout that has no storage.
        """
        if not isinstance(value, torch.Tensor):
            return value
        if id(value) not in self._known:
            if value.layout is not torch.strided:
                raise SampleError(
                    f"a tensor of shape {tuple(value.shape)} is of layout {value.layout}: only "
                    "dense tensors can be estimated, give it as one"
                )
            made = torch_compat.fake_copy(value, self.mode, self._storages, HOME)
            self._known[id(value)] = value, made  # it must live: ids are used again
            self._known[id(made)] = made, made
        return self._known[id(value)][1]

    @contextlib.contextmanager
    def inside(self, model: nn.Module) -> Iterator[None]:
        """Let all that ``model`` holds be copies without data; it ends as it began."""
        with attributes_replaced(model, self.of):
            for module in model.modules():
                for tensors in (module._parameters, module._buffers):
                    tensors.update({name: self.of(tensor) for name, tensor in tensors.items()})
            yield
