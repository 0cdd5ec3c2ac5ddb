"""Forms of a graph: how its operations may be computed, and what distinguishes forms."""

from __future__ import annotations

from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass, field, replace

from torch import fx

from fxremat.effort import USUAL, Effort
from fxremat.graph.spending import Spending
from fxremat.ir import Form
from fxremat.options.arguments import Split
from fxremat.passes.joint.batchnorm import is_inverse
from fxremat.passes.joint.constraints import Policy
from fxremat.passes.joint.graph import JointGraph
from fxremat.passes.joint.masks.replace import only_for_masks
from fxremat.passes.parts.early_gradients import parts_of
from fxremat.passes.parts.parts import Parts
from fxremat.passes.split.losses import has_losses
from fxremat.passes.split.narrow import narrow_values
from fxremat.passes.stages.linearize import Line
from fxremat.planner.allocator.allocations import crowded
from fxremat.planner.allocator.allocator import AllocatorSettings
from fxremat.planner.decision.candidates import Candidate
from fxremat.planner.search.search import Search
from fxremat.planner.transfers.transfers import HostMemory


@dataclass(frozen=True, slots=True)
class PlanOptions:
    """The user's options that plans of a graph depend on.

    Attributes:
        host: host memory to which storages may be moved; ``None``: none are.
        exact: whether gradients must be bitwise those without a plan; otherwise inputs of norms may
            be rebuilt from outputs.
        split: which runs of operations may be computed in parts: ``"exact"``, those that keep their
            bits; ``True``, also those that round differently.
        effort: how much work planning does, and the numbers that steer it.
        allocator: rules that replace those of the device's allocator.
        policy: decides about single operations; see :mod:`fxremat.passes.joint.constraints`.
    """

    host: HostMemory | None = None
    exact: bool = True
    split: Split = False
    effort: Effort = USUAL
    allocator: AllocatorSettings | None = None
    policy: Policy | None = None


NO_OPTIONS = PlanOptions()


@dataclass(slots=True)
class FurtherForms:
    """The forms of a graph that were not searched yet.

    Attributes:
        spending: the effort that is left for forms that are not needed to fit a budget.
        left: forms that compute values in parts, in the order in which they are searched; ``None``:
            not listed yet.
        aims: forms from which one was derived that computes the values at a peak in parts, and
            whether that was for the least peak of all.
        slow: forms that were measured and take too long.
        coarse: the first form in ``left``, which has the largest parts.
        may_unshare: whether the form that computes equal operations separately is still to be
            searched.
        scaled: whether forms for losses whose gradient differs at each step are listed.
    """

    spending: Spending
    left: list[Form] | None = None
    aims: set[tuple[Form, bool]] = field(default_factory=set)
    slow: set[Form] = field(default_factory=set)
    coarse: Form | None = None
    may_unshare: bool = False
    scaled: bool = False


def parted(
    joint: JointGraph, shares: Sequence[int], *, exact: bool, early_gradients: bool = True
) -> Iterator[Form]:
    """Yield forms in which ever smaller values are computed in parts; see :class:`Form`.

    Args:
        joint: the graph.
        shares: there is a form for each: it computes values in parts that take more bytes than the
            largest value of the graph divided by the share.
        exact: whether the parts must give the same bits.
        early_gradients: whether gradients of losses are computed together with the losses, if the
            graph has any.
    """
    early_gradients = early_gradients and has_losses(joint)
    sizes = part_sizes(joint, shares)
    # A mask of attention may be far larger than all other values: its parts would be, too.
    other = part_sizes(joint, shares[:1], without=only_for_masks(joint.module.graph))
    sizes += [part_bytes for part_bytes in other if part_bytes < sizes[-1]]
    for part_bytes in sizes:
        yield Form(exact, part_bytes, early_gradients)
    inner_bytes = inner_size(joint)
    if inner_bytes:
        yield Form(exact, 0, early_gradients, inner_bytes=inner_bytes)
    if exact and early_gradients:  # logits made twice hold no gradients from forward to backward
        yield Form(exact, sizes[-1])


def part_sizes(
    joint: JointGraph, shares: Sequence[int], *, without: Set[fx.Node] = frozenset()
) -> list[int]:
    """Return the bytes of the largest value divided by each of ``shares``, but at least 1.

    A form computes values in parts that take more bytes than one of these sizes. Values of
    ``without`` do not count.
    """
    table = joint.storages
    made = [node for node in (*joint.forward, *joint.backward) if node not in without]
    largest_bytes = max((table.nbytes[i] for i in table.of(made)), default=0)
    return [max(1, largest_bytes // share) for share in shares]


def inner_size(joint: JointGraph) -> int:
    """Return the bytes above which values between narrow places are computed in parts.

    They are a share of the largest value at a narrow place; 0 if there is none.
    """
    table = joint.storages
    narrow = narrow_values(joint)
    return max((table.nbytes[i] for i in narrow), default=0) // INNER_SHARE


INNER_SHARE = 8
"""Values are computed in parts if they take more than the largest value at a narrow place, divided
by this."""

MOST_BYTES = 1 << 60
"""More than any value takes."""


def wanted(search: Search, limit_bytes: int, below_s: float) -> Candidate:
    """Return the candidate of ``search`` from whose peak a form with more parts is to be derived.

    If none fits ``limit_bytes``, it is the one of least memory. Otherwise it is the one of least
    memory whose time is at most the mean of ``below_s`` and the time with everything kept.

    Args:
        search: the candidates of the graph in one form.
        limit_bytes: the peak that the new form is to reach.
        below_s: seconds that a step in the new form must take less than.
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
    early_gradients: bool,
    part_bytes: int,
) -> Form | None:
    """Return ``form`` changed to compute the values held at a candidate's peak in parts.

    Args:
        search: the candidates of the graph in ``form``.
        candidate: the one of them whose peak is to be lowered.
        form: how operations are computed by the candidate.
        limit_bytes: values held where memory exceeds this are computed in parts.
        exact: whether parts must give the same bits.
        early_gradients: whether gradients are computed with losses in parts, if there are losses.
        part_bytes: bytes that a part may hold; values up to that stay whole.

    Returns ``None`` if no value large enough is held at the peak.
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
    early_gradients = form.early_gradients or (
        early_gradients and has_losses(search.measured.line.joint)
    )
    peak = tuple(sorted(names))
    return replace(
        form, exact=exact, early_gradients=early_gradients, peak=peak, peak_bytes=part_bytes
    )


def way_of(line: Line) -> tuple[bool, int, frozenset[str]]:
    """Return a key of how a graph is computed: forms with equal keys compute it alike.

    It holds whether norms are undone, the number of operations, and the runs that are computed in
    parts.
    """
    parts = frozenset(str(n.target) for n in line.nodes if isinstance(n.target, Parts))
    return any(map(is_inverse, line.joint.forward)), len(line.nodes), parts


def room_bytes(joint: JointGraph) -> int:
    """Return a lower bound of the bytes that any plan of ``joint`` allocates.

    It is the most bytes that one operation reads and makes, with gradients made before it.
    """
    table, given = joint.storages, joint.storages.of((*joint.given, *joint.tangents))
    returned = table.of(joint.gradients) - given
    made: frozenset[int] = frozenset()
    most_bytes = 0
    for node in (*joint.forward, *joint.backward):
        own = table.of((node, *node.all_input_nodes)) - given
        working = parts.part_bytes if (parts := parts_of(node)) else 0
        most_bytes = max(most_bytes, table.total(own | made) + working)
        made |= own & returned
    return most_bytes
