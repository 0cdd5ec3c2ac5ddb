"""Autograd's engine: before, while and after a backward runs, and what waits for it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch


def before_backward(outputs: Iterable[object], check: Callable[[object], None]) -> None:
    """Call ``check`` right before each backward of a compiled step, in its thread.

    Gradients are enabled there exactly if the backward is to be differentiated.

    Args:
        outputs: of the compiled graph.
        check: is called with the gradients of the outputs.
    """
    for leaf in outputs:
        node: Any = leaf.grad_fn if isinstance(leaf, torch.Tensor) else None
        while node is not None and "CompiledFunction" not in type(node).__name__:
            node = node.next_functions[0][0] if node.next_functions else None
        if node is not None:
            node.register_prehook(check)
            return


def before_each_backward(outputs: object, call: Callable[[], None]) -> bool:
    """Call ``call`` before a backward goes on from any of ``outputs``, in its thread.

    Returns whether any of them has a gradient function.
    """
    from torch.utils._pytree import tree_leaves  # noqa: PLC0415

    tensors = (leaf for leaf in tree_leaves(outputs) if isinstance(leaf, torch.Tensor))
    nodes = {tensor.grad_fn: None for tensor in tensors if tensor.grad_fn is not None}
    for node in nodes:
        node.register_prehook(lambda _gradients: call())
    return bool(nodes)


def after_backward(call: Callable[[], None]) -> None:
    """Have ``call`` called once the backward that runs has ended, which raises what it raises."""
    engine: Any = torch.autograd.Variable._execution_engine
    engine.queue_callback(call)


def current_backward() -> int:
    """The number of the backward that this thread runs; -1 outside any."""
    return int(torch._C._current_graph_task_id())


def drop_failed_backward() -> None:
    """Free what a backward of this thread that raised has left behind.

    Its nodes that were ready to run stay in the thread's queue, and with them all that the graph
    has saved, until the next backward finds that theirs is gone. This is one, of nothing.
    """
    if current_backward() < 0:
        with torch.inference_mode(False), torch.enable_grad():
            torch.autograd.backward(torch.zeros((), requires_grad=True))


def is_profiled() -> bool:
    """Whether a profiler is on in this thread, or where its backward was asked for."""
    enabled: Any = torch._C._autograd._profiler_enabled
    return bool(enabled())


def keeps_graph() -> bool:
    """Whether the backward that runs was asked for with ``retain_graph``."""
    asked: Any = torch._C._autograd._get_current_graph_task_keep_graph
    return bool(asked())


def next_nodes() -> list[Any]:
    """Nodes of autograd's graph that get the gradients of the node which runs now.

    One for each tensor that went into it; ``None`` for what needs no gradient.
    """
    node: Any = torch._C._current_autograd_node()
    return [function for function, _ in node.next_functions]


def will_accumulate(node: Any) -> bool | None:
    """Whether the backward that runs accumulates into a leaf, whose node this is.

    ``None``: it returns the gradient instead (``torch.autograd.grad``), or none runs.
    """
    try:
        return bool(torch._C._will_engine_execute_node(node))
    except RuntimeError:
        return None


def all_accumulate(nodes: Iterable[Any]) -> bool:
    """Whether the backward that runs goes on to all nodes, as it does where nobody named inputs.

    Args:
        nodes: ``None`` among them is none.
    """
    try:
        return all(map(torch._C._will_engine_execute_node, filter(None, nodes)))
    except RuntimeError:
        return False


def versions_of(tensors: Sequence[torch.Tensor]) -> list[int]:
    """How often each tensor was written to; -1 where that is not counted."""
    try:
        return [tensor._version for tensor in tensors]
    except RuntimeError:  # there are inference tensors
        return [-1 if tensor.is_inference() else tensor._version for tensor in tensors]


def saved_elsewhere() -> bool:
    """Whether hooks put other tensors in place of those that autograd saves now.

    Not those of ``torch.utils.checkpoint``: they run the forward again, and what it saved the
    first time must go.
    """
    top: Any = torch._C._autograd._top_saved_tensors_default_hooks
    hooks = top(False)
    return hooks is not None and "checkpoint" not in getattr(hooks[0], "__qualname__", "")


def in_transform() -> bool:
    """Whether a transform of ``torch.func`` runs, whose tensors have no storage of their own."""
    return torch._C._functorch.peek_interpreter_stack() is not None
