"""How much work planning does, and what it looks at."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import KW_ONLY, dataclass, fields
from typing import Any, Literal, cast, get_args

import numpy as np

from fxremat.errors import refuse

FormKind = Literal["parts", "norms"]
"""Kinds of further forms of a step."""

DEFAULT_GENERATORS = ("rotor", "equiv_chain", "join")
"""Generators whose schedules are looked at unless others are named."""


@dataclass(frozen=True, slots=True, repr=False)
class Effort:
    """How much work planning does, and what it looks at.

    The first three attributes are for users. The others steer the search; their defaults were
    chosen by measuring, and the ablation varies them. A plan that was saved with other values is
    not one of this step.

    Attributes:
        scale: how much of planning may go into further forms of the step that are not needed to
            fit, in multiples of what is usual, which takes some seconds of CPU, or half as long as
            the rest of planning for a long step. Work is counted in operations that are looked at,
            not in seconds, so that the same step gets the same plan on any machine. ``0``: only
            forms that are needed to fit; ``math.inf``: all. ``explain()`` says what was left out.
        generators: names of solvers whose schedules the planner looks at, and from which local
            search starts: ``"rotor"``, ``"equiv_chain"``, ``"join"``, ``"store_all"``,
            ``"periodic"``, ``"revolve"`` or ``"pofo"`` (see :func:`fxremat.solve`). ``"join"`` and
            ``"equiv_chain"`` have schedules only for branches that meet. Least budgets are those of
            the named solvers.
        forms: further forms of the step that are looked at. ``"parts"``: runs of operations are
            computed in parts, one after the other. ``"norms"``: with ``bits="rounding"``, inputs
            of norms are rebuilt from outputs.
        long_life: forward operations that a small storage must live across to be pinned.
        long_share: and one in so many operations of the whole forward.
        pin_share: storages above this share of the saved bytes are never pinned for being small.
        most_stages: stages of a line; solving takes time with the cube of them.
        branch_share: a branch saves at least this share of all saved bytes.
        branch_operations: and has at least so many operations: the copy of a weight in another
            dtype is no branch.
        run_operations: most operations of a run in parts; also the most values that one of them
            reads, and the most operations that read one of them.
        part_shares: values above the largest one divided by such a number are computed in parts,
            in one form each.
        looks: looks at operations in a search of runs, at a ``scale`` of 1; each takes some 4
            microseconds.
        looks_each: looks for each operation of a graph, where these are more: a millisecond, half
            of what else planning takes for it.
        looks_to_plan: what it takes to measure and plan a form, for each of its operations, in
            looks.
        looks_to_search: of that, to search for schedules once the form is measured.
        looks_in_step: looks of a plan that is made inside a training step: less than a second.
        much_slower: further forms are searched where a plan takes this many times the seconds of
            everything kept.
        large_loss: a form in parts is searched wherever a loss's gradient takes one in so many
            bytes, or more, of what a step that keeps everything allocates: a loss in parts is
            faster where its logits would go through memory.
        most_aims: forms of a graph in which only what takes part in a peak is in parts.
        faster: a step that fits as it was traced follows another form only where that takes less
            than this share of its seconds.
        save_options: most choices of what a stage keeps, in addition to keeping everything.
        tried_storages: most storages of which all subsets are tried.
        solve_work: limit of one search by CP-SAT in its deterministic unit of work, about a second
            each: the same numbers give the same choices on a busy machine.
        slots: slots of each table of rotor: a few tables with decreasing ceilings keep rounding
            errors small.
        budgets: budgets that a solver is called for if it has no table of all budgets.
        equiv_slots: slots of each table of the equivalent chain.
        join_choices: choices that are evaluated to fill a table of the join: a second or so.
        join_bytes: most bytes of each table of the join.
        least_join_slots: least slots of each table of the join.
        most_join_slots: most slots of each table of the join.
        starts: members of a pool that local search starts from, evenly spaced over their peaks;
            ``0``: nothing is searched locally.
        closer_starts: more members near the least peak that local search starts from, each half as
            far from it as the previous one: time falls steeply there.
        climb_steps: most steps of a climb.
        climb_failures: changes in a row that may fail before a climb ends.
        step_share: bytes that one step may hold in addition, as a share of the start's peak, if its
            first change does not hold more.
        alike: changes are combined if each gains at least this share of the best one's seconds per
            byte.
        moments: moments of the backward that the lower bound is evaluated at, evenly spaced from
            the fullest to the emptiest.
        frontier_points: candidates of a frontier that have their peaks replayed.
        spare_pools: pools of other contexts that are kept.
        spare_candidates: candidates of each of these that are evaluated, evenly spaced.
        spread: members of a pool that are evaluated at another size whatever the budget, evenly
            spaced.
        lowest: more members of the lowest peaks that are evaluated there: which one is the lowest
            may depend on the size.
        near_budget: more members on either side of the budget that are evaluated there: the order
            of peaks may change.
        again_starts: the fastest members that fit there from which local search starts.
        size_close: what takes long to compute of a size is computed until the answer is off by its
            so-manieth at most.
        size_near: where the model refuses the largest size that fits, so many below it are tried
            first.
        curve_sizes: sizes of a curve of ``max_batch``, evenly among all.
        curve_closer: times that sizes half-way from the fastest to its neighbors are added.
        batch_trials: how often a size is compiled by itself, where the one that should fit is
            refused.
        loss_point_shares: shares of all that a region allocates that are assumed to be held at the
            loss point while its plans are searched.
        region_states: most pairs of bytes and seconds after each call of a region; others are
            dropped, evenly over the bytes.
        graded_bases: candidates from which transfers start where all plans of a graph are listed.
        base_candidates: candidates of each pool that plans with transfers start from.
        away_shares: shares of the kept bytes that bases assume to be on the host at the loss point.
        small_share: storages up to this share of all movable bytes travel only if larger ones are
            not enough: a transfer has a fixed cost.
        enough_slower: a climb with transfers ends once it takes no more than this share longer than
            keeping everything.
        grades: steps in which more and more is sent away, if all of them are evaluated.
        send_rounds: how often more is sent away because the allocator hands out too much.
        patience: a climb ends after so many faster schedules in a row that transfers make slower.

    Raises:
        ArgumentError: ``scale`` or ``forms`` cannot be read, ``generators`` are no names, or
            another attribute is not such a number as its default. The names themselves are checked
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
            must_be = "a number, at least 0, such as 1.0 or math.inf, or a fxremat.Effort"
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
        """The attributes that steer the search and differ from their defaults, by name."""
        steering = fields(self)[ASKED:]
        values = {each.name: getattr(self, each.name) for each in steering}
        return {
            each.name: values[each.name] for each in steering if values[each.name] != each.default
        }

    def __repr__(self) -> str:
        asked = {each.name: getattr(self, each.name) for each in fields(self)[:ASKED]}
        return f"Effort({', '.join(f'{k}={v!r}' for k, v in (asked | self.changed).items())})"


ASKED = 3
"""Fields of :class:`Effort` that are for users; the others steer the search."""

NONEMPTY = frozenset({"part_shares", "loss_point_shares"})
"""Sequences of which one number at least is needed."""

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
"""The least of each number; 0 for all others."""

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
"""Fields that decide where a graph is cut: measured costs hold for them."""


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
        refuse(name, value, f"{kind}, at least {least}, such as {default!r}")
    return int(value) if whole else float(value)


USUAL = Effort()
"""The default, which options enter the planner with."""
