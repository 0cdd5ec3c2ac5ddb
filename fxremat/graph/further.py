"""The search of a graph's variants, and of further variants while they can help.

A form (:class:`fxremat.ir.Form`) says how operations are rewritten: which are computed in slices,
which are duplicated. A variant is the graph rewritten so, and has separate candidates.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

import torch

from fxremat import torch_compat
from fxremat.cache.origins import key_of
from fxremat.costs.link.bandwidth import link_key, measure_link, record_link
from fxremat.errors import CostError
from fxremat.graph.conditions import Conditions
from fxremat.graph.forms import MOST_BYTES, aimed, part_sizes, parted, wanted
from fxremat.graph.graph import Graph
from fxremat.graph.pool import Pool
from fxremat.graph.shortfall import warn
from fxremat.graph.variant import Variant
from fxremat.ir import TRACED, Form, MeasuredLink
from fxremat.passes.joint.sizes import Values
from fxremat.passes.parts.parts import Parts
from fxremat.passes.split.losses import largest_gradient_bytes
from fxremat.planner.allocator.allocations import settings_of
from fxremat.planner.allocator.allocator import AllocatorSettings
from fxremat.planner.context.context_bytes import ContextBytes
from fxremat.planner.context.step_context import StepContext
from fxremat.planner.search.search import Search
from fxremat.planner.transfers.transfers import HostMemory, Transfers


def conditions_of(graph: Graph, context: StepContext) -> Conditions:
    """Return what the candidates for a call in ``context`` depend on."""
    hints = graph.sizes.hints
    return Conditions(
        context.sizes,
        graph.held(context),
        graph.held(replace(context, sizes=hints)),
        is_at_capture=context.sizes == hints,
        has_gradients=bool(context.existing),
        scaled=context.scaled,
        region=context.region,
    )


def allocator_rules(graph: Graph) -> AllocatorSettings | None:
    """Return the rules that the user gave for the allocator, else those of the graph's device.

    ``None``: the allocator hands out exactly the bytes that are requested.
    """
    return graph.options.allocator or settings_of(graph.device)


def link_of(graph: Graph) -> MeasuredLink | None:
    """Return the bandwidths to host memory, measured at first use; ``None``: nothing is moved."""
    host = graph.options.host
    if host is not None and graph.link is None:
        graph.link = _measured_link(graph, host)
    return graph.link


def _measured_link(graph: Graph, host: HostMemory) -> MeasuredLink:
    """Return the bandwidths to host memory: given by the user, cached, or else measured now."""
    if host.link is not None:
        return host.link
    folder, limit = host.folder, host.limit_bytes
    traced = graph.variants[0]
    key = link_key(traced.line.joint.device, host_dir=folder, host_limit_bytes=limit)
    name = key_of(replace(traced.origin, operations="", code="", inputs=()), link=key[1:])
    link = graph.costs.link if graph.costs else graph.store.get("link", name, MeasuredLink)
    if link is not None:
        record_link(key, link)
        return link
    with torch_compat.real_execution(), torch.no_grad():
        link = measure_link(traced.line.joint.device, host_dir=folder, host_limit_bytes=limit)
    graph.store.put("link", name, MeasuredLink, link)
    return link


def ensure_searched(graph: Graph, held: ContextBytes) -> bool:
    """Search schedules, at the sizes of the capture, of each variant of the graph that has none.

    Returns whether no variant had schedules before.
    """
    were_none = all(own.pool is None for own in graph.variants)
    list_forms(graph)
    for own in graph.variants:
        if own.pool is None:
            own.pool = searched(graph, own, None, held)
    return were_none


def search_again(graph: Graph, call: Conditions, *, bits: bool = True) -> list[Pool]:
    """Search schedules for a call in each variant of the graph; return one pool for each.

    Pools of forms that the call must not follow are left out. Later pools of the variants include
    these schedules.
    """
    list_forms(graph)
    searched_pools = []
    for own, variant in zip(graph.variants, graph.at(call.sizes, bits=bits), strict=True):
        pool = searched(graph, variant, own.pool, call.held)
        own.learn(pool)
        if may_follow(graph, call, own.form):
            searched_pools.append(pool)
    return searched_pools


def search_last(graph: Graph, call: Conditions, *, bits: bool) -> None:
    """Search schedules for a call in the variant added last; its later pools include them."""
    variant, own = graph.at(call.sizes, bits=bits)[-1], graph.variants[-1]
    own.learn(searched(graph, variant, own.pool, call.held))


def searched(graph: Graph, variant: Variant, before: Pool | None, held: ContextBytes) -> Pool:
    """Search schedules of one variant of a graph; return them as a pool of candidates.

    Args:
        graph: the graph of the variant.
        variant: the variant, with its costs at some size.
        before: its pool at another size, whose candidates are tried too; ``None``: there is none.
        held: bytes that are held in addition to what the graph allocates.
    """
    search = Search.over(
        variant.measured,
        variant.blocks,
        held,
        progress=graph.progress,
        effort=graph.options.effort,
        allocator=allocator_rules(graph),
        budget_on=graph.caller.budget_on,
        known=before.search if before else None,
    )
    host = graph.options.host
    transfers = None if host is None else Transfers.of(search, host, link_of(graph))
    return Pool(search, transfers, variant.form)


def variants_at(
    graph: Graph, sizes: Values, *, run: bool = True, bits: bool = True
) -> list[Variant]:
    """Return the graph's variants, with their costs at ``sizes``.

    In a running job, workspaces that cannot be measured are estimated, with a warning. For ``run``
    and ``bits`` see :meth:`Graph.at`.
    """
    try:
        variants = graph.at(sizes, run=run, bits=bits)
    except CostError as error:
        if not graph.started:
            raise
        why = error.message
    else:
        if run:
            graph.estimated.discard(sizes)
        return variants
    graph.estimated.add(sizes)
    warn(
        "the workspaces of a step of new sizes are estimated from other sizes, so it may take "
        f"more than its budget: {why}",
        code="FXR105",
    )
    return graph.at(sizes, run=False, bits=bits)


def may_follow(graph: Graph, call: Conditions, form: Form) -> bool:
    """Return whether a call may follow plans of ``form`` as long as any other form fits.

    It may not where exact gradients are computed together with a loss whose gradient differs from
    step to step, nor, as one of several graphs of a step, where it is computed in parts and other
    processes would have to choose these as well.
    """
    by_itself = graph.peers is None or not (call.region and form.has_parts)
    return by_itself and not (call.scaled and form.early_gradients and form.exact)


# Further variants


def list_forms(graph: Graph) -> None:
    """List the forms in which the graph can be rewritten; add those that every plan considers.

    The forms are listed once: a second call does nothing.
    """
    further, options = graph.further, graph.options
    if further.left is not None:
        return
    further.left = []
    if graph.variants[0].form != TRACED:  # a plan that is followed
        return
    if not options.exact:
        graph.add(Form(exact=False))
    if graph.peers is not None:  # all processes must have the same forms, whatever one measures
        for form in _parted(graph, exact=False) if options.split is True else ():
            graph.add(form)
    elif options.split is True or (options.split and not graph.has_units):
        further.left += _parted(graph, exact=options.split == "exact")
        further.coarse = further.left[0]
    further.may_unshare = graph.peers is None and not graph.has_units


def _parted(graph: Graph, *, exact: bool, early_gradients: bool = True) -> Iterator[Form]:
    """Yield the forms with parts that the options of ``graph`` allow; see :func:`parted`.

    A form with layers in parts recomputes each layer, which ``offload="only"`` excludes.
    """
    host, shares = graph.options.host, graph.options.effort.part_shares
    for form in parted(graph.joint, shares, exact=exact, early_gradients=early_gradients):
        if not (form.inner_bytes and host is not None and host.only):
            yield form


def grow(graph: Graph, context: StepContext) -> bool:
    """Rewrite the graph in the next form not tried yet, and search schedules of it.

    Returns whether there was such a form.
    """
    call = conditions_of(graph, context)
    ensure_searched(graph, call.held_at_capture)
    return search_unshared(graph, call) or search_next(graph, call)


def refuse(graph: Graph, run: Parts) -> None:
    """Exclude a run of operations from being computed in parts by plans that are made later."""
    forms = graph.refuse(run)
    if graph.further.left is not None:
        graph.further.left = [*forms, *graph.further.left]  # they are rebuilt without the run
    graph.sent.clear()


def wants_faster(graph: Graph, call: Conditions, traced: Pool, seconds: float) -> bool:
    """Return whether to search for a form that is faster than a plan that takes ``seconds``.

    Args:
        graph: the captured graph.
        call: the conditions of the call.
        traced: the pool of the variant as traced.
        seconds: the time of the fastest plan so far.
    """
    if call.region or graph.started:  # in a step nothing is measured that is not needed
        return False
    if seconds > graph.options.effort.much_slower * traced.baseline.total_s:
        return True
    has_parts = any(own.form.has_parts for own in graph.variants)
    return not has_parts and _has_large_loss(graph, call, traced)


def grow_faster(
    graph: Graph, call: Conditions, evaluated: list[Pool], budget_bytes: int, below_s: float
) -> bool:
    """Try one more form that may take less than ``below_s``; return whether it was added.

    Args:
        graph: the captured graph.
        call: the conditions of the call.
        evaluated: the pools of all variants so far.
        budget_bytes: the peak that a plan must keep to.
        below_s: seconds that a step must take less than.
    """
    if below_s > graph.options.effort.much_slower * evaluated[0].baseline.total_s and (
        search_unshared(graph, call, needed=False)
        or search_aimed(graph, call, evaluated, budget_bytes, below_s=below_s, needed=False)
    ):
        return True
    return search_next(graph, call, below_s=below_s, needed=False)


def grow_smaller(graph: Graph, call: Conditions, below_bytes: int, *, needed: bool) -> bool:
    """Try one more form that may take less than ``below_bytes``; return whether it was added.

    Args:
        graph: the captured graph.
        call: the conditions of the call.
        below_bytes: the least peak of the variants so far.
        needed: whether nothing fits without the form: then the effort is not limited.
    """
    return search_unshared(graph, call, needed=needed) or search_next(
        graph, call, below_bytes=below_bytes, needed=needed
    )


def _has_large_loss(graph: Graph, call: Conditions, traced: Pool) -> bool:
    """Return whether a loss's gradient is a large share of what a step allocates."""
    loss_bytes = largest_gradient_bytes(traced.search.measured.line.joint)
    own_bytes = traced.full_bytes - call.held.given_bytes
    return graph.options.effort.large_loss * loss_bytes >= own_bytes


