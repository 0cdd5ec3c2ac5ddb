"""Modules: what runs where one is called, what wraps one, and optimizers' steps."""

from __future__ import annotations

import contextlib
import functools
import importlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch

from fxremat.torch_compat.collectives import HELD_LATE


def call_instead(model: torch.nn.Module, call: Callable[..., Any] | None) -> None:
    """Have ``call`` run wherever ``model`` is called, as ``nn.Module.compile`` does.

    ``None`` ends that.
    """
    model._compiled_call_impl = call


def called_instead(model: torch.nn.Module) -> object:
    """The function that runs in place of the model's own call; ``None``: the call itself."""
    found: object = model._compiled_call_impl
    return found


def own_call(model: torch.nn.Module) -> Callable[..., Any]:
    """The forward of ``model`` with its hooks around it, whatever runs instead."""
    found: Callable[..., Any] = model._call_impl
    return found


def tensors_of_module(model: torch.nn.Module) -> list[torch.Tensor]:
    """Its parameters and buffers, one that is there twice maybe twice: much faster than with their
    names.
    """
    found: list[torch.Tensor | None] = []
    modules, waiting = {id(model)}, [model]
    while waiting:
        own = waiting.pop().__dict__
        found += own["_parameters"].values()
        found += own["_buffers"].values()
        for child in own["_modules"].values():
            if child is not None and id(child) not in modules:
                modules.add(id(child))
                waiting.append(child)
    return [tensor for tensor in found if tensor is not None]


def is_uninitialized(model: torch.nn.Module) -> bool:
    """Whether it has parameters, or buffers, that its first call makes, as ``nn.LazyLinear``."""
    return any(map(torch.nn.parameter.is_lazy, tensors_of_module(model)))


def becomes_another_class(model: type[torch.nn.Module]) -> bool:
    """Whether a module of this class takes another one at its first call."""
    return issubclass(model, torch.nn.modules.lazy.LazyModuleMixin)


def wrapped_by(model: torch.nn.Module) -> torch.nn.Module:
    """The model inside a ``DistributedDataParallel``; any other as it is."""
    if not torch.distributed.is_available():
        return model
    from torch.nn.parallel import DistributedDataParallel  # noqa: PLC0415

    if not isinstance(model, DistributedDataParallel):
        return model
    inner: torch.nn.Module = model.module
    return inner


def wrapped_anew(wrapper: torch.nn.Module, run: Callable[..., Any]) -> torch.nn.Module:
    """A ``DistributedDataParallel`` with all that ``wrapper`` has, whose forward calls ``run``.

    Both are one in all else: what is set on one is set on the other.
    """

    class Anew(type(wrapper)):  # type: ignore[misc]
        module = property(lambda _self: run)

    made: torch.nn.Module = Anew.__new__(Anew)
    object.__setattr__(made, "__dict__", wrapper.__dict__)
    return made


def bucket_bytes() -> tuple[int, ...]:
    """Bytes of each parameter in the buckets of a ``DistributedDataParallel`` around this call."""
    wrapper = _data_parallel()
    active = None if wrapper is None else wrapper._get_active_ddp_module()
    if active is None:
        return ()
    return tuple(p.numel() * p.element_size() for p in active.parameters() if p.requires_grad)


@functools.cache
def _data_parallel() -> Any:
    """The class of wrappers whose buckets gradients go to, where this torch has it."""
    if not torch.distributed.is_available():
        return None
    from torch.nn.parallel import DistributedDataParallel  # noqa: PLC0415

    return DistributedDataParallel


def around_optimizers(
    before: Callable[[torch.optim.Optimizer], None], after: Callable[[torch.optim.Optimizer], None]
) -> Callable[[], None]:
    """Have both called around each step of any optimizer; what is returned ends that."""
    from torch.optim.optimizer import (  # noqa: PLC0415
        register_optimizer_step_post_hook,
        register_optimizer_step_pre_hook,
    )

    handles = (
        register_optimizer_step_pre_hook(lambda optimizer, *_given: before(optimizer)),
        register_optimizer_step_post_hook(lambda optimizer, *_given: after(optimizer)),
    )

    def remove() -> None:
        for handle in handles:
            handle.remove()

    return remove


def step_unseen(optimizer: torch.optim.Optimizer) -> None:
    """Make a step that no hook sees, neither those of all optimizers nor a profiler's name for it.

    Steps of other threads are seen meanwhile.
    """
    step: Callable[..., object] = type(optimizer).step
    if getattr(step, "hooked", False):
        step = getattr(step, "__wrapped__", step)
    with contextlib.ExitStack() as stack:
        # A class whose step calls that of its base comes by them again.
        for hooks in _hooks_of_all_optimizers():
            stack.enter_context(_deaf(hooks))
        step(optimizer)


def _hooks_of_all_optimizers() -> tuple[dict[int, Callable[..., Any]], ...]:
    own: Any = importlib.import_module("torch.optim.optimizer")
    return own._global_optimizer_pre_hooks, own._global_optimizer_post_hooks


@contextlib.contextmanager
def _deaf(hooks: dict[int, Callable[..., Any]]) -> Iterator[None]:
    """Have hooks called in other threads only."""
    here, before = threading.get_ident(), dict(hooks)

    def elsewhere(hook: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            return None if threading.get_ident() == here else hook(*args)

        return call

    for number, hook in before.items():
        if number in hooks:
            hooks[number] = elsewhere(hook)
    try:
        yield
    finally:
        for number, hook in before.items():
            if number in hooks:  # else it was removed meanwhile
                hooks[number] = hook


def is_sharded(model: torch.nn.Module) -> bool:
    """Whether ``fully_shard`` has left a process parts of the model's parameters alone."""
    if not torch.distributed.is_available():
        return False
    from torch.distributed.fsdp import FSDPModule  # noqa: PLC0415

    return any(isinstance(module, FSDPModule) for module in model.modules())


def late_bytes(model: torch.nn.Module) -> int:
    """Bytes of buffers of ``fully_shard`` that may be there or not, as other processes have it:
    the largest group of parameters that is gathered at once, on a CPU several of them.
    """
    from torch.distributed.fsdp import FSDPModule  # noqa: PLC0415

    units = [module for module in model.modules() if isinstance(module, FSDPModule)]
    inner = {id(unit): {id(p) for p in unit.parameters()} for unit in units}
    most = 0
    for unit in units:
        nested = [m for m in unit.modules() if isinstance(m, FSDPModule) and m is not unit]
        others: set[int] = set().union(*(inner[id(m)] for m in nested))
        own = (p for p in unit.parameters() if id(p) not in others)
        most = max(most, sum(p.numel() * p.element_size() for p in own))
    on_cpu = any(p.device.type == "cpu" for p in model.parameters())
    return HELD_LATE * most if on_cpu else most
