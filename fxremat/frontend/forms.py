"""Forms of a step: how its operations may be computed, and what tells forms apart."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from fxremat.ir import Form
from fxremat.passes.joint.batchnorm import is_inverse
from fxremat.passes.joint.graph import JointGraph
from fxremat.passes.split.beside import parts_of
from fxremat.passes.split.losses import has_losses
from fxremat.passes.split.parts import Parts
from fxremat.passes.split.runs import Large
from fxremat.passes.stages.linearize import Line
from fxremat.planner.allocations import crowded
from fxremat.planner.candidates import Candidate
from fxremat.planner.search import Search

PART_SHARES = (2, 8, 32)
"""Of the largest value: those above so much of it are computed in parts, in one variant each."""


def parted(joint: JointGraph, *, exact: bool, beside: bool = True) -> Iterator[Form]:
    """Forms in which ever smaller values are computed in parts; see :class:`Form`.

    Gradients are ``beside`` losses only in a step that has some.
    """
    beside = beside and has_losses(joint)
    sizes = part_sizes(joint)
    for part_bytes in sizes:
        yield Form(exact, part_bytes, beside)
    if exact and beside:  # logits made twice hold no gradients from forward to backward
        yield Form(exact, sizes[-1])


def part_sizes(joint: JointGraph) -> list[int]:
    """Bytes above which values are computed in parts, ever fewer."""
    table, made = joint.storages, (*joint.forward, *joint.backward)
    largest_bytes = max((table.nbytes[i] for i in table.of(made)), default=0)
    return [max(1, largest_bytes // share) for share in PART_SHARES]


MOST_BYTES = 1 << 60
"""More than any value takes."""


def wanted(search: Search, limit_bytes: int, below_s: float) -> Candidate:
    """The schedule whose peak parts are to lower to ``limit_bytes``.

    That is the one of least memory, where none fits. Else it is the one that adds half as much to
    the time of everything kept as a step of ``below_s`` does.
    """
    if search.least_bytes > limit_bytes:
        return search.least
    most_s = (search.baseline.total_s + below_s) / 2
    return next(c for c in search.pool.members if c.total_s <= most_s or c is search.baseline)


def aimed(
    search: Search,
    candidate: Candidate,
    form: Form,
    limit_bytes: int,
    *,
    exact: bool,
    beside: bool,
    part_bytes: int,
) -> Form | None:
    """A form in which only what takes part in a peak is computed in parts as well.

    Args:
        search: schedules of the step as ``form`` has it.
        candidate: that of them whose peak is meant.
        form: how operations are computed there.
        limit_bytes: what stands in the way of a peak of so many counts.
        exact: parts keep bits.
        beside: gradients are computed with losses in parts, if there are any.
        part_bytes: what a part holds; values up to that stay whole.

    Returns ``None`` where no value of an operation is to blame.
    """
    nbytes = crowded(
        search.evaluator.program(candidate),
        search.setting.context_bytes,
        search.allocations.footprints,
        limit_bytes=limit_bytes,
    )
    names = {name for name, own_bytes in nbytes.items() if own_bytes > part_bytes}
    if not names:
        return None
    beside = form.beside or (beside and has_losses(search.measured.line.joint))
    peak = tuple(sorted(names))
    return replace(form, exact=exact, beside=beside, peak=peak, peak_bytes=part_bytes)


def large_in(form: Form) -> Large:
    """What is computed in parts in a form."""
    return Large(form.parts_bytes or MOST_BYTES, frozenset(form.peak), form.peak_bytes)


def way_of(line: Line) -> tuple[bool, int, frozenset[str]]:
    """What tells forms of a step apart: norms that are undone, operations, and runs in parts."""
    parts = frozenset(str(n.target) for n in line.nodes if isinstance(n.target, Parts))
    return any(map(is_inverse, line.joint.forward)), len(line.nodes), parts


def room_bytes(joint: JointGraph) -> int:
    """Most that an operation reads and makes, with the gradients of the step that are there."""
    table, given = joint.storages, joint.storages.of((*joint.given, *joint.tangents))
    returned = table.of(joint.gradients) - given
    there: frozenset[int] = frozenset()
    most_bytes = 0
    for node in (*joint.forward, *joint.backward):
        own = table.of((node, *node.all_input_nodes)) - given
        working = parts.part_bytes if (parts := parts_of(node)) else 0
        most_bytes = max(most_bytes, table.total(own | there) + working)
        there |= own & returned
    return most_bytes
