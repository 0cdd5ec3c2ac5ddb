"""How much work planning does, and what it searches."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import KW_ONLY, dataclass, fields
from typing import Any, Literal, cast, get_args

import numpy as np

from fxremat.errors import refuse

FormKind = Literal["parts", "norms"]
"""Kinds of further forms of a step."""

DEFAULT_GENERATORS = ("rotor", "equiv_chain", "join")
"""Solvers whose schedules are searched by default."""


@dataclass(frozen=True, slots=True, repr=False)
class Effort:
    """How much work planning does, and what it searches.

    The first three attributes are for users. The others control the search; their defaults were
    chosen by measurements, and the ablation varies them. A plan that was saved with other values
    cannot be followed.

    Attributes:
        scale: how much work planning may spend on forms of the step that are not needed to fit. It
            is a multiple of the usual work, which takes some seconds of CPU time; for a long step,
            half as long as the rest of planning. Work is counted in operations, not in seconds, so
            that the same step gets the same plan on any machine. ``0`` searches only forms that are
            needed to fit, and ``math.inf`` searches all. ``explain()`` reports what was skipped.
        generators: names of solvers whose schedules the planner evaluates, and from which local
            search starts: ``"rotor"``, ``"equiv_chain"``, ``"join"``, ``"store_all"``,
            ``"periodic"``, ``"revolve"`` or ``"pofo"`` (see :func:`fxremat.solve`). ``"join"`` and
            ``"equiv_chain"`` have schedules only for branches that meet. Least budgets are those of
            the named solvers.
        forms: further forms of the step that are searched. ``"parts"`` computes runs of operations
            in parts, one after the other. ``"norms"`` rebuilds inputs of norms from outputs, with
            ``bits="rounding"``.
        long_life: number of forward operations that a small storage must live across to be pinned.
        long_share: it must also live across one in this many operations of the whole forward.
        pin_share: storages above this share of the saved bytes are never pinned for being small.
        most_stages: maximum number of stages of a line. Solving time is cubic in it.
        branch_share: minimum share of all saved bytes that a branch saves.
        branch_operations: minimum number of operations of a branch, so that the copy of a weight in
            another dtype is not a branch.
        run_operations: maximum number of operations of a run in parts, of values that one of them
            reads, and of operations that read one of them.
        part_shares: numbers by which the largest value is divided. For each of them, one form
            computes all values above the quotient in parts.
        looks: number of operations that a search for runs may visit at a ``scale`` of 1. Each visit
            takes about 4 microseconds.
        looks_each: visits for each operation of a graph, if these are more: a millisecond, half of
            the other planning time of the operation.
        looks_to_plan: cost of measuring and planning a form, in visits for each of its operations.
        looks_to_search: part of that cost for the search for schedules of a measured form.
        looks_in_step: visits for a plan that is made inside a training step: less than a second.
        much_slower: further forms are searched if a plan takes this many times the seconds of
            everything kept.
        large_loss: a form in parts is searched if the gradient of a loss takes at least one in this
            many bytes of a step with everything kept. A loss in parts is faster if its logits
            exceed the caches.
        most_aims: maximum number of forms of a graph in which only the values at a peak are in
            parts.
        faster: a step that fits as traced follows another form only if that takes less than this
            share of its seconds.
        save_options: maximum number of choices of what a stage keeps, in addition to everything.
        tried_storages: maximum number of storages whose subsets are all evaluated.
        solve_work: limit of one search by CP-SAT in its deterministic unit of work, about a second
            each, so that the choices do not depend on the load of the machine.
        slots: slots of each table of rotor. A few tables with decreasing ceilings keep rounding
            errors small.
        budgets: number of budgets for which a solver without a table of all budgets is called.
        equiv_slots: slots of each table of the equivalent chain.
        join_choices: number of choices evaluated to fill a table of the join: about a second.
        join_bytes: maximum size of each table of the join in bytes.
        least_join_slots: minimum number of slots of each table of the join.
        most_join_slots: maximum number of slots of each table of the join.
        starts: number of pool members from which local search starts, evenly spaced over their
            peaks; ``0`` disables local search.
        closer_starts: number of further starts near the lowest peak, where time falls steeply. Each
            is half as far from that peak as the previous one.
        climb_steps: maximum number of steps of a climb.
        climb_failures: number of consecutive changes that may fail before a climb ends.
        step_share: additional bytes that one step may hold, as a share of the start's peak, unless
            its first change holds more.
        alike: changes are combined if each gains at least this share of the best one's seconds per
            byte.
        moments: number of moments of the backward at which the lower bound is evaluated, evenly
            spaced from the fullest to the emptiest.
        frontier_points: number of candidates of a frontier whose peaks are replayed.
        spare_pools: number of pools of other contexts that are kept.
        spare_candidates: number of candidates of each of these that are evaluated, evenly spaced.
        spread: number of pool members that are evaluated at another size for any budget, evenly
            spaced.
        lowest: number of further members with the lowest peaks that are evaluated there, since the
            lowest one may depend on the size.
        near_budget: number of further members on either side of the budget that are evaluated
            there, since the order of peaks may change.
        again_starts: number of fastest members that fit there from which local search starts.
        size_close: expensive computations for a size end once the relative error of the result is
            at most one over this number.
        size_near: number of smaller sizes that are tried first if the model refuses the largest
            size that fits.
        curve_sizes: number of sizes of a curve of ``max_batch``, evenly spaced.
        curve_closer: how often sizes halfway from the fastest to its neighbors are added.
        batch_trials: number of sizes that are compiled separately if the predicted one is refused.
        loss_point_shares: shares of all bytes allocated by a region that its plans are assumed to
            hold at the loss point.
        region_states: maximum number of pairs of bytes and seconds after each call of a region.
            Others are dropped, evenly over the bytes.
        graded_bases: number of candidates from which transfers start if all plans of a graph are
            listed.
        base_candidates: number of candidates of each pool from which plans with transfers start.
        away_shares: shares of the kept bytes that bases assume to be on the host at the loss point.
        small_share: storages up to this share of all movable bytes are moved only if larger ones do
            not suffice, since a transfer has a fixed cost.
        enough_slower: a climb with transfers ends once it takes at most this share longer than
            keeping everything.
        grades: number of steps in which more and more is moved to the host if all are evaluated.
        send_rounds: number of times that more is moved because the allocator hands out too much.
        patience: a climb ends after this many consecutive faster schedules that transfers make
            slower.

    Raises:
        ArgumentError: ``scale`` or ``forms`` cannot be read, ``generators`` are not names, or
            another attribute is not a number like its default. The names of generators are checked
            when the model is compiled.
    """

    scale: float = 1.0
    generators: tuple[str, ...] = DEFAULT_GENERATORS
    forms: tuple[FormKind, ...] = ("parts", "norms")
    _: KW_ONLY
    # Stages
    long_life: int = 30
    long_share: int = 16
    pin_share: float = 0.005
    most_stages: int = 160
    branch_share: float = 0.05
    branch_operations: int = 5
    # Forms in parts
    run_operations: int = 64
    part_shares: tuple[int, ...] = (2, 8, 32)
    looks: int = 600_000
    looks_each: int = 250
    looks_to_plan: int = 120
    looks_to_search: int = 60
    looks_in_step: int = 200_000
    much_slower: float = 1.2
    large_loss: int = 8
    most_aims: int = 2
    faster: float = 0.9
    # What a stage may keep
    save_options: int = 8
    tried_storages: int = 12
    solve_work: float = 0.3
    # Tables of the solvers
    slots: int = 500
    budgets: int = 17
    equiv_slots: int = 500
    join_choices: int = 800_000_000
    join_bytes: int = 1 << 28
    least_join_slots: int = 200
    most_join_slots: int = 2000
    # Local search, and the lower bound
    starts: int = 10
    closer_starts: int = 4
    climb_steps: int = 150
    climb_failures: int = 10
    step_share: float = 1 / 128
    alike: float = 0.8
    moments: int = 16
    # Other sizes and contexts
    frontier_points: int = 32
    spare_pools: int = 4
    spare_candidates: int = 16
    spread: int = 32
    lowest: int = 8
    near_budget: int = 8
    again_starts: int = 2
    # The largest sizes
    size_close: int = 256
    size_near: int = 16
    curve_sizes: int = 12
    curve_closer: int = 2
    batch_trials: int = 3
    # Steps of several regions
    loss_point_shares: tuple[float, ...] = (1.0, 0.5, 0.25, 0.125, 0.0)
    region_states: int = 2048
    # Transfers
    graded_bases: int = 16
    base_candidates: int = 64
    away_shares: tuple[float, ...] = tuple(part / 20 for part in range(21))
    small_share: float = 1 / 256
    enough_slower: float = 1e-3
    grades: int = 8
    send_rounds: int = 6
    patience: int = 8

    def __post_init__(self) -> None:
        number = isinstance(self.scale, (int, float, np.integer, np.floating))
        if not number or isinstance(self.scale, bool) or not float(self.scale) >= 0:
            must_be = "a nonnegative number, such as 1.0 or math.inf, or a fxremat.Effort"
            refuse("effort", self.scale, must_be)
        generators = _names(self.generators)
        if not generators:
            refuse("generators", self.generators, "names of solvers, such as ('rotor', 'join')")
        forms = _names(self.forms)
        if forms is None or not set(forms) <= set(get_args(FormKind)):
            refuse("forms", self.forms, "some of 'parts' and 'norms', or ()")
        object.__setattr__(self, "scale", float(self.scale))
        object.__setattr__(self, "generators", generators)
        object.__setattr__(self, "forms", cast(tuple[FormKind, ...], forms))
        for each in fields(self)[ASKED:]:
            object.__setattr__(self, each.name, _steering(each.name, self, each.default))

    @property
    def changed(self) -> dict[str, object]:
        """The attributes that control the search and differ from their defaults, by name."""
        steering = fields(self)[ASKED:]
        values = {each.name: getattr(self, each.name) for each in steering}
        return {
            each.name: values[each.name] for each in steering if values[each.name] != each.default
        }

    def __repr__(self) -> str:
        asked = {each.name: getattr(self, each.name) for each in fields(self)[:ASKED]}
        return f"Effort({', '.join(f'{k}={v!r}' for k, v in (asked | self.changed).items())})"


ASKED = 3
"""The number of fields of :class:`Effort` that are for users; the others control the search."""

NONEMPTY = frozenset({"part_shares", "loss_point_shares"})
"""Sequences that must have at least one number."""

LEAST = {
    "long_share": 1,
    "most_stages": 1,
    "run_operations": 1,
    "part_shares": 1,
    "slots": 1,
    "budgets": 1,
    "equiv_slots": 1,
    "join_choices": 1,
    "join_bytes": 1,
    "least_join_slots": 1,
    "most_join_slots": 1,
    "lowest": 1,
    "curve_sizes": 1,
    "region_states": 3,
}
"""The minimum of each number; 0 for all others."""

OF_STAGES = frozenset(
    {
        "long_life",
        "long_share",
        "pin_share",
        "most_stages",
        "branch_share",
        "branch_operations",
        "run_operations",
    }
)
"""Fields that determine the stages of a graph. Measured costs are valid for them."""


def _names(value: object) -> tuple[str, ...] | None:
    """Return texts without repetitions; ``None``: ``value`` is not an iterable of texts."""
    names = list(value) if isinstance(value, Iterable) and not isinstance(value, str) else [None]
    if not all(isinstance(name, str) for name in names):
        return None
    return tuple(dict.fromkeys(cast(list[str], names)))


def _steering(name: str, effort: Effort, default: Any) -> object:
    """Return a value that steers the search as its default is written.

    Raises:
        ArgumentError: it is no such number, or no such numbers.
    """
    value = getattr(effort, name)
    if isinstance(default, tuple):
        if not isinstance(value, Iterable) or isinstance(value, str):
            refuse(name, value, f"numbers, such as {default!r}")
        numbers = tuple(_number(name, each, default[0]) for each in value)
        if not numbers and name in NONEMPTY:
            refuse(name, value, f"at least one number, such as {default!r}")
        return numbers
    return _number(name, value, default)


def _number(name: str, value: object, default: float) -> float:
    """Return an ``int`` or ``float`` of at least its ``LEAST``, whichever the default is."""
    whole, least = isinstance(default, int), LEAST.get(name, 0)
    kinds = (int, np.integer) if whole else (int, float, np.integer, np.floating)
    if not isinstance(value, kinds) or isinstance(value, bool) or not value >= least:
        kind = "an int" if whole else "a number"
        refuse(name, value, f"{kind} of at least {least}, such as {default!r}")
    return int(value) if whole else float(value)


USUAL = Effort()
"""The default effort."""
