"""Forms of a graph: how its operations may be computed, and what distinguishes forms."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from fxremat.effort import USUAL, Effort
from fxremat.graph.spending import Spending
from fxremat.ir import Form
from fxremat.options.arguments import Split
from fxremat.passes.joint.batchnorm import is_inverse
from fxremat.passes.joint.constraints import Policy
from fxremat.passes.joint.graph import JointGraph
from fxremat.passes.parts.early_gradients import parts_of
from fxremat.passes.parts.parts import Parts
from fxremat.passes.split.losses import has_losses
from fxremat.passes.stages.linearize import Line
from fxremat.planner.allocator.allocations import crowded
from fxremat.planner.allocator.allocator import AllocatorSettings
from fxremat.planner.decision.candidates import Candidate
from fxremat.planner.search.search import Search
from fxremat.planner.transfers.transfers import HostMemory


@dataclass(frozen=True, slots=True)
class PlanOptions:
    """The options of the user that plans of a graph depend on.

    Attributes:
        host: host memory to which storages may travel; ``None``: nothing travels.
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
        spending: the effort that is left for forms that are not needed to fit.
        left: forms in parts, in the order in which they are searched; ``None``: not listed yet.
        aims: forms of which one with the peak in parts was derived; ``True``: for the least peak.
        slow: forms that were measured and take too long.
        coarse: the first form in parts.
        may_unshare: whether the form that computes equal operations separately is left too.
        scaled: whether forms for losses with another gradient at each step are listed.
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

    There is a form for each of ``shares``: values above the largest one divided by it are computed
    in parts. Gradients are computed ``early_gradients`` losses only in a graph that has losses.
    """
    early_gradients = early_gradients and has_losses(joint)
    sizes = part_sizes(joint, shares)
    for part_bytes in sizes:
        yield Form(exact, part_bytes, early_gradients)
    if exact and early_gradients:  # logits made twice hold no gradients from forward to backward
        yield Form(exact, sizes[-1])


def part_sizes(joint: JointGraph, shares: Sequence[int]) -> list[int]:
    """Return the bytes above which values are computed in parts, one for each of ``shares``."""
    table, made = joint.storages, (*joint.forward, *joint.backward)
    largest_bytes = max((table.nbytes[i] for i in table.of(made)), default=0)
    return [max(1, largest_bytes // share) for share in shares]


MOST_BYTES = 1 << 60
"""More than any value takes."""


def wanted(search: Search, limit_bytes: int, below_s: float) -> Candidate:
    """Return the schedule whose peak parts are to lower to ``limit_bytes``.

    If none fits, that is the one of least memory. Otherwise it is the one that adds at most half as
    much to the time with everything kept as a step of ``below_s`` does.
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
    """Return ``form`` with values that are held at a peak computed in parts too.

    Args:
        search: the schedules of the graph in ``form``.
        candidate: the one of them whose peak is meant.
        form: how operations are computed there.
        limit_bytes: values are included that are held where the peak exceeds this.
        exact: whether parts keep bits.
        early_gradients: whether gradients are computed with losses in parts, if there are losses.
        part_bytes: what a part holds; values up to that stay whole.

    Returns ``None`` where no value of an operation is held at the peak.
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
    """Return what distinguishes forms of a graph: undone norms, operations, and runs in parts."""
    parts = frozenset(str(n.target) for n in line.nodes if isinstance(n.target, Parts))
    return any(map(is_inverse, line.joint.forward)), len(line.nodes), parts


def room_bytes(joint: JointGraph) -> int:
    """Return the most bytes that an operation reads and makes, with gradients made before it."""
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
