"""Named problems with known optima, for every solver of chains."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

from fxremat.ir import Costs, Problem, StageCosts
from tests.paper_terms import chain_from_sizes, costs_from_paper


@dataclass(frozen=True, slots=True)
class Named:
    """A problem and what is known of it.

    Attributes:
        name: for test ids.
        problem: the problem.
        persistent_s: time of the fastest memory-persistent schedule, ``None`` if none fits.
        any_s: time of the fastest schedule, ``None`` if none fits.
        least_budget_bytes: of memory-persistent schedules.
    """

    name: str
    problem: Problem
    persistent_s: float | None
    any_s: float | None
    least_budget_bytes: int


def figure_2(n: int) -> Named:
    """Section 4.1 of the rotor paper: no memory-persistent schedule is optimal.

    ``L = n + 2`` stages and the loss, ``M = 8``; ``u_f^1 = k = n - 1`` and ``u_f^2 = 2``,
    all other times 0. The section is about automatic differentiation, where ``B^l`` needs
    ``a^{l-1}`` and nothing else: saved sets that never fit and free rebuilds say so here.
    The text's sizes do not give the peaks that it names (7 for ``F^L``, 6 for forwards
    before it, both with ``a^0``); these do, and they leave ``a^2`` no room beside a rebuild
    from ``a^1``.
    """
    count = n + 2
    sizes = [1, 1, *[2] * (count - 1), 0]
    too_large = 9
    stages = []
    for stage in range(1, count + 1):
        stages.append(
            StageCosts(
                forward_s=float({1: n - 1, 2: 2}.get(stage, 0)),
                backward_s=0.0,
                rebuild_s=0.0,
                gradient_bytes=0,
                forward_extra_bytes=2 if stage == count else int(stage > 2),
                keep_extra_bytes=0,
                backward_extra_bytes=0,
                rebuild_bytes=3,
            )
        )
    loss = StageCosts(0.0, 0.0, 0.0, 0, 0, 3, 3, 3)
    chain = chain_from_sizes(sizes, [*[too_large] * count, 0])
    problem = Problem(chain, Costs((*stages, loss)), budget_bytes=8)
    return Named(f"figure-2-n{n}", problem, 3 * n + 1, 2 * n + 2, 7)


def revolve(count: int, checkpoints: int) -> Named:
    """Griewank and Walther's binomial checkpointing: equal steps, equal sizes.

    A step takes a second forward; its backward tapes what it needs by itself. The least
    number of forward steps is ``r l - C(c + r, r - 1)`` with ``l`` steps, ``c`` checkpoints
    (the input is one) and the least ``r`` with ``C(c + r, r) >= l``.
    """
    sizes = [1] * count + [0]
    step = StageCosts(1.0, 0.0, 0.0, 0, 0, 0, 0, 1)
    last = StageCosts(0.0, 0.0, 0.0, 0, 0, 1, 1, 1)
    too_large = checkpoints + count + 3
    chain = chain_from_sizes(sizes, [too_large] * (count - 1) + [0])
    problem = Problem(chain, Costs((*[step] * (count - 1), last)), checkpoints + 2)
    repeats = next(r for r in itertools.count() if math.comb(checkpoints + r, r) >= count)
    steps = repeats * count - (math.comb(checkpoints + repeats, repeats - 1) if repeats else 0)
    return Named(f"revolve-{count}-{checkpoints}", problem, steps, steps, 3)


def early_recomputation() -> Named:
    """Recomputing stage 0 early, beside a deeper checkpoint, saves memory.

    Its ``F_all`` needs 7 bytes, and 4 more once the backward of stage 2 has grown the
    gradient. In the first sweep its saved set would lie beside the 8 bytes of stage 1's
    forward. Only a forward of stage 0 between forward and backward of stage 2 fits 8.
    """
    stages = (
        StageCosts(1.0, 1.0, 1.0, 4, 0, 5, 0, 7),
        StageCosts(1.0, 1.0, 1.0, 4, 8, 8, 0, 0),
        StageCosts(1.0, 1.0, 1.0, 0, 0, 0, 0, 0),
    )
    chain = chain_from_sizes([0, 0, 0, 0], [2, 0, 0])
    return Named("early-recomputation", Problem(chain, Costs(stages), 8), None, 8.0, 10)


def second_way() -> Named:
    """The last stage is rebuilt although nothing runs between its forward and backward."""
    stages = (StageCosts(1.0, 2.0, 0.5, 1, 1, 2, 0, 3),)
    chain = chain_from_sizes([4, 0], [5])
    problem = Problem(chain, Costs(stages, fixed_bytes=2), 10)
    return Named("second-way", problem, 3.5, 3.5, 10)


def keep_all() -> Named:
    """All fits: nothing is recomputed, and one byte less would not do."""
    chain = chain_from_sizes([1, 2, 3, 0], [5, 5, 0])
    costs = costs_from_paper(
        forward_s=[1.0, 2.0, 3.0],
        backward_s=[2.0, 4.0, 6.0],
        gradient_bytes=[1, 2, 3, 0],
        saved_bytes=[5, 5, 0],
        forward_extra_bytes=[0, 0, 0],
        backward_extra_bytes=[0, 0, 0],
    )
    # B 1 holds 1 + 5 + 5 and gradients of 3 and 2; of the first three only 1 + 2 are needed.
    return Named("keep-all", Problem(chain, costs, 16), 18.0, 18.0, 13)


NAMED: tuple[Named, ...] = (
    *(figure_2(n) for n in (3, 4, 5, 6)),
    *(revolve(count, checkpoints) for count in (2, 4, 6, 8) for checkpoints in (1, 2, 3)),
    early_recomputation(),
    second_way(),
    keep_all(),
)
