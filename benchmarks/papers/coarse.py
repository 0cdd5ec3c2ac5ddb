"""Long chains as shorter ones: neighbouring stages taken as one.

What takes little time on 160 stages for ``rotor`` takes long for ``pofo``, and the solvers of
offloading alone want boundaries that share nothing. Both is had by merging stages.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

from fxremat.ir import (
    Backward,
    Chain,
    Compute,
    Costs,
    Forward,
    Keep,
    Schedule,
    Stage,
    StageCosts,
)


def coarsen(chain: Chain, costs: Costs, *, stages: int) -> tuple[Chain, Costs, tuple[int, ...]]:
    """Merge neighbouring stages into at most ``stages`` groups.

    A schedule of the groups is one of the stages (see ``refined``): forward and backward of a
    group are those of its stages, one after the other. It takes no more memory there, and
    as long. So what is planned for groups holds for stages; a better plan may exist there.

    * Boundaries are those at the ends of groups; those inside are in the saved sets.
    * Times are added. In a rebuild only the last stage of a group skips what only later ones
      need.
    * Peaks are the most of the sequence, all that the group has kept or still keeps included.
    * Save options are left out.

    The groups are those of least ``weight``, among those whose boundaries share no storage.

    Returns:
        The chain, its costs, and where groups begin, ``len(chain)`` at the end.

    Raises:
        ValueError: there are no such groups.
    """
    cuts = _cuts(chain, costs, stages)
    groups = [range(a, b) for a, b in pairwise(cuts)]
    kinds: dict[tuple[int, ...], int] = {}
    merged = []
    for number, group in enumerate(groups):
        inner = {s for i in group for s in chain.saved_set(i)}
        kind = tuple(chain.stages[i].kind for i in group)
        name = f"stage{group[0]}" if len(group) == 1 else f"stages{group[0]}to{group[-1]}"
        saved = tuple(sorted(inner - {*chain.boundaries[group[0]]}))
        merged.append(Stage(name, saved, kinds.setdefault(kind, number)))
    boundaries = tuple(chain.boundaries[cut] for cut in cuts)
    found = Costs(tuple(_costs(chain, costs, group) for group in groups), costs.fixed_bytes)
    return Chain(chain.storages, boundaries, tuple(merged)), found, cuts


def refined(ops: Sequence[Compute], cuts: Sequence[int]) -> Schedule:
    """The schedule of the stages that one of groups stands for.

    A group keeps its input with that of its first stage.
    """
    found: list[Compute] = []
    for op in ops:
        group = range(cuts[op.stage], cuts[op.stage + 1])
        if isinstance(op, Backward):
            found += [Backward(i) for i in reversed(group)]
        elif op.keep is Keep.ALL:
            found += [Forward(i, Keep.ALL) for i in group]
        else:
            found += [Forward(i, op.keep if i == group[0] else Keep.NONE) for i in group]
    return Schedule(tuple(found))


def _costs(chain: Chain, costs: Costs, group: range) -> StageCosts:
    """Of a group: see ``coarsen``."""
    stages = [costs.stages[i] for i in group]
    last = stages[-1]
    before, after = chain.boundaries[group[0]], chain.boundaries[group[-1] + 1]
    ends = chain.nbytes({*before, *after})
    held: set[int] = set(before)
    forward, keep, backward, rebuild = [0], [0], [0], [0]
    peaks: list[tuple[int, int]] = []
    for i, stage in zip(group, stages, strict=True):
        around = {*before, *chain.boundaries[i], *chain.boundaries[i + 1]}
        forward.append(chain.nbytes(around) + stage.forward_extra_bytes - ends)
        if i == group[-1]:
            rebuild.append(chain.nbytes(held) + stage.rebuild_bytes)
        held |= chain.saved_set(i)
        peaks.append((chain.nbytes(held), i))
    kept_bytes, input_bytes = chain.nbytes(held), chain.nbytes(before)
    for nbytes, i in peaks:
        stage = costs.stages[i]
        keep.append(nbytes + stage.keep_extra_bytes - kept_bytes)
        back_bytes = nbytes + stage.gradient_bytes + stage.backward_extra_bytes
        backward.append(back_bytes - last.gradient_bytes - kept_bytes)
        if i != group[-1]:
            rebuild += [nbytes + stage.keep_extra_bytes, back_bytes - last.gradient_bytes]
    return StageCosts(
        forward_s=math.fsum(stage.forward_s for stage in stages),
        backward_s=math.fsum(stage.backward_s for stage in stages),
        rebuild_s=math.fsum([*(stage.forward_s for stage in stages[:-1]), last.rebuild_s]),
        gradient_bytes=last.gradient_bytes,
        forward_extra_bytes=max(forward),
        keep_extra_bytes=max(keep),
        backward_extra_bytes=max(backward),
        rebuild_bytes=max(0, max(rebuild) - input_bytes),
    )


def _cuts(chain: Chain, costs: Costs, most: int) -> tuple[int, ...]:
    """Where groups of least weight begin. ``O(L² most)``.

    The weight of a group is the square of its share of the saved bytes, that of its share of
    the time, and, to prefer small boundaries, a ``most``-th of what its last boundary is of
    the saved bytes.
    """
    count = len(chain)
    saved = [chain.nbytes(chain.saved_set(i)) for i in range(count)]
    seconds = [stage.forward_s + stage.backward_s for stage in costs.stages]
    all_bytes, all_s = sum(saved) or 1, math.fsum(seconds) or 1.0
    sizes = [{s for s in ids if chain.storages[s].nbytes} for ids in chain.boundaries]
    best: list[list[tuple[float, int]]] = [[(0.0, 0)] + [(math.inf, 0)] * count]
    for _ in range(most):
        row = [(math.inf, 0)] * (count + 1)
        for b in range(1, count + 1):
            nbytes, time_s = 0, 0.0
            edge = chain.nbytes(chain.boundaries[b]) / all_bytes / most
            for a in reversed(range(b)):
                nbytes, time_s = nbytes + saved[a], time_s + seconds[a]
                if sizes[a] & sizes[b]:
                    continue
                weight = (nbytes / all_bytes) ** 2 + (time_s / all_s) ** 2 + edge
                row[b] = min(row[b], (best[-1][a][0] + weight, a))
        best.append(row)
    groups = min(range(1, most + 1), key=lambda k: best[k][count][0])
    if best[groups][count][0] == math.inf:
        raise ValueError(f"no {most} groups of stages have boundaries that share no storage")
    cuts = [count]
    for k in range(groups, 0, -1):
        cuts.append(best[k][cuts[-1]][1])
    return tuple(reversed(cuts))
