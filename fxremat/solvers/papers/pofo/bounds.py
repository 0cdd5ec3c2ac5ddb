"""Lower bounds on the time of what follows a label.

A label is dropped if no continuation of it can beat the best schedule so far. Each phase takes at
least as long as its work, and at least as long as its transfers. So for any shares ``p`` and ``q``
between 0 and 1, what is left takes at least

    (1 - p) forwards + p (out + offloads) + (1 - q) backwards + q (back + prefetches)

Without idle times, the minimum of that over all continuations is a recurrence in node and free
slots only. It is computed for several pairs ``(p, q)``, and the greatest bound counts.
"""

from __future__ import annotations

import numpy as np

from fxremat.jit import entry, helper
from fxremat.solvers.kernels import row_of
from fxremat.solvers.papers.pofo.sweep import Limits, Sweep


@entry
def fill_bounds(sweep: Sweep, limits: Limits, begin: int, stride: int, node: int) -> None:
    """Fill the lower bounds of what follows one node, for slots ``begin, begin + stride, …``.

    Node ``2 i + x`` is the start of stage ``i``, see ``sweep``. Memory is rounded in favor of what
    follows.

    Requires:
        The bounds of all later nodes are filled.
    """
    n = sweep.numbers
    for m in range(begin, limits.bounds.shape[1], stride):
        limits.bounds[node, m] = np.inf
        if node // 2 == n.gradient.size - 1:
            _bound_last(sweep, limits, node, m)
        else:
            _bound_all(sweep, limits, node, m)
            _bound_ck(sweep, limits, node, m)


@helper
def _lower(
    limits: Limits,
    node: int,
    m: int,
    takes: tuple[float, float, float, float],
    following: tuple[int, int],
) -> None:
    """Lower the bound of ``node`` at ``m`` slots to that of a step plus the ``following`` bound.

    The step ``takes`` seconds of forwards, backwards, an offload and a prefetch. ``following`` is
    the next node and its free slots; a node of -1 is the end.
    """
    out = limits.bounds[node, m]
    shares = limits.shares
    for k in range(shares.shape[0]):
        p = shares[k, 0]
        q = shares[k, 1]
        value = (1.0 - p) * takes[0] + (1.0 - q) * takes[1] + p * takes[2] + q * takes[3]
        if following[0] >= 0:
            value += limits.bounds[following[0], following[1], k]
        out[k] = min(out[k], value)


@helper
def _bound_last(sweep: Sweep, limits: Limits, node: int, m: int) -> None:
    n = sweep.numbers
    most_free = (m + 1) * sweep.fronts.quantum - 1
    for way in range(2):
        if most_free >= max(sweep.last_bytes[way, 0], sweep.last_bytes[way, 1]):
            takes = (n.prefix_s[-1] - n.prefix_s[-2], sweep.last_s[way], 0.0, 0.0)
            _lower(limits, node, m, takes, (-1, -1))


@helper
def _bound_all(sweep: Sweep, limits: Limits, node: int, m: int) -> None:
    n = sweep.numbers
    i = node // 2
    quantum = sweep.fronts.quantum
    most_free = (m + 1) * quantum - 1
    if most_free < max(n.gradient[-1] + n.keep[i, 0], n.back[i, 0]):
        return
    for moved in range(2):
        nbytes = sweep.moves[i, node % 2] if moved else 0
        left = min(limits.bounds.shape[1] - 1, m - (n.saved[i, 0] - nbytes) // quantum)
        if nbytes < 0 or left < 0:
            continue
        forward_s = n.prefix_s[i + 1] - n.prefix_s[i]
        takes = (forward_s, n.backward_s[i, 0], nbytes * sweep.out_s, nbytes * sweep.back_s)
        _lower(limits, node, m, takes, (2 * i + 3, left))


@helper
def _bound_ck(sweep: Sweep, limits: Limits, node: int, m: int) -> None:
    n = sweep.numbers
    i = node // 2
    quantum = sweep.fronts.quantum
    room = (m + 1) * quantum - 1 - n.gradient[-1]
    if room < sweep.peaks[i, i]:
        return
    for cut in range(i + 1, n.gradient.size):
        forward_s = n.prefix_s[cut] - n.prefix_s[i]
        backward_s = _least_work(sweep, i, cut, m)
        if backward_s == np.inf:
            continue
        for moved in range(2):
            nbytes = sweep.moves[i, node % 2] if moved else 0
            left = min(limits.bounds.shape[1] - 1, m - (n.step[i, cut] - nbytes) // quantum)
            if nbytes < 0 or left < 0 or room + nbytes < sweep.rest[i, cut]:
                continue
            takes = (forward_s, backward_s, nbytes * sweep.out_s, nbytes * sweep.back_s)
            _lower(limits, node, m, takes, (2 * cut, left))


@helper
def _least_work(sweep: Sweep, s: int, cut: int, m: int) -> float:
    """Return the least seconds to run stages ``s … cut - 1`` backward that may fit ``m`` slots.

    Recomputation is included, transfers are not; infinite if nothing fits.
    """
    fronts = sweep.fronts
    row = row_of(s, cut - 1, fronts.numbers.gradient.size)
    best = np.inf
    if fronts.size[row, m] > 0:
        best = fronts.work[row, m, 0]
    if fronts.quantum > 1 and (m + 1) * fronts.quantum > fronts.least.memory[s, cut - 1]:
        best = min(best, fronts.least.seconds[s, cut - 1])
    return best
