"""Collectives: operations of a graph that wait for other processes.

Private names, checked with torch 2.13: namespaces of functional collectives, the order of their
arguments, ``distributed_c10d._resolve_process_group``.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, fx

HELD_LATE = 3
"""How many buffers of collectives the threads of a CPU's process group hold until they run again.
This many were observed on a busy machine."""

_NAMESPACES = ("_c10d_functional", "_dtensor")

PING_BYTES = 4096, 1 << 20
"""Sizes of the messages that measure how fast processes reach each other."""

PINGS = 3
"""How often each message is sent: the same number in each process, whatever the clock says."""


def is_collective(node: fx.Node) -> bool:
    """Return whether ``node`` is called by all processes of a group, or waits for such a call."""
    return node.op == "call_function" and getattr(node.target, "namespace", "") in _NAMESPACES


def is_shared(node: fx.Node) -> bool:
    """Return whether ``node`` is a collective in which other processes take part.

    It is not if its group is this process only.
    """
    if not is_collective(node):
        return False
    group = group_of(awaited(node) if is_wait(node) else node)
    if group is None:  # the collective it waits for is not in the graph
        return torch.distributed.get_world_size() > 1
    distributed_c10d: Any = torch.distributed.distributed_c10d
    return int(distributed_c10d._resolve_process_group(group).size()) > 1


def is_wait(node: fx.Node) -> bool:
    """Return whether ``node`` waits for a collective and returns that collective's result."""
    return is_collective(node) and _name(node.target) == "wait_tensor"


def awaited(wait: fx.Node) -> fx.Node:
    """Return the collective that ``wait`` waits for."""
    node = wait.all_input_nodes[0]
    return node.all_input_nodes[0] if node.target is operator.getitem else node


def group_of(node: fx.Node) -> str | None:
    """Return the name of a collective's process group; ``None`` for waits and other operations."""
    if not is_collective(node) or is_wait(node):
        return None
    schema: Any = node.target._schema  # type: ignore[union-attr]
    named = dict(zip((a.name for a in schema.arguments), node.args, strict=False))
    return str({**named, **node.kwargs}["group_name"])


def alone(target: Any) -> Any:
    """Return a function that does what this process does in a collective, without communication.

    It returns tensors of the same sizes. A ``target`` that is no collective is returned as it is.
    Returns ``None`` if there is no replacement.
    """
    if getattr(target, "namespace", "") not in _NAMESPACES:
        return target
    return _REPLACEMENTS.get(_name(target))


def ping_s(group_name: str, device: torch.device) -> tuple[float, float]:
    """Measure and return the seconds of a collective without bytes, and the seconds per byte.

    All processes of the group must call this function. The number of calls is always the same.
    """
    distributed_c10d: Any = torch.distributed.distributed_c10d
    group = distributed_c10d._resolve_process_group(group_name)
    seconds = []
    for nbytes in PING_BYTES:
        tensor = torch.zeros(nbytes, dtype=torch.uint8, device=device)
        runs = []
        for _ in range(1 + PINGS):
            began = perf_counter()
            torch.distributed.all_reduce(tensor, group=group)
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            runs.append(perf_counter() - began)
        seconds.append(min(runs[1:]))
    few, many = PING_BYTES
    each_s = max(0.0, (seconds[1] - seconds[0]) / (many - few))
    return seconds[0], each_s


def _name(target: Any) -> str:
    return str(target._schema.name).split("::")[1]


def _repeated(tensor: Tensor, group_size: int, *_rest: object) -> Tensor:
    return torch.cat([tensor] * group_size)


def _first_part(tensor: Tensor, _op: str, group_size: int, *_rest: object) -> Tensor:
    return _clone(tensor[: tensor.shape[0] // group_size])


def _exchanged(tensor: Tensor, received: Sequence[int], *_rest: object) -> Tensor:
    return tensor.new_zeros((sum(received), *tensor.shape[1:]))


def _for_each(function: Callable[..., Tensor]) -> Callable[..., list[Tensor]]:
    return lambda tensors, *rest: [function(tensor, *rest) for tensor in tensors]


def _clone(tensor: Tensor, *_rest: object) -> Tensor:
    return tensor.clone(memory_format=torch.contiguous_format)


_REPLACEMENTS: dict[str, Callable[..., Any]] = {
    "wait_tensor": lambda tensor: tensor,
    "all_reduce": _clone,
    "all_reduce_coalesced": _for_each(_clone),
    "broadcast": _clone,
    "all_gather_into_tensor": _repeated,
    "all_gather_into_tensor_coalesced": _for_each(_repeated),
    "reduce_scatter_tensor": _first_part,
    "reduce_scatter_tensor_coalesced": _for_each(_first_part),
    "all_to_all_single": _exchanged,
}
