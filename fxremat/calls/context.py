"""The context of a call of a captured graph: gradients, steps in flight, state, and workspaces."""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fxremat import torch_compat
from fxremat.calls.learn import corrected
from fxremat.costs.measured.workspaces import library_workspaces
from fxremat.graph.graph import Graph
from fxremat.loop.hooks import takes_gradient
from fxremat.loop.loop import Loop
from fxremat.passes.joint.graph import allocated_bytes
from fxremat.passes.joint.sizes import Values, evaluated
from fxremat.planner.context.step_context import StepContext
from fxremat.planning.choose import share_in_flight
from fxremat.runtime.gradients import adds, leaves_among, with_gradients

ContextFields = tuple[Any, ...]
"""The first fields of a :class:`StepContext`, in order: cheaper to make and to compare."""


def context_fields(
    loop: Loop, graph: Graph, values: Sequence[object], sizes: Values, *, several: bool
) -> tuple[ContextFields, list[Tensor | None]]:
    """Measure the context of a call, as the first fields of a :class:`StepContext`.

    Returns the fields, and for each primal its leaf tensor; ``None`` where it is no leaf.

    Args:
        loop: the training loop of the model.
        graph: the graph that is called.
        values: the values of its primals.
        sizes: numbers of its symbols.
        several: whether the step runs several graphs. A leaf may then get gradients of each, so
            hooks take them only if an earlier step has shown that.
    """
    gradients, on_cuda = graph.signature.gradients, graph.calls.on_cuda
    waiting, kept_bytes = loop.in_flight.now()
    leaves = leaves_among(values)
    existing = with_gradients(leaves)
    for primal in graph.signature.without_gradient:
        if primal not in existing:
            leaves[primal] = None
    added: frozenset[int] = frozenset()
    if loop.caller.accumulate:
        existing |= {primal for primal in gradients if leaves[primal] is not None}
    if existing:
        only = () if waiting else graph.calls.contributors.sole
        computed = ((primal, leaves[primal]) for primal in existing if primal in gradients)
        added = frozenset(
            primal
            for primal, leaf in computed
            if leaf is not None and (leaf.grad is None or (primal in only and adds(leaf)))
        )
    hosted: frozenset[int] = frozenset()
    state_bytes, step_bytes = loop.optimizers.beyond(graph.optimizer_bytes), 0
    if loop.hosting is not None:
        hosted = loop.hosting.gradients_among(leaves, gradients)
        step_bytes = loop.hosting.placement.step_bytes
        if step_bytes:
            given = (v for v in values if type(v) is Tensor)
            loop.input_bytes = sum(torch_compat.storages_on(graph.device, given).values())
        if not loop.optimizers.all_have_stepped:  # else what is on the device is counted
            state_bytes -= loop.hosting.state_bytes(leaves, gradients)
    taken: frozenset[int] = frozenset()
    if not waiting:
        taken = _taken(loop, graph, leaves, existing, several=several)
    together = graph.together
    fields = (
        sizes,
        existing,
        added,
        hosted,
        taken,
        len(waiting),
        sum([step.held_bytes for step in waiting]),
        kept_bytes,
        state_bytes,
        step_bytes,
        0 if together else loop.networks_bytes(),
        torch_compat.bucket_bytes(),
        new_workspace_bytes(graph) if on_cuda else 0,
        # Each process has its own blocks on the device.
        loop.slack_bytes(graph.device) if on_cuda and not together else 0,
        loop.wrapped_bytes() if graph.has_wrappers else 0,
        0 if together else _buffer_bytes(graph, values, sizes),
        loop.optimizers.hook_bytes([leaves[primal] for primal in taken]) if taken else 0,
    )
    return fields, leaves


def _taken(
    loop: Loop,
    graph: Graph,
    leaves: Sequence[Tensor | None],
    existing: Set[int],
    *,
    several: bool,
) -> frozenset[int]:
    """Return the primals whose new gradient a post-accumulate hook takes away.

    Either earlier backwards have shown it, or the source of the hook says so. There are none for a
    budget of reserved bytes: another stream may still read the memory of such a gradient, and the
    allocator then takes new memory for what comes next.
    """
    if torch.is_anomaly_enabled() or loop.caller.budget_on == "reserved":
        return frozenset()
    hooked = [
        (primal, leaf._post_accumulate_grad_hooks)
        for primal, leaf in enumerate(leaves)
        if leaf is not None and leaf._post_accumulate_grad_hooks and primal not in existing
    ]
    if not hooked:
        return frozenset()
    contributors = graph.calls.contributors
    never = contributors.held | contributors.joined
    learns = graph.together is None  # processes learn at different calls
    return frozenset(
        primal
        for primal, hooks in hooked
        if primal in graph.taken_as_made
        and primal not in never
        and (
            (learns and primal in contributors.taken)
            or (not several and any(map(takes_gradient, hooks.values())))
        )
    )


def context_of(loop: Loop, graph: Graph, fields: ContextFields, *, several: bool) -> StepContext:
    """Return the context of a call, with all feedback of earlier steps.

    Args:
        loop: the training loop of the model.
        graph: the graph that is called.
        fields: measured by :func:`context_fields`.
        several: whether the step runs several graphs; feedback is then of the whole step, and is
            not added here.
    """
    context = graph.feedback.held(StepContext(*fields))
    if several:
        return context
    free_bytes = loop.plannable_host_bytes()
    if free_bytes is not None:
        context = replace(context, host_bytes=free_bytes)
    with loop.planning:
        return corrected(loop, graph, share_in_flight(graph, context, loop.budget))


def shaping_sizes(graph: Graph, values: Values) -> Values:
    """Return ``values`` with the capture's number for each symbol that is in no tensor's shape."""
    hints, shaping = graph.sizes.hints, graph.shaping
    return tuple(values[i] if i in shaping else hints[i] for i in range(len(values)))


def new_workspace_bytes(graph: Graph) -> int:
    """Return the bytes of library workspaces allocated since the graph was captured."""
    before = graph.caller.library_bytes_on(graph.device)
    return sum(library_workspaces(graph.device)) - sum(before)


def _buffer_bytes(graph: Graph, values: Sequence[object], sizes: Values) -> int:
    """Return the most bytes by which inputs' storages exceeded planned ones in calls at ``sizes``.

    Thus a loop that slices buffers of many sizes gets a new plan only for one larger than all
    before.
    """
    device = graph.device
    nbytes: dict[int, int] = {}
    for primal, storage_bytes in graph.signature.storages:
        value = values[primal]
        if type(value) is not Tensor or value.device != device:
            continue  # parameters do not change their storage
        taken = value.untyped_storage().nbytes()
        if taken != storage_bytes:
            planned = evaluated(storage_bytes, graph.sizes.named(sizes))
            more = allocated_bytes(taken, device) - allocated_bytes(planned, device)
            key = torch_compat.storage_key(value)
            nbytes[key] = min(more, nbytes.get(key, more))  # the largest is planned for
    return graph.calls.note_buffer(sizes, sum(more for more in nbytes.values() if more > 0))
