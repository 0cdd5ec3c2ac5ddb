"""Modules: what runs where one is called, what wraps one, and optimizers' steps."""

from __future__ import annotations

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


def tensors_of_module(model: torch.nn.Module) -> Iterator[torch.Tensor]:
    """Its parameters and buffers, one that is there twice maybe twice: ten times as fast as with
    their names.
    """
    modules = {id(model): model}
    waiting = [model]
    while waiting:
        module = waiting.pop()
        for tensors in (module._parameters, module._buffers):
            yield from (tensor for tensor in tensors.values() if tensor is not None)
        for child in module._modules.values():
            if child is not None and id(child) not in modules:
                modules[id(child)] = child
                waiting.append(child)


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
    if not torch.distributed.is_available():
        return ()
    from torch.nn.parallel import DistributedDataParallel  # noqa: PLC0415

    wrapper: Any = DistributedDataParallel
    active = wrapper._get_active_ddp_module()
    if active is None:
        return ()
    return tuple(p.numel() * p.element_size() for p in active.parameters() if p.requires_grad)


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
