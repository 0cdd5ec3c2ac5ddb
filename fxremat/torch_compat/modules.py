"""Modules: what runs when one is called, wrappers of modules, and steps of optimizers."""

from __future__ import annotations

import contextlib
import functools
import importlib
import threading
import types
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch

from fxremat.torch_compat.collectives import HELD_LATE


def call_instead(model: torch.nn.Module, call: Callable[..., Any] | None) -> None:
    """Run ``call`` whenever ``model`` is called, as ``nn.Module.compile`` does.

    ``None`` restores the model's own call.
    """
    model._compiled_call_impl = call


def called_instead(model: torch.nn.Module) -> object:
    """Return the function that :func:`call_instead` has set for ``model``, or ``None``."""
    call: object = model._compiled_call_impl
    return call


def own_call(model: torch.nn.Module) -> Callable[..., Any]:
    """Return the forward of ``model`` with its hooks, without what :func:`call_instead` has set."""
    call: Callable[..., Any] = model._call_impl
    return call


def tensors_of_module(model: torch.nn.Module) -> list[torch.Tensor]:
    """Return the parameters and buffers of a module; shared ones may be repeated.

    This is much faster than iterating over them by name.
    """
    tensors: list[torch.Tensor | None] = []
    modules, waiting = {id(model)}, [model]
    while waiting:
        attributes = waiting.pop().__dict__
        tensors += attributes["_parameters"].values()
        tensors += attributes["_buffers"].values()
        for child in attributes["_modules"].values():
            if child is not None and id(child) not in modules:
                modules.add(id(child))
                waiting.append(child)
    return [tensor for tensor in tensors if tensor is not None]


def is_uninitialized(model: torch.nn.Module) -> bool:
    """Return whether ``model`` has tensors that its first call makes, as ``nn.LazyLinear`` does."""
    return any(map(torch.nn.parameter.is_lazy, tensors_of_module(model)))


def becomes_another_class(model: type[torch.nn.Module]) -> bool:
    """Return whether modules of this class change their class at their first call."""
    return issubclass(model, torch.nn.modules.lazy.LazyModuleMixin)


def wrapped_by(model: torch.nn.Module) -> torch.nn.Module:
    """Return the model inside a ``DistributedDataParallel``; any other module as it is."""
    if not torch.distributed.is_available():
        return model
    from torch.nn.parallel import DistributedDataParallel  # noqa: PLC0415

    if not isinstance(model, DistributedDataParallel):
        return model
    inner: torch.nn.Module = model.module
    return inner


def wrapped_anew(wrapper: torch.nn.Module, run: Callable[..., Any]) -> torch.nn.Module:
    """Return a ``DistributedDataParallel`` like ``wrapper`` whose forward calls ``run``.

    Both share all attributes: what is set on one is set on the other.
    """

    class Rewrapped(type(wrapper)):  # type: ignore[misc]
        module = property(lambda _self: run)

    made: torch.nn.Module = Rewrapped.__new__(Rewrapped)
    object.__setattr__(made, "__dict__", wrapper.__dict__)
    return made


def bucket_bytes() -> tuple[int, ...]:
    """Return the bytes of each trainable parameter of the active ``DistributedDataParallel``.

    It has them in its buckets. Returns none if no wrapper is active.
    """
    wrapper = _data_parallel()
    active = None if wrapper is None else wrapper._get_active_ddp_module()
    if active is None:
        return ()
    return tuple(p.numel() * p.element_size() for p in active.parameters() if p.requires_grad)


@functools.cache
def _data_parallel() -> Any:
    """Return the class ``DistributedDataParallel``; ``None`` if this torch does not have it."""
    if not torch.distributed.is_available():
        return None
    from torch.nn.parallel import DistributedDataParallel  # noqa: PLC0415

    return DistributedDataParallel


def around_optimizers(
    before: Callable[[torch.optim.Optimizer], None], after: Callable[[torch.optim.Optimizer], None]
) -> Callable[[], None]:
    """Call functions before and after each step of any optimizer; return a function to end this."""
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
    """Run a step of ``optimizer`` that calls no hooks of optimizers and has no name in a profile.

    Hooks still run for steps of other threads.
    """
    step: Callable[..., object] = type(optimizer).step
    if getattr(step, "hooked", False):
        step = getattr(step, "__wrapped__", step)
    with contextlib.ExitStack() as stack:
        # A step that calls the step of its base class would call hooks again.
        for hooks in _hooks_of_all_optimizers():
            stack.enter_context(_disabled_in_this_thread(hooks))
        step(optimizer)


