"""What a call of a captured graph finds: gradients, steps in flight, state, and workspaces."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from fxremat import torch_compat
from fxremat.calls.learn import corrected
from fxremat.costs.workspaces import library_workspaces
from fxremat.graph.graph import Graph
from fxremat.loop.loop import Loop
from fxremat.passes.joint.graph import allocated_bytes
from fxremat.passes.joint.sizes import Values, evaluated
from fxremat.planner.context import StepContext
from fxremat.planning.choose import share_in_flight
from fxremat.runtime.gradients import adds, leaves_among, with_gradients

Found = tuple[Any, ...]
"""The first fields of a :class:`StepContext`, in order: cheaper to make and to compare."""


def find(
    loop: Loop, graph: Graph, values: Sequence[object], sizes: Values
) -> tuple[Found, list[Tensor | None]]:
    """Return what a call finds, and the leaves among its primals that get a gradient.

    Args:
        loop: around the model.
        graph: that is called.
        values: of its primals.
        sizes: numbers of its symbols.
    """
    made, on_cuda = graph.signature.gradients, graph.calls.on_cuda
    waiting, kept_bytes = loop.in_flight.now()
    leaves = leaves_among(values)
    existing = with_gradients(leaves)
    for primal in graph.signature.without_gradient:
        if primal not in existing:
            leaves[primal] = None
    added: frozenset[int] = frozenset()
    if loop.caller.accumulate:
        existing |= {primal for primal in made if leaves[primal] is not None}
    if existing:
        alone = () if waiting else graph.calls.contributors.alone
        own = ((primal, leaves[primal]) for primal in existing if primal in made)
        added = frozenset(
            primal
            for primal, leaf in own
            if leaf is not None and (leaf.grad is None or (primal in alone and adds(leaf)))
        )
    together = graph.together
    found = (
        sizes,
        existing,
        added,
        len(waiting),
        sum([step.held_bytes for step in waiting]),
        kept_bytes,
        loop.optimizers.beyond(graph.optimizer_bytes),
        0 if together else loop.networks_bytes(),
        torch_compat.bucket_bytes(),
        new_workspace_bytes(graph) if on_cuda else 0,
        # Blocks on the device are each process's own.
        loop.slack_bytes(graph.device) if on_cuda and not together else 0,
        loop.spread_bytes() if graph.signature.passed else 0,
        0 if together else _buffer_bytes(graph, values, sizes),
    )
    return found, leaves


def context_of(loop: Loop, graph: Graph, found: Found, *, several: bool) -> StepContext:
    """Return the context of a call, with all feedback of earlier steps.

    Args:
        loop: around the model.
        graph: that is called.
        found: what :func:`find` returned.
        several: the step runs several graphs, whose feedback is theirs together.
    """
    context = graph.feedback.held(StepContext(*found))
    if several:
        return context
    with loop.planning:
        return corrected(loop, graph, share_in_flight(graph, context, loop.budget))


def shaping_sizes(graph: Graph, values: Values) -> Values:
    """Return ``values`` with the capture's number for each symbol that shapes no tensor."""
    hints, shaping = graph.sizes.hints, graph.shaping
    return tuple(values[i] if i in shaping else hints[i] for i in range(len(values)))


def new_workspace_bytes(graph: Graph) -> int:
    """Return the bytes that libraries hold beyond those when the graph was captured."""
    before = graph.caller.library_bytes_on(graph.device)
    return sum(library_workspaces(graph.device)) - sum(before)


def _buffer_bytes(graph: Graph, values: Sequence[object], sizes: Values) -> int:
    """Return the most bytes by which inputs' storages exceeded planned ones at ``sizes``.

    A loop that slices buffers of many sizes has a new plan only where one is larger than all.
    """
    device = graph.device
    nbytes: dict[int, int] = {}
    for primal, storage_bytes in graph.signature.storages:
        value = values[primal]
        if type(value) is not Tensor or value.device != device:
            continue  # parameters stay as they were captured
        taken = value.untyped_storage().nbytes()
        if taken != storage_bytes:
            planned = evaluated(storage_bytes, graph.sizes.named(sizes))
            more = allocated_bytes(taken, device) - allocated_bytes(planned, device)
            key = torch_compat.storage_key(value)
            nbytes[key] = min(more, nbytes.get(key, more))  # the largest is planned for
    return graph.calls.note_buffer(sizes, sum(more for more in nbytes.values() if more > 0))
