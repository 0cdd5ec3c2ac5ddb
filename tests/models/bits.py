"""Equality to the last bit, and the first place where it fails."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def bitwise_equal(a: Any, b: Any) -> bool:
    """Whether two nested results agree in structure, dtype, shape and every bit."""
    return first_difference(a, b) is None


def assert_bitwise_equal(a: Any, b: Any) -> None:
    """Fail, naming the first entry that differs and by how much."""
    difference = first_difference(a, b)
    assert difference is None, difference


def first_difference(a: Any, b: Any) -> str | None:
    """The first difference between two nested results, described; None if there is none."""
    return next(_differences("result", a, b), None)


def _differences(where: str, a: Any, b: Any) -> Iterator[str]:
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        # Before the types: a Parameter and a Tensor may stand for each other.
        yield from _tensor_differences(where, a, b)
    elif type(a) is not type(b):
        yield f"{where}: {type(a).__name__} against {type(b).__name__}"
    elif isinstance(a, Mapping):
        if list(a) != list(b):
            yield f"{where}: keys {list(a)} against {list(b)}"
            return
        for key in a:
            yield from _differences(f"{where}[{key!r}]", a[key], b[key])
    elif dataclasses.is_dataclass(a):
        for field in dataclasses.fields(a):
            name = field.name
            yield from _differences(f"{where}.{name}", getattr(a, name), getattr(b, name))
    elif isinstance(a, Sequence) and not isinstance(a, str | bytes):
        if len(a) != len(b):
            yield f"{where}: {len(a)} entries against {len(b)}"
            return
        for index, (left, right) in enumerate(zip(a, b, strict=True)):
            yield from _differences(f"{where}[{index}]", left, right)
    elif a != b:
        yield f"{where}: {a!r} against {b!r}"


def _tensor_differences(where: str, a: Tensor, b: Tensor) -> Iterator[str]:
    if a.dtype != b.dtype or a.shape != b.shape:
        yield f"{where}: {a.dtype} {tuple(a.shape)} against {b.dtype} {tuple(b.shape)}"
        return
    unequal = _bits(a) != _bits(b)
    count = int(unequal.sum())
    if not count:
        return
    if a.is_complex():
        a, b = torch.view_as_real(a), torch.view_as_real(b)
    a, b = a.detach().cpu(), b.detach().cpu()
    index = tuple(unequal.nonzero()[0].tolist())
    largest = (a.double() - b.double()).abs().max().item()
    yield (
        f"{where}: {count} of {unequal.numel()} entries differ, the first at {index}: "
        f"{a[index].item()!r} against {b[index].item()!r}; largest difference {largest:.3g}"
    )


def _bits(x: Tensor) -> Tensor:
    """``x`` as integers, so that NaN equals itself and -0.0 is not 0.0."""
    x = x.detach().cpu()
    if x.is_complex():
        x = torch.view_as_real(x)
    return x.contiguous().view(_INTEGERS[x.element_size()])
