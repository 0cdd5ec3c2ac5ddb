"""Leave no trace: put back what planning a model would change about it or the process."""

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
    """Python's, NumPy's and torch's default random generators end as they began.

    Args:
        holders: models and samples; generators among their attributes and arguments do so, too.
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
    """Generators in a model's attributes, or in containers."""
    values: list[object] = [holder]
    if isinstance(holder, nn.Module):
        values = [value for module in holder.modules() for value in vars(module).values()]
    for value in pytree.tree_leaves(values):
        if isinstance(value, torch.Generator):
            yield value


@contextlib.contextmanager
def in_training(model: nn.Module) -> Iterator[None]:
    """Training mode for a model in eval mode; each module's own mode is put back."""
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
    """Tensors in plain attributes are replaced, and all attributes end as they began.

    A forward may cache a tensor, or count its calls. Where the call installed hooks (a
    library does so once, and notes that it did), only tensors without data are taken out
    again: the hooks and the note belong together.
    """
    before = {module: _snapshot(module) for module in model.modules()}
    hooks = list(map(len, hooks_of(model)))
    for module in before:
        _replace_tensors(module, replacement)
    try:
        yield
    finally:
        installed = list(map(len, hooks_of(model))) != hooks
        for module, attributes in before.items():
            _restore(module, attributes, only_fake=installed)


def _snapshot(module: nn.Module) -> dict[str, Any]:
    """Attributes, with copies of the dicts and lists among them."""
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


def hooks_of(model: nn.Module) -> list[dict[int, Any]]:
    """Dicts that ``model`` and its parts keep their hooks in, as long as the parts are there."""
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
    """Give a container its old contents; others may hold the same object."""
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
