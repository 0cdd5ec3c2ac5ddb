"""Accelerate: ``prepare`` within a budget."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from fxremat import api
from fxremat.errors import ArgumentError
from fxremat.module.compiled import CompiledModule
from fxremat.options.budget import Readable

try:
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState
    from accelerate.utils import DistributedType, DynamoBackend
except ImportError as error:
    raise ImportError(
        "fxremat.integrations.accelerate needs Accelerate: pip install 'fxremat[accelerate]'"
    ) from error

_SHARDED = (
    DistributedType.FSDP,
    DistributedType.DEEPSPEED,
    DistributedType.MEGATRON_LM,
    DistributedType.XLA,
)


def prepare(
    accelerator: Accelerator,
    *objects: Any,
    budget: Readable | None = None,
    sample: object = None,
    **options: Any,
) -> Any:
    """``accelerator.prepare(*objects)``, with the model among them trained within a budget.

    What the accelerator was told is passed on: with ``gradient_accumulation_steps`` above 1
    gradients that exist are counted (``accumulate``), and so is the state of the optimizer
    among ``objects``.

    Args:
        accelerator: yours.
        *objects: one model, and all else that ``accelerator.prepare`` takes. They may have been
            prepared before.
        budget: as for :func:`fxremat.compile`, for one process.
        sample: a call of the model; ``None``: the first training call.
        **options: of :func:`fxremat.compile`.

    Returns the same as ``accelerator.prepare``: all objects in order, or the only one.

    Raises:
        ArgumentError: there is not one model; the accelerator compiles or shards it; an option
            cannot be read.
        FxrematError: as :func:`fxremat.compile`.
    """
    check_state(accelerator.state)
    models = [item for item in objects if isinstance(item, nn.Module)]
    if len(models) != 1:
        raise ArgumentError(
            f"prepare got {len(models)} models, a budget is for one: give the others to "
            "accelerator.prepare, or compile each with a budget of its own",
            argument="objects",
            value=objects,
        )
    (model,) = models
    optimizers = [item for item in objects if isinstance(item, torch.optim.Optimizer)]
    if len(optimizers) == 1:
        options.setdefault("optimizer", unwrapped(optimizers[0]))
    options.setdefault("accumulate", accelerator.gradient_accumulation_steps > 1)
    prepared = getattr(model, "_is_accelerate_prepared", False)
    if not isinstance(model, CompiledModule):
        if accelerator.device_placement and sample is not None and not prepared:
            model = model.to(accelerator.device)
        model = api.compile(model, sample, budget, **options)
    given = tuple(model if item is models[0] else item for item in objects)
    if not prepared:
        return accelerator.prepare(*given)
    # The accelerator has the model already, and would take ours for another one.
    others = iter(_tuple(accelerator.prepare(*(x for x in given if x is not model))))
    found = tuple(x if x is model else next(others) for x in given)
    return found if len(found) > 1 else found[0]


def unwrapped(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """The optimizer that an accelerator has wrapped; any other as it is."""
    inner: torch.optim.Optimizer = getattr(optimizer, "optimizer", optimizer)
    return inner


def check_state(state: AcceleratorState) -> None:
    """Refuse what would compile the model once more, or take its parameters apart.

    Raises:
        ArgumentError: the state asks for it.
    """
    backend = state.dynamo_plugin.backend
    if backend != DynamoBackend.NO:
        raise ArgumentError(
            f"Accelerate compiles the model with dynamo_backend={backend.value}, and fxremat "
            "does: set that to no",
            argument="dynamo_backend",
            value=backend.value,
        )
    if state.distributed_type in _SHARDED:
        raise ArgumentError(
            f"{state.distributed_type.value} shards the model or has a step of its own: "
            "fxremat plans a whole step of one process, alone or inside DistributedDataParallel",
            argument="distributed_type",
            value=state.distributed_type.value,
        )


def _tuple(found: Any) -> tuple[Any, ...]:
    return found if isinstance(found, tuple) else (found,)
