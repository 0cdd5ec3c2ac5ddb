"""Accelerate: a function ``prepare`` whose model trains within a budget."""

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
        "fxremat.integrations.accelerate requires Accelerate: pip install 'fxremat[accelerate]'"
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
    """Call ``accelerator.prepare(*objects)`` with the model compiled for a budget.

    If ``gradient_accumulation_steps`` of the accelerator is above 1, gradients that exist before a
    step are counted (``accumulate``). The state of an optimizer among ``objects`` is also counted.

    Args:
        accelerator: the accelerator.
        *objects: one model, and the other arguments of ``accelerator.prepare``, prepared or not.
        budget: the budget of one process, as for :func:`fxremat.compile`.
        sample: a call of the model. If ``None``, the first training call is planned.
        **options: options of :func:`fxremat.compile`.

    Returns:
        The result of ``accelerator.prepare``: all objects in order, or the only one.

    Raises:
        ArgumentError: ``objects`` do not contain exactly one model, the accelerator compiles or
            shards it, or an option cannot be read.
        FxrematError: see :func:`fxremat.compile`.
    """
    check_state(accelerator.state)
    models = [item for item in objects if isinstance(item, nn.Module)]
    if len(models) != 1:
        raise ArgumentError(
            f"prepare got {len(models)} models, but a budget is for one model: pass the others to "
            "accelerator.prepare, or compile each with its own budget",
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
    # The accelerator has the model already, and would prepare the compiled one as another.
    others = iter(_as_tuple(accelerator.prepare(*(x for x in given if x is not model))))
    results = tuple(x if x is model else next(others) for x in given)
    return results if len(results) > 1 else results[0]


def unwrapped(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Return the optimizer that an accelerator has wrapped; return any other unchanged."""
    inner: torch.optim.Optimizer = getattr(optimizer, "optimizer", optimizer)
    return inner


def check_state(state: AcceleratorState) -> None:
    """Raise ``ArgumentError`` if an accelerator compiles or shards the model itself."""
    backend = state.dynamo_plugin.backend
    if backend != DynamoBackend.NO:
        raise ArgumentError(
            f"Accelerate compiles the model with dynamo_backend={backend.value}, but fxremat "
            "compiles it itself: set dynamo_backend to no",
            argument="dynamo_backend",
            value=backend.value,
            code="FXR407",
        )
    if state.distributed_type in _SHARDED:
        raise ArgumentError(
            f"{state.distributed_type.value} shards the model or replaces the training step, but "
            "fxremat plans a whole step of one process, by itself or in DistributedDataParallel",
            argument="distributed_type",
            value=state.distributed_type.value,
            code="FXR409",
        )


def _as_tuple(results: Any) -> tuple[Any, ...]:
    return results if isinstance(results, tuple) else (results,)
