"""How others save device memory: each peer makes a call that stands for the model's."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._functorch import config
from torch.utils.checkpoint import checkpoint

from benchmarks.gpu_networks import Network
from fxremat.costs.measured.measure import device_of
from fxremat.torch_compat import capture_settings, is_backward_node

Call = Callable[..., Tensor]
Peer = Callable[[Network, nn.Module, tuple[Tensor, ...]], Call]

LEAST_OFFLOAD_BYTES = 1 << 20
"""What torch's own offloading is told to move: saved tensors from this size on."""


class NotHereError(Exception):
    """A peer that cannot run here, and why."""


def eager(_network: Network, model: nn.Module, _inputs: tuple[Tensor, ...]) -> Call:
    """The model as it is."""
    return model


def checkpointed(network: Network, model: nn.Module, _inputs: tuple[Tensor, ...]) -> Call:
    """``torch.utils.checkpoint`` around each block."""
    twin = _twin(model)
    for block in network.blocks(twin):
        block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)
    return twin


def saved_on_host(_network: Network, model: nn.Module, _inputs: tuple[Tensor, ...]) -> Call:
    """``save_on_cpu(pin_memory=True)``: every saved tensor moves, in the compute stream's order.

    Where the step runs on a CPU there is nothing to pin and nowhere to move to.
    """
    pin = device_of(model).type == "cuda"

    def call(*inputs: Tensor) -> Tensor:
        with torch.autograd.graph.save_on_cpu(pin_memory=pin):
            loss: Tensor = model(*inputs)
        return loss

    return call


def offloaded_by_torch(_network: Network, model: nn.Module, inputs: tuple[Tensor, ...]) -> Call:
    """AOTAutograd's activation offloading, of every saved tensor that it can move.

    It is off unless ``torch._functorch.config.enable_activation_offloading`` is set, and then
    moves what a pass over the joint graph has marked with ``should_offload``. With its side
    stream, sunk waits and prefetching where they work, else without.

    Raises:
        NotHereError: it is not in this torch, is not made for this device, or fails.
    """
    if not hasattr(config, "enable_activation_offloading"):
        raise NotHereError("not in this torch")
    if device_of(model).type != "cuda":
        raise NotHereError("moves from a GPU only")
    overlapped = {
        "activation_offload_separate_stream": True,
        "activation_offload_sink_wait": True,
        "activation_reload_prefetch": True,
    }
    overlapped = {name: value for name, value in overlapped.items() if hasattr(config, name)}
    for settings in (overlapped, {}):
        try:
            return _compiled_with(settings, model, inputs)
        except Exception as error:  # it is marked as for testing: whatever comes is its result
            why = f"fails: {type(error).__name__}: {str(error).strip().splitlines()[0]}"[:120]
    raise NotHereError(why)


def _compiled_with(settings: dict[str, bool], model: nn.Module, inputs: tuple[Tensor, ...]) -> Call:
    """The compiled model, after a step in which it was compiled with ``settings``."""
    torch._dynamo.reset()
    compiled = torch.compile(
        model, backend="aot_eager_decomp_partition", fullgraph=True, dynamic=False
    )

    def call(*arguments: Tensor) -> Tensor:
        with capture_settings():
            loss: Tensor = compiled(*arguments)
        return loss

    patch: Any = config.patch
    with patch(enable_activation_offloading=True, joint_custom_pass=_mark, **settings):
        call(*inputs).backward()
    return call


def _mark(joint: fx.GraphModule, _inputs: object) -> fx.GraphModule:
    """Ask for everything; the partitioner moves those that it saves and can move."""
    for node in joint.graph.nodes:
        value = node.meta.get("val")
        if node.op != "call_function" or is_backward_node(node) or not isinstance(value, Tensor):
            continue
        if value.numel() * value.element_size() >= LEAST_OFFLOAD_BYTES:
            node.meta["should_offload"] = True
    return joint


def _twin(model: nn.Module) -> nn.Module:
    """A copy of the modules on the same parameters and buffers."""
    shared = {id(t): t for t in (*model.parameters(), *model.buffers())}
    return copy.deepcopy(model, dict(shared))


PEERS: dict[str, Peer] = {
    "eager": eager,
    "checkpoint per block": checkpointed,
    "save_on_cpu": saved_on_host,
    "torch offloading": offloaded_by_torch,
}
