"""Autograd's engine: before, during and after a backward, and what waits for it."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
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


def fed_by_others() -> set[Any] | None:
    """Return the nodes of autograd's graph that get gradients of further nodes in this backward.

    These are the nodes that another node than the one that runs now leads to, or that the running
    one leads to twice. ``None``: that is not known, as no Python code has started the backward.
    """
    running: Any = torch._C._current_autograd_node()
    is_known, fed = False, set[Any]()
    for roots in _roots_of_backwards():
        edges, waiting = set(roots), roots
        met = set[Any]()
        while waiting:
            node = waiting.pop()
            if node in met:
                continue
            met.add(node)
            further = [function for function, _ in node.next_functions if function is not None]
            waiting.extend(further)
            if node is running:
                edges.update(own for own, count in Counter(further).items() if count > 1)
            else:
                edges.update(further)
        if running in met:  # otherwise it is the backward of another thread, or of a hook
            is_known = True
            fed |= edges
    return fed if is_known else None


def _roots_of_backwards() -> Iterator[list[Any]]:
    """Yield the nodes that each backward of this process has begun at, if Python code waits."""
    graph: Any = torch.autograd.graph
    for innermost in sys._current_frames().values():  # on CUDA, another thread waits for this one
        frame: Any = innermost
        while frame is not None:
            if frame.f_code is graph._engine_run_backward.__code__:
                outputs = frame.f_locals["t_outputs"]
                edges = (
                    own if isinstance(own, graph.GradientEdge) else graph.get_gradient_edge(own)
                    for own in outputs
                )
                yield [edge.node for edge in edges]
            frame = frame.f_back


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