def search_next(
    graph: Graph,
    call: Conditions,
    below_bytes: int = MOST_BYTES,
    *,
    needed: bool = True,
    below_s: float = math.inf,
) -> bool:
    """Try the next listed form that computes values in parts; return whether it was added.

    A form that takes ``below_s`` with everything kept stays listed, with those after it, until
    memory requires it.

    Args:
        graph: the captured graph.
        call: the conditions of the call.
        below_bytes: at the sizes of the capture, and where no gradient exists, a form is skipped if
            its largest operation takes this much.
        needed: whether nothing fits without the form: then the effort is not limited.
        below_s: seconds that a step in the form must take less than.
    """
    further = graph.further
    if call.scaled and graph.options.split == "exact" and not further.scaled:
        further.scaled = True
        left = further.left or []
        listed = [*left, *(own.form for own in graph.variants)]
        others = _parted(graph, exact=True, early_gradients=False)
        further.left = [*(form for form in others if form not in listed), *left]
    is_bound = call.is_at_capture and not call.has_gradients
    most_bytes = below_bytes - call.held.given_bytes if is_bound else None
    while further.left:
        form = further.left[0]
        is_new = _add(graph, form, call, needed=needed, below_bytes=most_bytes, below_s=below_s)
        if is_new is None:
            return False
        further.left.pop(0)
        if is_new:
            return True
    return False


