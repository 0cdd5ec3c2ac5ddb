"""Operators of this package, and views of tensor subclasses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils import _python_dispatch

_NAMESPACE = "fxremat"
_Library: Any = torch.library.Library
_library = _Library(_NAMESPACE, "FRAGMENT")
_disable: Any = torch.compiler.disable
_correct: Any = _python_dispatch.return_and_correct_aliasing


def new_operator(schema: str, run: Callable[..., Any], *, fake: Callable[..., Any]) -> Any:
    """Return a new operator of this package, which graphs contain as one operation.

    Args:
        schema: its name, arguments and results.
        run: computes it. Dynamo does not look into it.
        fake: returns tensors without data that are like the results.
    """
    name = schema.partition("(")[0]
    _library.define(schema)
    _library.impl(name, _disable(run), "CompositeExplicitAutograd")
    torch.library.register_fake(f"{_NAMESPACE}::{name}", fake, lib=_library)
    return getattr(getattr(torch.ops, _NAMESPACE), name).default


def aliasing_corrected(func: Any, args: Any, kwargs: Any, made: Any) -> Any:
    """Return ``made``, views of a tensor subclass, with what autograd knows of views of tensors.

    Args:
        func: the operator that was called.
        args, kwargs: its arguments.
        made: its results, of the subclass.
    """
    return _correct(func, args, kwargs, made)
