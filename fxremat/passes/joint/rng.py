"""Make random draws repeatable: each reads the generator's state as an argument."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import fx

from fxremat import torch_compat
from fxremat.errors import GraphError
from fxremat.passes.joint.effects import is_effect
from fxremat.passes.joint.graph import copy_origin, tensors_of
from fxremat.runtime import rng
from fxremat.runtime.composite import Composite
from fxremat.runtime.nested import Nested


def record_states(graph: fx.Graph, forward: Iterable[fx.Node]) -> None:
    """Add a node before each random draw of the forward that records the generator's state.

    ``graph`` is changed. A state that no recomputation reads is never recorded, and costs nothing.

    Args:
        graph: the joint graph.
        forward: its forward operations.

    Ensures: a draw ``op(*args)`` is the call ``draw(state, device, op, *args)``.
    """
    for node in forward:
        if torch_compat.draws_random_numbers(node):
            device = _device_of_draw(node)
            with graph.inserting_before(node):
                state = graph.call_function(rng.record_state, (str(device),))
            nbytes = rng.state_bytes(str(device))
            state.meta["val"] = torch_compat.fake_bytes_like(node, nbytes)
            copy_origin(node, state)
            operation: Any = node.target
            node.args = (state, str(device), operation, *node.args)
            node.target = rng.draw


def is_state(node: fx.Node) -> bool:
    """Return whether ``node`` records the state of a generator."""
    return node.target is rng.record_state


def is_draw(node: fx.Node) -> bool:
    """Return whether ``node`` is a random draw that :func:`record_states` has rewritten."""
    return node.target is rng.draw


def operation_of_draw(node: fx.Node) -> Any:
    """Return the random operator that ``node`` runs, with or without a recorded state."""
    operation: Any = node.args[2] if is_draw(node) else node.target
    return operation.function if isinstance(operation, Nested) else operation


def operators_of_draw(node: fx.Node) -> tuple[Any, ...]:
    """Return the random operators that ``node`` runs: several if it is a composite."""
    operation = operation_of_draw(node)
    return operation.draws if isinstance(operation, Composite) else (operation,)


def draws(node: fx.Node) -> bool:
    """Return whether ``node`` draws random numbers, so that its first run advances a generator."""
    return is_draw(node) or torch_compat.draws_random_numbers(node)


def has_effect(node: fx.Node) -> bool:
    """Return whether the first run of ``node`` has an effect besides its result.

    It advances a generator, or has an ordered effect, such as printing. It runs although nothing
    may read its result, and such operations keep their order.
    """
    return draws(node) or is_effect(node)


def _device_of_draw(node: fx.Node) -> torch.device:
    tensor = next(tensors_of(node), None)
    if tensor is None:
        raise GraphError(f"random operation {node.name} ({node.target}) returns no tensor")
    if tensor.device.type not in ("cpu", "cuda"):
        raise GraphError(
            f"{node.name} ({node.target}) draws on {tensor.device}, "
            "whose generator cannot be recorded: use cpu or cuda",
            code="FXR622",
        )
    return tensor.device
