"""Contexts that restore what planning would change in a model or in the process."""

from __future__ import annotations

import contextlib
import random
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from fxremat import torch_compat

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


@contextlib.contextmanager
def generators_restored(*holders: object) -> Iterator[None]:
    """Restore the random generators of Python, NumPy and torch on exit.

    Args:
        holders: models and samples, whose generators are also restored.
    """
    own = {id(g): (g, g.get_state()) for held in holders for g in _generators_of(held)}
    python_state = random.getstate()
    numpy = sys.modules.get("numpy")
    numpy_state: Any = numpy.random.get_state() if numpy else None
    devices = list(range(torch.cuda.device_count()))
    try:
        with torch.random.fork_rng(devices=devices):
            yield
    finally:
        random.setstate(python_state)
        if numpy:
            numpy.random.set_state(numpy_state)
        for generator, state in own.values():
            generator.set_state(state)


def _generators_of(holder: object) -> Iterator[torch.Generator]:
    """Yield the random generators in attributes of a model and its modules, or in a container."""
    values: list[object] = [holder]
    if isinstance(holder, nn.Module):
        values = [value for module in holder.modules() for value in vars(module).values()]
    for value in pytree.tree_leaves(values):
        if isinstance(value, torch.Generator):
            yield value


@contextlib.contextmanager
def in_training(model: nn.Module) -> Iterator[None]:
    """Put a model into training mode, and restore the mode of each of its modules on exit."""
    if model.training:
        yield
        return
    modes = {module: module.training for module in model.modules()}
    model.train()
    try:
        yield
    finally:
        for module, mode in modes.items():
            module.training = mode


@contextlib.contextmanager
def attributes_replaced(
    model: nn.Module, replacement: Callable[[torch.Tensor], torch.Tensor]
) -> Iterator[None]:
    """Replace tensors in attributes other than parameters and buffers; restore all on exit.

    A forward may cache a tensor or count its calls in attributes. If hooks are installed in the
    context (a library does so once, and records that it did), only attributes with fake tensors are
    restored, so that hooks and record agree.

    Args:
        model: the model.
        replacement: returns the tensor that replaces a given one.
    """
    before = {module: _snapshot(module) for module in model.modules()}
    hooks = list(map(len, hook_dicts(model)))
    for module in before:
        _replace_tensors(module, replacement)
    try:
        yield
    finally:
        installed = list(map(len, hook_dicts(model))) != hooks
        for module, attributes in before.items():
            _restore(module, attributes, only_fake=installed)


def _snapshot(module: nn.Module) -> dict[str, Any]:
    """Return the attributes of a module, with copies of its dicts, lists and sets."""
    return {
        name: value.copy() if type(value) in (dict, list, set) else value
        for name, value in vars(module).items()
    }


def _replace_tensors(
    module: nn.Module, replacement: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    attributes = vars(module)
    for name, value in list(attributes.items()):
        if name in ("_parameters", "_buffers"):
            continue
        if isinstance(value, torch.Tensor):
            attributes[name] = replacement(value)
        elif type(value) is dict:
            value.update(
                {k: replacement(v) for k, v in value.items() if isinstance(v, torch.Tensor)}
            )
        elif type(value) is list:
            value[:] = [replacement(v) if isinstance(v, torch.Tensor) else v for v in value]


def hook_dicts(model: nn.Module) -> list[dict[int, Any]]:
    """Return the dicts in which ``model`` and its submodules keep their hooks."""
    return [getattr(m, name) for m in model.modules() for name in _HOOKS if hasattr(m, name)]


def _restore(module: nn.Module, before: dict[str, Any], *, only_fake: bool) -> None:
    now = vars(module)
    for name in list(now):
        if only_fake and not _holds_fake(now[name]):
            continue
        if name not in before:
            del now[name]
        elif type(before[name]) in (dict, list, set):
            _refill(now, name, before[name])
        else:
            now[name] = before[name]
    if not only_fake:
        for name in before.keys() - now.keys():
            now[name] = before[name]


def _refill(attributes: dict[str, Any], name: str, contents: Any) -> None:
    """Restore a dict, list or set in place, as other objects may refer to it.

    Args:
        attributes: the attributes of a module.
        name: the name of the attribute with the container.
        contents: the former contents.
    """
    container = attributes[name]
    if type(container) is not type(contents):
        attributes[name] = contents
    elif isinstance(container, list):
        container[:] = contents
    else:
        container.clear()
        container.update(contents)


def _holds_fake(value: object) -> bool:
    if type(value) is set:
        value = list(value)
    leaves = pytree.tree_leaves(value)
    return any(isinstance(leaf, torch.Tensor) and torch_compat.is_fake(leaf) for leaf in leaves)
