"""What an operator of a tensor subclass does with its arguments, as its schema says."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.utils import _pytree as pytree


def written(func: Any, args: Any, kwargs: Any) -> list[Any]:
    """Return the arguments that ``func`` writes to, and the items of those that are lists."""
    values: list[Any] = []
    for at, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[at] if at < len(args) else kwargs.get(argument.name)
            values += pytree.tree_leaves(value)
    return values


def list_length(func: Any, args: Any) -> int:
    """Return the length of the lists of an operator that treats each element by itself, else 0."""
    if not treats_each(func):
        return 0
    first = args[0]
    return len(first) if isinstance(first, (list, tuple)) else 0


def treats_each(func: Any) -> bool:
    """Return whether an operator treats each element of its lists by itself."""
    name: str = func._schema.name
    return name.startswith(("aten::_foreach_", "aten::_fused_", "aten::_amp_foreach_"))


def one_by_one(
    run: Callable[[Any, Any, Any], Any], func: Any, args: Any, kwargs: Any, count: int
) -> Any:
    """Call ``run`` with a ``foreach`` operator for one element of its lists at a time."""

    def element(value: Any, at: int) -> Any:
        is_list = isinstance(value, (list, tuple)) and len(value) == count
        return [value[at]] if is_list else value

    results: list[Any] = []
    for at in range(count):
        made = run(
            func,
            tuple(element(value, at) for value in args),
            {name: element(value, at) for name, value in kwargs.items()},
        )
        if made is not None:
            results += made
    return results or None