def search_unshared(graph: Graph, call: Conditions, *, needed: bool = True) -> bool:
    """Try the form that computes equal operations separately; return whether it was added.

    Args:
        graph: the captured graph.
        call: the conditions of the call.
        needed: whether nothing fits without the form: then the effort is not limited.
    """
    if not graph.further.may_unshare:
        return False
    is_new = _add(graph, Form(shared=False), call, needed=needed)
    graph.further.may_unshare = is_new is None
    return bool(is_new)


def search_aimed(
    graph: Graph,
    call: Conditions,
    evaluated: list[Pool],
    budget_bytes: int,
    *,
    needed: bool,
    below_s: float = math.inf,
) -> bool:
    """Try a form that computes in parts only what exceeds a budget; return whether it was added.

    It is derived from the form that is fastest with everything kept, at the sizes of the capture;
    if a loss is large, from one that computes it in parts.

    Args:
        graph: the captured graph.
        call: the conditions of the call.
        evaluated: the pools of all variants so far.
        budget_bytes: the peak to reach; 0: the least possible, derived from any form.
        needed: whether nothing fits without the form: then the effort is not limited.
        below_s: seconds that a step must take less than.
    """
    further = graph.further
    may_aim = call.is_at_capture and not call.region and graph.options.host is None
    if further.coarse is None or not may_aim:
        return False
    is_loss = _has_large_loss(graph, call, evaluated[0])
    if is_loss and further.coarse in (further.left or ()):
        return False
    if further.spending.looks(graph.joint, needed=needed, in_step=graph.started) is None:
        return False
    effort, is_last = graph.options.effort, budget_bytes == 0
    part_bytes = part_sizes(graph.joint, effort.part_shares[:2])[-1]
    for pool in sorted(evaluated, key=lambda pool: pool.baseline.total_s):
        candidate = wanted(pool.search, budget_bytes, below_s)
        count = sum(not last for _, last in further.aims)
        is_done = (pool.form, is_last) in further.aims or bool(pool.form.peak)
        is_done = is_done or (count >= effort.most_aims and not is_last)
        if is_done or (is_loss and not pool.form.has_parts) or candidate.total_s >= below_s:
            continue
        form = aimed(
            pool.search,
            candidate,
            pool.form,
            budget_bytes,
            exact=graph.options.split == "exact",
            early_gradients=not call.scaled,
            part_bytes=part_bytes,
        )
        is_new = form is not None and _add(graph, form, call, needed=needed, below_s=below_s)
        further.aims.add((pool.form, is_last))
        if is_new:
            return True
    return False


