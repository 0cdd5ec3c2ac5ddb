"""A tensor subclass as users write them: a weight that is stored in bytes, and used as floats."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import return_and_correct_aliasing
from torch.utils._pytree import tree_map_only

from tests.models.zoo import seeded

aten = torch.ops.aten

_EACH_PART = (
    aten.detach.default, aten.clone.default, aten.alias.default, aten._to_copy.default,
)  # fmt: skip


class Packed(Tensor):
    """A matrix of floats, each stored as a byte and a scale for its row."""

    codes: Tensor
    scales: Tensor

    @staticmethod
    def __new__(cls, codes: Tensor, scales: Tensor) -> Packed:
        return Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, codes.shape, dtype=scales.dtype, device=codes.device, strides=codes.stride()
        )

    def __init__(self, codes: Tensor, scales: Tensor) -> None:
        self.codes, self.scales = codes, scales

    @classmethod
    def of(cls, x: Tensor) -> Packed:
        scales = x.abs().amax(1, keepdim=True) / 127
        return cls((x / scales).round().to(torch.int8), scales)

    def __repr__(self) -> str:
        return f"Packed({tuple(self.shape)})"

    def floats(self) -> Tensor:
        return self.codes * self.scales

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["codes", "scales"], None

    @classmethod
    def __tensor_unflatten__(
        cls, inner: dict[str, Tensor], _meta: None, _s: Any, _t: Any
    ) -> Packed:
        return cls(inner["codes"], inner["scales"])

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _EACH_PART and isinstance(args[0], cls):
            kwargs.pop("dtype", None)
            made = cls(*(func(x, *args[1:], **kwargs) for x in (args[0].codes, args[0].scales)))
            return return_and_correct_aliasing(func, args, kwargs, made)
        args, kwargs = tree_map_only(cls, cls.floats, (args, kwargs))
        return func(*args, **kwargs)


class Adapted(nn.Module):
    """A frozen layer in eight bits, and a low-rank layer that is trained on top of it."""

    def __init__(self, width: int, rank: int = 4) -> None:
        super().__init__()
        self.weight = nn.Parameter(Packed.of(torch.randn(width, width)), requires_grad=False)
        self.down, self.up = nn.Linear(width, rank), nn.Linear(rank, width)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.weight) + self.up(self.down(x))


def adapted(width: int = 64, layers: int = 4) -> nn.Module:
    with seeded(0):
        each = [layer for _ in range(layers) for layer in (Adapted(width), nn.GELU())]
        return nn.Sequential(*each)