def unhooked_step(optimizer: torch.optim.Optimizer) -> Callable[..., object]:
    """Return the function of the optimizer's class that makes a step and calls no hooks."""
    step: Callable[..., object] = type(optimizer).step
    if getattr(step, "hooked", False):
        step = getattr(step, "__wrapped__", step)

    def run(stepped: torch.optim.Optimizer) -> object:
        with contextlib.ExitStack() as stack:
            # A step that calls the step of its base class would call hooks again.
            for hooks in _hooks_of_all_optimizers():
                stack.enter_context(_disabled_in_this_thread(hooks))
            return step(stepped)

    return run


def has_own_step(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether something other than a scheduler has replaced ``step`` of one optimizer."""
    step = vars(optimizer).get("step")
    return step is not None and not hasattr(step, "_wrapped_by_lr_sched")


def replace_step(
    optimizer: torch.optim.Optimizer, step: Callable[..., object]
) -> Callable[[], None]:
    """Have ``step`` of one optimizer call a method, with hooks and a profile's name as before.

    Args:
        optimizer: the optimizer.
        step: a bound method, which is called with the optimizer and the arguments of its step. It
            is not kept alive: without it the optimizer's own step runs.

    Returns:
        A function that undoes this, also if ``step`` was replaced again.
    """
    former: Any = vars(optimizer).get("step")
    owner, reference, key = weakref.WeakMethod(step), weakref.ref(optimizer), object()
    del step

    def run(stepped: Any, *args: Any, **kwargs: Any) -> object:
        stepped._opt_called = True  # which schedulers read
        call = owner()
        if call is None:
            return type(stepped).step(stepped, *args, **kwargs)
        return call(stepped, *args, **kwargs)

    make: Any = torch.optim.Optimizer.profile_hook_step
    hooked = make(run)
    for name, value in vars(getattr(former, "__func__", run)).items():
        if name == "_wrapped_by_lr_sched":
            setattr(hooked, name, value)
    hooked.former, hooked.key = former, key
    optimizer.step = types.MethodType(hooked, optimizer)  # type: ignore[method-assign]

    def undo() -> None:
        alive = reference()
        if alive is not None:
            _restore_step(alive, key)

    return undo


def _restore_step(optimizer: torch.optim.Optimizer, key: object) -> None:
    """Undo the :func:`replace_step` with this key."""
    latest: Any = vars(optimizer).get("step")
    step, later = latest, None
    while hasattr(step, "former"):
        if step.key is not key:
            step, later = step.former, step
        elif later is not None:
            later.__func__.former = step.former
            return
        elif step.former is not None:
            optimizer.step = step.former  # type: ignore[method-assign]
            return
        else:
            del optimizer.step
            return


def _hooks_of_all_optimizers() -> tuple[dict[int, Callable[..., Any]], ...]:
    module: Any = importlib.import_module("torch.optim.optimizer")
    return module._global_optimizer_pre_hooks, module._global_optimizer_post_hooks


@contextlib.contextmanager
def _disabled_in_this_thread(hooks: dict[int, Callable[..., Any]]) -> Iterator[None]:
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
            if number in hooks:  # otherwise it was removed in the meantime
                hooks[number] = hook


def is_sharded(model: torch.nn.Module) -> bool:
    """Return whether ``fully_shard`` has sharded parameters of the model."""
    if not torch.distributed.is_available():
        return False
    from torch.distributed.fsdp import FSDPModule  # noqa: PLC0415

    return any(isinstance(module, FSDPModule) for module in model.modules())


def late_bytes(model: torch.nn.Module) -> int:
    """Return the bytes of buffers that ``fully_shard`` may hold late, depending on other processes.

    They are those of the largest group of parameters that is gathered at once, on a CPU several
    times.
    """
    from torch.distributed.fsdp import FSDPModule  # noqa: PLC0415

    units = [module for module in model.modules() if isinstance(module, FSDPModule)]
    inner = {id(unit): {id(p) for p in unit.parameters()} for unit in units}
    most = 0
    for unit in units:
        nested = [m for m in unit.modules() if isinstance(m, FSDPModule) and m is not unit]
        others: set[int] = set().union(*(inner[id(m)] for m in nested))
        gathered = (p for p in unit.parameters() if id(p) not in others)
        most = max(most, sum(p.numel() * p.element_size() for p in gathered))
    on_cpu = any(p.device.type == "cpu" for p in model.parameters())
    return HELD_LATE * most if on_cpu else most
