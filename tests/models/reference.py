"""One training step from a seed, and the same step without recomputation to compare it with."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import functional_call
from torch.utils._pytree import tree_leaves, tree_map

from tests.models.bits import assert_bitwise_equal, bitwise_equal, first_difference
from tests.models.zoo import Args, Kwargs, ZooModel

__all__ = [
    "StepResult",
    "assert_bitwise_equal",
    "bitwise_equal",
    "call_without_trace",
    "compile_reference",
    "first_difference",
    "move",
    "reference_step",
    "run_step",
    "train",
    "whole_graph_settings",
]


_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class StepResult:
    """Everything that a training step leaves behind, as copies.

    ``differentiable`` has the structure of ``outputs``: whether each tensor requires a
    gradient. ``input_gradients`` follows the floating-point tensors of the sample.
    """

    loss: Tensor
    outputs: Any
    differentiable: Any
    gradients: dict[str, Tensor | None]
    input_gradients: list[Tensor | None]
    buffers: dict[str, Tensor]


def run_step(
    entry: ZooModel,
    model: nn.Module,
    call: Callable[..., Any] | None = None,
    *,
    data_seed: int = 0,
    step_seed: int = 0,
    input_gradients: bool = False,
) -> StepResult:
    """Run one forward and backward of ``call`` and copy what it leaves.

    ``call`` is the compiled ``model`` (``model`` itself when None). The random state is
    ``torch.manual_seed(step_seed)`` right before the call, and is put back afterwards.
    Gradients that exist already are accumulated into, as in any step.
    """
    device = next(model.parameters()).device
    args, kwargs = move(entry.sample(data_seed), device)
    inputs = [x for x in tree_leaves((args, kwargs)) if _floating(x)]
    for x in inputs:
        x.requires_grad_(input_gradients)
    with torch.random.fork_rng():
        torch.manual_seed(step_seed)
        with entry.context(device.type):
            outputs = (model if call is None else call)(*args, **kwargs)
            loss = entry.loss(outputs)
        kept = tree_map(_aside, outputs)
        differentiable = tree_map(lambda x: isinstance(x, Tensor) and x.requires_grad, outputs)
        # The outputs would otherwise stay alive for the whole backward, as would copies.
        del outputs
        loss.backward()
    return StepResult(
        loss=_copy(loss),
        outputs=tree_map(lambda restore: restore(), kept),
        differentiable=differentiable,
        gradients={name: _copy(p.grad) for name, p in model.named_parameters()},
        input_gradients=[_copy(x.grad) for x in inputs],
        buffers={name: _copy(b) for name, b in model.named_buffers()},
    )


def reference_step(
    entry: ZooModel,
    *,
    data_seed: int = 0,
    step_seed: int = 0,
    input_gradients: bool = False,
    fullgraph: bool = True,
    device: str | torch.device = "cpu",
) -> StepResult:
    """A fresh model's first step through ``aot_eager``: the graph without recomputation."""
    model = entry.build().to(device)
    call = compile_reference(entry, model, fullgraph=fullgraph)
    return run_step(
        entry,
        model,
        call,
        data_seed=data_seed,
        step_seed=step_seed,
        input_gradients=input_gradients,
    )


def compile_reference(
    entry: ZooModel, model: nn.Module, *, fullgraph: bool = True
) -> Callable[..., Any]:
    """``model`` through ``torch.compile(backend=entry.reference_backend)``, captured whole.

    Compiled code is cached by the class of the model; ``torch._dynamo.reset()`` drops it.
    """
    if entry.hooks_at_first_call:
        call_without_trace(entry, model)
    compiled = torch.compile(model, backend=entry.reference_backend, fullgraph=fullgraph)

    def call(*args: Any, **kwargs: Any) -> Any:
        with whole_graph_settings():
            return compiled(*args, **kwargs)

    return call


def call_without_trace(entry: ZooModel, model: nn.Module) -> None:
    """Call ``model`` on fake tensors only, so that it installs its hooks and nothing else.

    Its parameters and buffers are replaced too: with real ones, an in-place ``add_`` on a
    0-dimensional counter is carried out although the mode is on.
    """
    mode = FakeTensorMode()

    def fake(x: Any) -> Any:
        return mode.from_tensor(x) if isinstance(x, Tensor) else x

    device = next(model.parameters()).device
    args, kwargs = tree_map(fake, move(entry.sample(0), device))
    state = tree_map(fake, {**dict(model.named_parameters()), **dict(model.named_buffers())})
    with mode, torch.no_grad(), entry.context(device.type):
        functional_call(model, state, args, kwargs)


def train(
    entry: ZooModel,
    model: nn.Module,
    call: Callable[..., Any] | None = None,
    *,
    steps: int = 3,
    accumulate: int = 1,
    step_seed: int = 0,
    learning_rate: float = 1e-3,
) -> dict[str, Any]:
    """Train for ``steps`` updates of AdamW, each of ``accumulate`` batches.

    Returns the losses of all batches and the final ``state_dict``. Every batch has its own
    data and its own random state, numbered from ``step_seed``.
    """
    trainable = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trainable, lr=learning_rate)
    losses = []
    for step in range(steps):
        optimizer.zero_grad()
        for part in range(accumulate):
            seed = step_seed + step * accumulate + part
            losses.append(run_step(entry, model, call, data_seed=seed, step_seed=seed).loss)
        optimizer.step()
    return {"losses": losses, "state": {k: _copy(v) for k, v in model.state_dict().items()}}


@contextlib.contextmanager
def whole_graph_settings() -> Iterator[None]:
    """Let Dynamo capture models that log: their messages are dropped while capturing."""
    names = ("debug", "info", "warn", "error", "exception", "critical", "log")
    methods = {method for name, method in vars(logging.Logger).items() if name.startswith(names)}
    with torch._dynamo.config.patch(ignore_logging_functions=methods):
        yield


def move(sample: tuple[Args, Kwargs], device: torch.device) -> tuple[Args, Kwargs]:
    """The sample with its tensors on ``device``."""
    return tree_map(lambda x: x.to(device) if isinstance(x, Tensor) else x, sample)


def _floating(x: Any) -> bool:
    return isinstance(x, Tensor) and x.is_floating_point()


def _aside(x: Any) -> Callable[[], Any]:
    """Restores ``x``, which is kept where torch's allocator does not count it."""
    if not isinstance(x, Tensor):
        return lambda: x
    value = x.detach().resolve_conj().resolve_neg()
    parts = torch.view_as_real(value) if value.is_complex() else value
    bits = parts.view(_INTEGERS[parts.element_size()]).cpu().numpy().copy()
    dtype, is_complex = parts.dtype, value.is_complex()

    def restore() -> Tensor:
        found = torch.from_numpy(bits).view(dtype)
        return torch.view_as_complex(found) if is_complex else found

    return restore


def _copy(x: Any) -> Any:
    return x.detach().clone() if isinstance(x, Tensor) else x
