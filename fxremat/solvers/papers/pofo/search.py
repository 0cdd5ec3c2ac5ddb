"""Passes the labels through the nodes, and reads the best decisions from them."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import numpy as np

from fxremat.solvers.numbers import Floats
from fxremat.solvers.papers.pofo.bounds import fill_bounds
from fxremat.solvers.papers.pofo.build import crew_of
from fxremat.solvers.papers.pofo.sweep import (
    Labels,
    Limits,
    Sweep,
    SweepChoice,
    expand_all,
    expand_ck,
    finish,
)


def bound_s(sweep: Sweep, limits: Limits) -> float:
    """Return a lower bound in seconds on any schedule of the paper's model, with sizes in slots.

    In that model, no transfer runs across the loss point.
    """
    free = sweep.budget - sweep.input_bytes
    slots = min(sweep.fronts.size.shape[1] - 1, free // sweep.fronts.quantum)
    return float(limits.bounds[0, slots].max())


def limits_of(sweep: Sweep) -> Limits:
    """Return the lower bounds of a chain, with an infinite time of the best schedule so far.

    ``O(L² slots)`` for each pair of shares.
    """
    nodes = 2 * sweep.numbers.gradient.size
    shares = _shares(sweep)
    slots = sweep.fronts.size.shape[1]
    limits = Limits(shares, np.empty((nodes, slots, len(shares))), np.array([np.inf]), 0.0)
    with crew_of(nodes // 2) as crew:
        for node in range(nodes - 1, -1, -1):
            share = range(crew.size)
            crew.run([partial(fill_bounds, sweep, limits, k, len(share), node) for k in share])
    return limits


def _shares(sweep: Sweep) -> Floats:
    """Return pairs of shares that weight transfers against work, before and after the loss point.

    A share ``p`` weights them as ``p`` to ``1 - p``. The shares are near those at which moving a
    byte takes as long as computing it.
    """
    n = sweep.numbers
    made = max(1.0, float(n.saved[:, 0].sum()))
    ratios = []
    for byte_s in (sweep.out_s, sweep.back_s):
        moved_s = made * byte_s
        computed_s = float(n.prefix_s[-1])
        ratios.append(computed_s / moved_s if moved_s > 0.0 and computed_s > 0.0 else 1.0)
    sides = []
    for ratio in ratios:
        weights = [ratio * 2.0**k for k in range(-3, 4)]
        sides.append([0.0, *(weight / (1.0 + weight) for weight in weights)])
    return np.array([[p, q] for p in sides[0] for q in sides[1]])


def search(
    sweep: Sweep, limits: Limits, *, most: int, recompute: bool
) -> tuple[tuple[SweepChoice, ...] | None, int]:
    """Find the decisions of the fastest plan, if it is faster than ``limits.best_s``.

    Args:
        sweep: the chain.
        limits: the bounds, and the best time so far, which is lowered.
        most: maximum number of labels of a node. Beyond, those of the greatest bound are dropped.
        recompute: whether ``F_ck`` is allowed before the last stage.

    Returns:
        The decisions, or ``None``; and the number of labels dropped because of ``most``. If that is
        0 and fronts were wide enough, nothing is better.
    """
    count = sweep.numbers.gradient.size
    labels = _empty_labels(2 * count, most)
    if sweep.input_bytes <= sweep.budget:
        labels.held[0, 0] = sweep.input_bytes
        labels.size[0] = 1
    end = (-1, -1, -1)
    with crew_of(count) as crew:
        for node in range(2 * count):
            stage = node // 2
            if stage == count - 1:
                label, way = finish(sweep, labels, limits, node)
                end = (node, label, way) if label >= 0 else end
                continue
            tasks = [partial(expand_all, sweep, labels, limits, node)]
            for k in range(crew.size if recompute else 0):
                cuts = (stage + 1 + k, count, crew.size)
                tasks.append(partial(expand_ck, sweep, labels, limits, node, cuts))
            crew.run(tasks)
    decisions = tuple(_walk(labels, *end))[::-1] if end[0] >= 0 else None
    return decisions, int(labels.lost.sum())


def _empty_labels(nodes: int, most: int) -> Labels:
    return Labels(
        held=np.zeros((nodes, most), dtype=np.int64),
        spent=np.zeros((nodes, most)),
        out=np.zeros((nodes, most)),
        back=np.zeros((nodes, most)),
        bound=np.zeros((nodes, most)),
        parent=np.zeros((nodes, most), dtype=np.int64),
        origin=np.zeros((nodes, most), dtype=np.int64),
        size=np.zeros(nodes, dtype=np.int64),
        lost=np.zeros(nodes, dtype=np.int64),
        worst=np.full(nodes, np.inf),
    )


def _walk(labels: Labels, node: int, label: int, way: int) -> Iterator[SweepChoice]:
    """Yield the decisions that led to a label (a partial plan), from the last to the first.

    Args:
        labels: the labels.
        node, label: node of the last stage, and index of the label there.
        way: the last stage's way, as ``finish`` returns it.
    """
    yield SweepChoice(node // 2, bool(node % 2), node // 2 + way, False)
    while node > 0:
        origin = int(labels.origin[node, label])
        label, after = int(labels.parent[node, label]), node
        node = origin // 2
        cut = node // 2 if after % 2 else after // 2
        yield SweepChoice(node // 2, bool(node % 2), cut, bool(origin % 2))


def least_memory(sweep: Sweep) -> tuple[int, tuple[SweepChoice, ...]]:
    """Return the least budget in bytes without ``fixed_bytes``, and decisions for it. ``O(L²)``.

    Times do not matter for it, since idle times can empty whatever waits for the link. So what may
    move does, and only what may not is held in addition to what stage ``i`` itself needs.
    """
    n = sweep.numbers
    count = n.gradient.size
    gradient = int(n.gradient[-1])
    # best[i][x]: least memory beyond A_i and, where I^x_i has to stay, beyond that too.
    best = [[0, 0] for _ in range(count)]
    cuts = [[0, 0] for _ in range(count)]
    for i in reversed(range(count)):
        for x in range(2 if i else 1):
            size = int(sweep.moves[i, x])
            input_bytes = max(size, 0)  # counted nbytes if it may move, else by the caller
            if i == count - 1:
                needs = sweep.last_bytes.max(axis=1).tolist()
                cuts[i][x] = i + int(needs[1] < needs[0])
                best[i][x] = input_bytes + min(needs)
                continue

            def least_after(cut: int, y: int, adds: int) -> int:  # ``adds``: bytes of an input
                return best[cut][y] + (adds if sweep.moves[cut, y] < 0 else 0)

            nbytes = input_bytes + max(gradient + int(n.keep[i, 0]), int(n.back[i, 0]))
            best[i][x] = max(nbytes, least_after(i + 1, 1, int(n.saved[i, 0])))
            cuts[i][x] = i
            for cut in range(i + 1, count):
                nbytes = input_bytes + max(
                    gradient + int(sweep.peaks[i, i]), int(sweep.fronts.least.memory[i, cut - 1])
                )
                nbytes = max(nbytes, gradient + int(sweep.rest[i, cut]))
                nbytes = max(nbytes, least_after(cut, 0, int(n.step[i, cut])))
                if nbytes < best[i][x]:
                    best[i][x] = nbytes
                    cuts[i][x] = cut
    base = 0 if sweep.moves[0, 0] >= 0 else sweep.input_bytes
    decisions = []
    i = x = 0
    while True:
        cut = cuts[i][x]
        last = i == count - 1
        decisions.append(SweepChoice(i, bool(x), cut, not last and sweep.moves[i, x] >= 0))
        if last:
            return base + best[0][0], tuple(decisions)
        i, x = (i + 1, 1) if cut == i else (cut, 0)