def _add(
    graph: Graph,
    form: Form,
    call: Conditions,
    *,
    needed: bool,
    below_bytes: int | None = None,
    below_s: float = math.inf,
) -> bool | None:
    """Rewrite a graph as ``form`` says, and search the new variant; return whether it was added.

    Args:
        graph: the graph, to which the variant is added.
        form: how operations are rewritten.
        call: the conditions of the call whose plans are searched.
        needed: whether no plan fits without further variants.
        below_bytes: a variant is not added if its largest operation takes as much; ``None``: it is
            added in any case.
        below_s: a variant is not added if it takes as much with everything kept.

    Returns:
        Whether a variant was added; ``False`` if it computes like an earlier one, or takes
            ``below_bytes``. ``None``: the form may be tried again, because the search would exceed
            the effort and is not ``needed``, or the form takes ``below_s``.
    """
    further = graph.further
    if below_s < math.inf and form in further.slow:
        return None
    looks = further.spending.looks(graph.joint, needed=needed, in_step=graph.started)
    if looks is None:
        return None
    variant = graph.add(form, below_bytes=below_bytes, looks=looks)
    taken = variant is not None
    if not (needed or further.spending.spend(looks, graph.joint, taken=taken)):
        return None
    if variant is None:
        return False
    if variant.measured.kept_s >= below_s:
        further.slow.add(form)
        graph.drop(variant)
        return None
    variant.pool = searched(graph, variant, None, call.held_at_capture)
    return True
