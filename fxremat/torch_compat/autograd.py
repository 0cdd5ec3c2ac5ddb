"""Autograd's engine: before, during and after a backward, and what waits for it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch


def before_backward(outputs: Iterable[object], check: Callable[[object], None]) -> None:
    """Call ``check`` right before each backward of a compiled step, in its thread.

    Gradients are enabled there exactly if the backward is to be differentiated.

    Args:
        outputs: outputs of the compiled graph.
        check: called with the gradients of the outputs.
    """
    for leaf in outputs:
        node: Any = leaf.grad_fn if isinstance(leaf, torch.Tensor) else None
        while node is not None and "CompiledFunction" not in type(node).__name__:
            node = node.next_functions[0][0] if node.next_functions else None
        if node is not None:
            node.register_prehook(check)
            return


def before_each_backward(outputs: object, call: Callable[[], None]) -> bool:
    """Call ``call`` before a backward continues from any of ``outputs``, in its thread.

    Returns whether any of them has a gradient function, so that it can be called.
    """
    from torch.utils._pytree import tree_leaves  # noqa: PLC0415

    tensors = (leaf for leaf in tree_leaves(outputs) if isinstance(leaf, torch.Tensor))
    nodes = {tensor.grad_fn: None for tensor in tensors if tensor.grad_fn is not None}
    for node in nodes:
        node.register_prehook(lambda _gradients: call())
    return bool(nodes)


def after_backward(call: Callable[[], None]) -> None:
    """Call ``call`` when the running backward ends; ``backward()`` raises its errors."""
    engine: Any = torch.autograd.Variable._execution_engine
    engine.queue_callback(call)


def current_backward() -> int:
    """Return the number that identifies the backward which this thread runs; -1 outside of any."""
    return int(torch._C._current_graph_task_id())


def drop_failed_backward() -> None:
    """Free what a backward of this thread that raised an error has left.

    Nodes that were ready to run stay in the thread's queue, and keep everything that the graph has
    saved, until the next backward notices. This function runs one of an empty graph.
    """
    if current_backward() < 0:
        with torch.inference_mode(False), torch.enable_grad():
            torch.autograd.backward(torch.zeros((), requires_grad=True))


def is_profiled() -> bool:
    """Return whether a profiler is active in this thread or the one that started its backward."""
    enabled: Any = torch._C._autograd._profiler_enabled
    return bool(enabled())


def keeps_graph() -> bool:
    """Return whether the running backward was called with ``retain_graph``."""
    asked: Any = torch._C._autograd._get_current_graph_task_keep_graph
    return bool(asked())


def next_nodes() -> list[Any]:
    """Return the nodes of autograd's graph that get the gradients of the node that runs now.

    There is one for each input tensor, and ``None`` for inputs that need no gradient.
    """
    node: Any = torch._C._current_autograd_node()
    return [function for function, _ in node.next_functions]


def will_accumulate(node: Any) -> bool | None:
    """Return whether the running backward accumulates a gradient into the leaf of ``node``.

    Returns ``None`` if it returns the gradient instead (``torch.autograd.grad``), or if none runs.
    """
    try:
        return bool(torch._C._will_engine_execute_node(node))
    except RuntimeError:
        return None


def all_accumulate(nodes: Iterable[Any]) -> bool:
    """Return whether the running backward reaches all nodes, as it does unless inputs are named.

    ``None`` among the nodes is ignored. Returns ``False`` if no backward runs, or if
    ``torch.autograd.grad`` returns their gradients.
    """
    try:
        return all(map(torch._C._will_engine_execute_node, filter(None, nodes)))
    except RuntimeError:
        return False


def versions_of(tensors: Sequence[torch.Tensor]) -> list[int]:
    """Return the version of each tensor, which counts writes to it; -1 for inference tensors."""
    try:
        return [tensor._version for tensor in tensors]
    except RuntimeError:  # some are inference tensors
        return [-1 if tensor.is_inference() else tensor._version for tensor in tensors]


def saved_elsewhere() -> bool:
    """Return whether hooks replace the tensors that autograd saves now.

    Hooks of ``torch.utils.checkpoint`` do not count: they run the forward again, and what it saved
    the first time must be freed.
    """
    top: Any = torch._C._autograd._top_saved_tensors_default_hooks
    hooks = top(False)
    return hooks is not None and "checkpoint" not in getattr(hooks[0], "__qualname__", "")


def in_transform() -> bool:
    """Return whether a transform of ``torch.func`` runs, whose tensors have no storage."""
    return torch._C._functorch.peek_interpreter_stack() is not None
