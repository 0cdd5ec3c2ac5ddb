"""``OC_x``: the first sweep, from the input on, by the decisions made so far.

A *label* at a *node* ``2 i + x`` is a way to have run the forwards before stage ``i``, with the
supplement's ``x``: 0 if boundary ``i`` is held as it is, 1 if within saved set ``i - 1``. It has
what the supplement's state has, and the time that the decisions so far take before and after the
loss point:

    held   A_i + I^x_i: bytes on the device from stage i to its backward, including I^x_i
    out    Δ_F / β: seconds to offload what waits for it
    back   Δ_B / β: seconds to prefetch what has to be back when stage i's backward is done
    spent  seconds of all decided forwards and backwards, including idle times

A second of idle time takes a second off ``out``, or off ``back``. So a label is dominated by one
that holds no more and could wait until it is no worse: if ``held' <= held`` and ``spent' + max(out'
- out, 0) + max(back' - back, 0) <= spent``. Nothing is rounded and nothing is lost, but far fewer
labels are kept than the ``slots³`` states of the supplement.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from fxremat.jit import entry, helper
from fxremat.solvers.kernels import row_of
from fxremat.solvers.numbers import Floats, Ints, Numbers
from fxremat.solvers.papers.pofo.intervals import Fronts


class Sweep(NamedTuple):
    """A chain as the arrays and sizes with which forwards before the loss point are planned.

    Sizes are in bytes. ``I^x_i`` is the input of stage ``i``: boundary ``i`` for ``x = 0``, saved
    set ``i - 1`` for ``x = 1``.

    Attributes:
        numbers: the chain.
        fronts: ``C_Δ`` of the stages before the last.
        budget: bytes for everything but ``fixed_bytes``.
        input_bytes: size of boundary 0.
        out_s: seconds to offload a byte.
        back_s: seconds to prefetch a byte.
        moves: ``(L, 2)``, size of ``I^x_i``, -1 if it has to stay on the device.
        rest: ``(L, L + 1)``, as ``numbers.sweep`` without the first of the forwards.
        peaks: ``(L, L)``, peak of forward ``k`` beyond boundary ``s``.
        out_lag: ``(L, L + 1)``, Lemma 1 for the forwards ``s … s' - 1``: they have to wait for
            ``out + out_lag - free`` seconds, with ``free`` as the time to offload the free bytes.
        last_bytes: ``(2, 2)``, for both ways of the last stage (``F_all`` and ``B``, or a forward
            by itself and a rebuild later) the least memory before and after the loss point.
        last_s: ``(2,)``, seconds after the loss point.
    """

    numbers: Numbers
    fronts: Fronts
    budget: int
    input_bytes: int
    out_s: float
    back_s: float
    moves: Ints
    rest: Ints
    peaks: Ints
    out_lag: Floats
    last_bytes: Ints
    last_s: Floats


class SweepChoice(NamedTuple):
    """A decision of a plan: what runs from one kept stage input to the next.

    Attributes:
        stage: ``i``, whose input is kept.
        within: ``x``: whether it is kept within saved set ``i - 1``.
        cut: ``i`` for ``F_all i``; else the next stage that keeps its input, after ``F_ck i, F_none
            i + 1, …``. For the last stage, ``i + 1`` is its second way.
        moved: whether ``I^x_i`` is offloaded.
    """

    stage: int
    within: bool
    cut: int
    moved: bool


class Labels(NamedTuple):
    """Labels of every node, ``(2 L, most)`` each: ways to have run the forwards before its stage.

    Node ``2 i + x`` is the start of stage ``i`` with input ``I^x_i``, see ``Sweep``.

    Attributes:
        held: bytes on the device from stage ``i`` to its backward, including ``I^x_i``.
        spent: seconds of all decided forwards and backwards, including idle times.
        out: seconds to offload what waits for it.
        back: seconds to prefetch what has to be back when stage ``i``'s backward is done.
        bound: lower bound in seconds on any continuation.
        parent: index of the preceding label.
        origin: twice the preceding label's node, plus 1 if its ``I^x_i`` is offloaded.
        size: ``(2 L,)``, number of labels of a node.
        lost: ``(2 L,)``, number of labels dropped because there were more than ``most``.
        worst: ``(2 L,)``, the greatest bound at a full node, else infinite.
    """

    held: Ints
    spent: Floats
    out: Floats
    back: Floats
    bound: Floats
    parent: Ints
    origin: Ints
    size: Ints
    lost: Ints
    worst: Floats


class Limits(NamedTuple):
    """Lower bounds and the best time so far, by which labels (partial plans) are dropped.

    Attributes:
        shares: ``(·, 2)``, pairs that weight transfers against work in the two phases.
        bounds: ``(2 L, slots + 1, ·)``, for each pair the least time left, without transfers that
            already wait.
        best_s: ``(1,)``, time of the best schedule so far.
        slack_s: a label also dominates another if it is worse by at most this.
    """

    shares: Floats
    bounds: Floats
    best_s: Floats
    slack_s: float


@entry
def segment(sweep: Sweep, s: int, cut: int, free: int, back: float) -> tuple[int, float]:
    """Return the sequence that runs stages ``s … cut - 1`` backward in the least time.

    It is inlined, since a call would count references to all the arrays.

    Args:
        sweep: the chain.
        s, cut: the interval is ``(s, cut - 1)``.
        free: bytes that are free in addition to boundary ``s``.
        back: seconds to prefetch what has to be back at the end.

    Returns:
        The entry of the front (-1 for the sequence of least memory, -2 if not even that fits), and
        its seconds.
    """
    fronts = sweep.fronts
    row = row_of(s, cut - 1, fronts.numbers.gradient.size)
    m = min(fronts.size.shape[1] - 1, free // fronts.quantum)
    missing = back - free * sweep.back_s
    best = -2
    best_s = np.inf
    for k in range(fronts.size[row, m]):
        if fronts.work[row, m, k] >= best_s:
            break
        seconds = max(fronts.work[row, m, k], fronts.lag[row, m, k] + missing)
        if seconds < best_s:
            best = k
            best_s = seconds
    if fronts.quantum > 1 and free >= fronts.least.memory[s, cut - 1]:
        work = fronts.least.seconds[s, cut - 1]
        seconds = max(work, fronts.least_lag[s, cut - 1] + missing)
        if seconds < best_s:
            best = -1
            best_s = seconds
    return best, best_s


@helper
def _put(
    labels: Labels,
    node: int,
    label: tuple[int, float, float, float, float],
    came: tuple[int, int],
    slack: float,
) -> None:
    """Add a label (a partial plan) to a node unless it is dominated; drop those it dominates.

    Args:
        label: ``held``, ``spent``, ``out``, ``back`` and ``bound`` of the label.
        came: ``parent`` and ``origin`` of the label.
        slack: seconds by which another label may be worse and still dominate this one.
    """
    held, spent, out, back, bound = label
    if bound >= labels.worst[node]:
        labels.lost[node] += 1
        return
    k = 0
    size = labels.size[node]
    while k < size:
        more_held = labels.held[node, k]
        more_out = labels.out[node, k] - out
        more_back = labels.back[node, k] - back
        late = labels.spent[node, k] - spent
        if more_held <= held and late + max(more_out, 0.0) + max(more_back, 0.0) <= slack:
            if k > 0:
                _swap(labels, node, k, k // 2)  # so that it is compared sooner
            labels.size[node] = size
            return
        if held <= more_held and max(-more_out, 0.0) + max(-more_back, 0.0) <= late:
            size -= 1
            _swap(labels, node, k, size)
        else:
            k += 1
    most = labels.held.shape[1]
    if size == most:
        labels.lost[node] += 1
        size -= 1
        _swap(labels, node, _worst(labels, node), size)
    labels.held[node, size] = held
    labels.spent[node, size] = spent
    labels.out[node, size] = out
    labels.back[node, size] = back
    labels.bound[node, size] = bound
    labels.parent[node, size] = came[0]
    labels.origin[node, size] = came[1]
    labels.size[node] = size + 1
    labels.worst[node] = np.inf
    if size + 1 == most:
        labels.worst[node] = labels.bound[node, _worst(labels, node)]


@helper
def _worst(labels: Labels, node: int) -> int:
    """Return the index of the label with the greatest ``bound`` at a node that is full."""
    worst = 0
    for k in range(1, labels.held.shape[1]):
        if labels.bound[node, k] > labels.bound[node, worst]:
            worst = k
    return worst


@helper
def _swap(labels: Labels, node: int, a: int, b: int) -> None:
    for values in (labels.held, labels.parent, labels.origin):
        values[node, a], values[node, b] = values[node, b], values[node, a]
    for times in (labels.spent, labels.out, labels.back, labels.bound):
        times[node, a], times[node, b] = times[node, b], times[node, a]


@helper
def _offer(
    sweep: Sweep,
    labels: Labels,
    limits: Limits,
    node: int,
    label: tuple[int, float, float, float],
    came: tuple[int, int],
) -> None:
    """Add a label (a partial plan) to a node unless it is dominated or cannot beat the best.

    ``label`` has ``held``, ``spent``, ``out`` and ``back`` of ``Labels``, ``came`` has ``parent``
    and ``origin``.
    """
    held, spent, out, back = label
    if held > sweep.budget:
        return
    m = min(limits.bounds.shape[1] - 1, (sweep.budget - held) // sweep.fronts.quantum)
    bound = 0.0
    least = limits.bounds[node, m]
    for k in range(limits.shares.shape[0]):
        waits = limits.shares[k, 0] * out + limits.shares[k, 1] * back
        bound = max(bound, waits + least[k])
    if spent + bound < limits.best_s[0]:
        _put(labels, node, (held, spent, out, back, spent + bound), came, limits.slack_s)


@entry
def expand_ck(
    sweep: Sweep, labels: Labels, limits: Limits, node: int, cuts: tuple[int, int, int]
) -> None:
    """Extend the labels of a node by forwards that keep only stage ``i``'s input, up to some cuts.

    That is ``OC^{F_ck}`` of Beaumont, Eyraud-Dubois, Shilova (2021).

    Args:
        labels: labels of all nodes; those of the cuts are added.
        limits: what they have to beat.
        cuts: first cut, end of the cuts, and stride. Threads with other cuts write other labels.
    """
    n = sweep.numbers
    i = node // 2
    for cut in range(cuts[0], cuts[1], cuts[2]):  # outermost, for the cache
        sweep_s = n.prefix_s[cut] - n.prefix_s[i]
        for label in range(labels.size[node]):
            held = labels.held[node, label]
            free = sweep.budget - held - n.gradient[-1]
            if labels.bound[node, label] >= limits.best_s[0] or free < sweep.peaks[i, i]:
                continue
            out = labels.out[node, label]
            back = labels.back[node, label]
            waits = max(0.0, out + sweep.out_lag[i, cut] - free * sweep.out_s)
            forward_s = sweep_s + waits
            _, backward_s = segment(sweep, i, cut, sweep.budget - held, back)
            takes = labels.spent[node, label] + forward_s + backward_s
            if takes >= limits.best_s[0]:
                continue
            for moved in range(2):
                nbytes = sweep.moves[i, node % 2] if moved else 0
                if nbytes < 0 or free + nbytes < sweep.rest[i, cut]:
                    continue
                new = (
                    held - nbytes + n.step[i, cut],
                    takes,
                    max(0.0, out + nbytes * sweep.out_s - forward_s),
                    max(0.0, back - backward_s) + nbytes * sweep.back_s,
                )
                _offer(sweep, labels, limits, 2 * cut, new, (label, 2 * node + moved))


@entry
def expand_all(sweep: Sweep, labels: Labels, limits: Limits, node: int) -> None:
    """Extend the labels of a node by a forward that keeps everything for its backward.

    The new labels are at the next stage's node. That is ``OC^{F_all}`` of Beaumont, Eyraud-Dubois,
    Shilova (2021).
    """
    n = sweep.numbers
    i = node // 2
    sweep_s = n.prefix_s[i + 1] - n.prefix_s[i]
    for label in range(labels.size[node]):
        held = labels.held[node, label]
        free = sweep.budget - held
        spare = free - n.gradient[-1] - n.keep[i, 0]
        if labels.bound[node, label] >= limits.best_s[0] or min(spare, free - n.back[i, 0]) < 0:
            continue
        out = labels.out[node, label]
        back = labels.back[node, label]
        forward_s = sweep_s + max(0.0, out - spare * sweep.out_s)
        backward_s = n.backward_s[i, 0] + max(0.0, back - (free - n.back[i, 0]) * sweep.back_s)
        for moved in range(2):
            nbytes = sweep.moves[i, node % 2] if moved else 0
            if nbytes < 0:
                continue
            new = (
                held - nbytes + n.saved[i, 0],
                labels.spent[node, label] + forward_s + backward_s,
                max(0.0, out + nbytes * sweep.out_s - forward_s),
                max(0.0, back - backward_s) + nbytes * sweep.back_s,
            )
            _offer(sweep, labels, limits, 2 * i + 3, new, (label, 2 * node + moved))


@entry
def finish(sweep: Sweep, labels: Labels, limits: Limits, node: int) -> tuple[int, int]:
    """Extend the labels of the last stage's node to whole schedules, and choose the fastest.

    Between the phases they wait for all transfers (``ε_G``).

    Returns:
        The label of the best schedule so far, and the last stage's way: 1 if it first runs forward
        by itself and is rebuilt later, else 0. Both are -1 if none is better than
        ``limits.best_s``, which is lowered.
    """
    n = sweep.numbers
    i = node // 2
    best = (-1, -1)
    for label in range(labels.size[node]):
        out = labels.out[node, label]
        back = labels.back[node, label]
        for way in range(2):
            free = sweep.budget - labels.held[node, label]
            spare = free - sweep.last_bytes[way, 0]
            spare_back = free - sweep.last_bytes[way, 1]
            if min(spare, spare_back) < 0:
                continue
            forward_s = n.prefix_s[i + 1] - n.prefix_s[i] + max(0.0, out - spare * sweep.out_s)
            backward_s = sweep.last_s[way] + max(0.0, back - spare_back * sweep.back_s)
            seconds = max(forward_s, out) + max(backward_s, back) + labels.spent[node, label]
            if seconds < limits.best_s[0]:
                limits.best_s[0] = seconds
                best = (label, way)
    return best
