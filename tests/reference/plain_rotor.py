"""Rotor's recurrence as plain numpy, row by row: slow, short, and with no tricks.

Sizes come from set operations on the chain, not from the solver's arrays.
"""

from __future__ import annotations

import numpy as np

from fxremat.ir import Chain, Costs


def plain_rotor(
    chain: Chain, costs: Costs, *, quantum: int, slots: int, away: float = 0.0
) -> np.ndarray:
    """``C(0, L - 1, m)`` for ``m = 0 … slots``, sizes rounded up to ``quantum`` bytes.

    Of what the first sweep keeps, a share is ``away`` while other stages run.
    """
    count, stages = len(chain), costs.stages
    sets = [set(boundary) for boundary in chain.boundaries]
    saved = [chain.nbytes(chain.saved_set(i)) for i in range(count)]
    prefix = np.cumsum([0.0, *(stage.forward_s for stage in stages)])

    def up(nbytes: int) -> int:
        return -(-nbytes // quantum)

    def limited(row: np.ndarray, least: int) -> np.ndarray:
        row[: min(up(least), slots + 1)] = np.inf
        return row

    def shifted(row: np.ndarray, by: int) -> np.ndarray:
        by = min(by, slots + 1)
        return np.concatenate([np.full(by, np.inf), row[: slots + 1 - by]])

    def alone(i: int) -> np.ndarray:
        stage = stages[i]
        seconds = stage.rebuild_s + stage.backward_s
        rebuild = limited(np.full(slots + 1, seconds), stage.gradient_bytes + stage.rebuild_bytes)
        if i < count - 1:
            return rebuild
        needs = saved[i] + max(stage.keep_extra_bytes, stage.backward_extra_bytes)
        once = np.full(slots + 1, stage.forward_s + stage.backward_s)
        forward = chain.nbytes(sets[i + 1] - sets[i]) + stage.forward_extra_bytes
        again = limited(stage.forward_s + rebuild, stage.gradient_bytes + forward)
        return np.minimum(limited(once, stage.gradient_bytes + needs), again)

    table: dict[tuple[int, int], np.ndarray] = {}
    for s in reversed(range(count)):
        steps = [chain.nbytes(boundary - sets[s]) for boundary in sets]
        forwards = [
            chain.nbytes((sets[j] | sets[j + 1]) - sets[s]) + stages[j].forward_extra_bytes
            for j in range(count)
        ]
        table[s, s] = alone(s)
        for t in range(s + 1, count):
            gradient = stages[t].gradient_bytes
            gone = away if t == count - 1 else 0.0
            step = [up(nbytes - int(nbytes * gone)) for nbytes in steps]
            kept = up(saved[s] - int(saved[s] * gone))
            row = stages[s].forward_s + shifted(table[s + 1, t], kept)
            row += stages[s].backward_s
            keep = gradient + stages[s].keep_extra_bytes
            back = stages[s].gradient_bytes + stages[s].backward_extra_bytes
            limited(row, saved[s] + max(keep, back))
            peak = 0
            for cut in range(s + 1, t + 1):
                peak = max(peak, forwards[cut - 1])
                first = max(up(gradient + peak), step[cut])
                if first > slots:
                    continue
                late = table[cut, t][first - step[cut] : slots + 1 - step[cut]]
                takes = (prefix[cut] - prefix[s]) + late + table[s, cut - 1][first:]
                np.minimum(row[first:], takes, out=row[first:])
            table[s, t] = row
    return table[0, count - 1]
