"""Run blocks: compiled, or operation by operation under the allocator's eye."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import torch
from torch import fx

from fxremat import torch_compat
from fxremat.costs.cache import CostCache
from fxremat.costs.measure import KernelClock
from fxremat.errors import CostError
from fxremat.passes.emit.code import compile_graph
from fxremat.passes.joint.storage import allocated_bytes, tensors_of
from fxremat.passes.stages.block import Block, build_graph, call_of, is_getitem
from fxremat.passes.stages.signature import Key, node_key


def compile_block(block: Block) -> torch_compat.BoxedCallable:
    """The block as a function of one list, which it empties, freeing as it goes."""
    return compile_graph(build_graph(block))


def run_logged(
    block: Block,
    inputs: Mapping[fx.Node, torch.Tensor],
    cache: CostCache,
    *,
    device: torch.device,
) -> dict[fx.Node, torch.Tensor]:
    """Run each operation of ``block`` and note its workspace and its results' sizes.

    Args:
        block: the operations.
        inputs: their values.
        cache: measurements; new ones are added.
        device: whose memory is meant, that of the step.

    Returns the values of all tensors computed.

    Raises:
        CostError: an operation failed, or returned a copy where the trace has a view.
    """
    values: dict[fx.Node, Any] = dict(inputs)
    with _AllocatorPeaks(device) as peaks:
        for index, node in enumerate(block.nodes):
            peaks.mark(index)
            values[node] = _call(node, block, values)
    for index, node in enumerate(block.nodes):
        if is_getitem(node):
            continue
        key = node_key(node, block)
        sizes = [
            allocated_bytes(t.untyped_storage().nbytes(), device)
            for t in _fresh(node, block, values)
            if t.device == device
        ]
        workspace = max(peaks.peak_bytes(index) - sum(sizes), 0)
        cache.result_bytes[key] = _result_bytes(values[node])
        cache.as_traced[key] = _lies_as_traced(node, values[node])
        cache.workspace_bytes[key] = max(workspace, cache.workspace_bytes.get(key, 0))
    return {n: values[n] for n in block.nodes if isinstance(values[n], torch.Tensor)}


def time_operations(
    block: Block,
    inputs: Mapping[fx.Node, torch.Tensor],
    seconds: dict[Key, float],
    *,
    device: torch.device,
) -> None:
    """Run each operation of ``block`` alone, and note the fastest of a few runs if it is new.

    Raises:
        CostError: an operation failed.
    """
    values: dict[fx.Node, Any] = dict(inputs)
    clock = KernelClock(device)
    for node in block.nodes:
        values[node] = _call(node, block, values)  # warm as well
        key = node_key(node, block)
        if is_getitem(node) or key in seconds:
            continue
        run = functools.partial(_call, node, block, values)
        seconds[key] = min(clock.seconds_of(run) for _ in range(5))


def _call(node: fx.Node, block: Block, values: Mapping[fx.Node, Any]) -> Any:
    target, args, kwargs = call_of(node, block.mode_of(node))
    assert callable(target)
    try:
        real_args = torch.fx.map_arg(args, lambda n: values[n])
        real_kwargs = torch.fx.map_arg(kwargs, lambda n: values[n])
        return target(*real_args, **real_kwargs)
    except Exception as error:
        raise CostError(
            f"operation {node.name} ({target}) of stage {block.stage} cannot be run alone: {error}"
        ) from error


def _tensors(value: object) -> list[torch.Tensor]:
    items = value if isinstance(value, (tuple, list)) else (value,)
    return [item for item in items if isinstance(item, torch.Tensor)]


def _result_bytes(value: object) -> tuple[int, ...]:
    """Sizes of the distinct storages of a result, in order."""
    sizes = {
        torch_compat.storage_key(t): allocated_bytes(t.untyped_storage().nbytes(), t.device)
        for t in _tensors(value)
    }
    return tuple(sizes.values())


def _lies_as_traced(node: fx.Node, value: object) -> bool:
    """Whether real tensors have the strides, offsets and devices that their trace has.

    Seed and offset of an attention's dropout are traced on the GPU, and live on the CPU.
    """
    real, traced = _tensors(value), tensors_of(node)
    return [_place(t) for t in real] == [_place(t) for t in traced]


def _place(t: torch.Tensor) -> tuple[object, ...]:
    return t.stride(), t.storage_offset(), t.device


def _fresh(node: fx.Node, block: Block, values: Mapping[fx.Node, Any]) -> list[torch.Tensor]:
    """A tensor in each of the storages that running ``node`` allocated for its results."""
    sources = [values[n] for n in block.sources(node)]
    given = {torch_compat.storage_key(t) for value in sources for t in _tensors(value)}
    fresh = {
        torch_compat.storage_key(t): t
        for t in _tensors(values[node])
        if torch_compat.storage_key(t) not in given
    }
    traced_given = {torch_compat.storage_key(t) for n in block.sources(node) for t in tensors_of(n)}
    traced = {torch_compat.storage_key(t) for t in tensors_of(node)} - traced_given
    if len(fresh) > len(traced):
        raise CostError(
            f"operation {node.name} ({node.target}) of stage {block.stage} allocates "
            f"{len(fresh)} storages where its trace has {len(traced)}: its memory cannot be known"
        )
    return list(fresh.values())


class _AllocatorPeaks:
    """The most that each marked operation had allocated at once, less its start."""

    def __init__(self, device: torch.device) -> None:
        self._peaks: dict[int, int] = {}
        self._log = torch_compat.AllocationLog(device)

    def __enter__(self) -> _AllocatorPeaks:
        self._log.__enter__()
        return self

    def mark(self, index: int) -> None:
        """Operation ``index`` begins, and the one before is over."""
        self._log.mark(str(index))

    def __exit__(self, *exc_info: object) -> None:
        self._log.__exit__(*exc_info)
        now: dict[str, int] = {}
        for mark, change in self._log.events:
            now[mark] = now.get(mark, 0) + change
            if mark:
                self._peaks[int(mark)] = max(self._peaks.get(int(mark), 0), now[mark])

    def peak_bytes(self, index: int) -> int:
        """Of operation ``index``."""
        return self._peaks.get(index, 0)
