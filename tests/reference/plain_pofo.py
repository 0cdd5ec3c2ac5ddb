"""The supplement's recurrences as they stand there, corrected: over all states, in bytes.

Slow and short. Chains whose boundaries share nothing, one bandwidth, and times in which the
link moves a whole number of bytes, so that no state has to be rounded.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from fxremat.ir import Problem


def plain_pofo(problem: Problem) -> float:
    """``OC_0`` of the whole chain with empty queues; infinite if nothing fits."""
    return _Plain(problem).outer(0, 0, 0, 0.0, 0.0)


class _Plain:
    def __init__(self, problem: Problem) -> None:
        chain, link = problem.chain, problem.link
        assert link is not None
        assert link.offload_bytes_per_s == link.prefetch_bytes_per_s
        self.beta = link.offload_bytes_per_s
        self.count = len(chain)
        self.budget = problem.budget_bytes - problem.costs.fixed_bytes
        self.stages = problem.costs.stages
        self.sizes = [chain.nbytes(boundary) for boundary in chain.boundaries]
        self.saved = [chain.nbytes(chain.saved_set(i)) for i in range(self.count)]
        self.inner_s: dict[tuple[int, int, int, float], float] = {}
        self.outer_s: dict[tuple[int, int, int, float, float], float] = {}

    def forward_bytes(self, i: int, k: int) -> int:
        """Of forward ``k`` beside boundary ``i``."""
        reads = self.sizes[k] if k > i else 0
        return reads + self.sizes[k + 1] + self.stages[k].forward_extra_bytes

    def all_bytes(self, i: int) -> int:
        return self.saved[i] + self.stages[i].keep_extra_bytes

    def back_bytes(self, i: int) -> int:
        stage = self.stages[i]
        return stage.gradient_bytes + self.saved[i] + stage.backward_extra_bytes

    def idle_s(self, excess: float) -> float:
        return max(excess, 0.0) / self.beta

    def inner(self, i: int, j: int, held: int, late: float) -> float:
        """``C_Δ``."""
        key = (i, j, held, late)
        if key not in self.inner_s:
            if i == j:
                self.inner_s[key] = self.alone(i, held, late)
            else:
                best = self.inner_all(i, j, held, late)
                self.inner_s[key] = min([best, *self.inner_ck(i, j, held, late)])
        return self.inner_s[key]

    def alone(self, i: int, held: int, late: float) -> float:
        stage = self.stages[i]
        needs = held + stage.gradient_bytes + stage.rebuild_bytes
        if needs > self.budget:
            return math.inf
        return stage.rebuild_s + stage.backward_s + self.idle_s(needs + late - self.budget)

    def inner_all(self, i: int, j: int, held: int, late: float) -> float:
        stage = self.stages[i]
        keeps = held + self.stages[j].gradient_bytes + self.all_bytes(i)
        backs = held + self.back_bytes(i)
        if max(keeps, backs) > self.budget:
            return math.inf
        back_s = stage.backward_s + self.idle_s(backs + late - self.budget)
        late = max(0.0, late - back_s * self.beta)
        deep_s = self.inner(i + 1, j, held + self.saved[i], late)
        if deep_s == math.inf:
            return math.inf
        late = max(0.0, late - deep_s * self.beta)
        return stage.forward_s + self.idle_s(keeps + late - self.budget) + deep_s + back_s

    def inner_ck(self, i: int, j: int, held: int, late: float) -> Iterator[float]:
        before = held + self.stages[j].gradient_bytes
        for cut in range(i + 1, j + 1):
            if before + max(self.forward_bytes(i, k) for k in range(i, cut)) > self.budget:
                return
            early_s = self.inner(i, cut - 1, held, late)
            if early_s == math.inf:
                continue
            late_2 = max(0.0, late - early_s * self.beta)
            deep_s = self.inner(cut, j, held + self.sizes[cut], late_2)
            if deep_s == math.inf:
                continue
            late_3 = max(0.0, late_2 - deep_s * self.beta)
            left_s = sweep_s = sum(stage.forward_s for stage in self.stages[i:cut])
            wait_s = 0.0
            for k in range(i, cut):
                left_s -= self.stages[k].forward_s
                excess = before + self.forward_bytes(i, k) + late_3 - self.budget
                wait_s = max(wait_s, self.idle_s(excess - self.beta * left_s))
            yield sweep_s + wait_s + deep_s + early_s

    def outer(self, x: int, i: int, kept: int, out: float, late: float) -> float:
        """``OC_x``."""
        key = (x, i, kept, out, late)
        if key not in self.outer_s:
            own = self.saved[i - 1] if x else self.sizes[i]
            if i == self.count - 1:
                options = self.loss(kept + own, out, late)
            else:
                options = [*self.outer_all(i, kept, own, out, late)]
                options += self.outer_ck(i, kept, own, out, late)
            self.outer_s[key] = min([math.inf, *options])
        return self.outer_s[key]

    def outer_all(self, i: int, kept: int, own: int, out: float, late: float) -> Iterator[float]:
        stage = self.stages[i]
        keeps = kept + own + self.stages[-1].gradient_bytes + self.all_bytes(i)
        backs = kept + own + self.back_bytes(i)
        if max(keeps, backs) > self.budget:
            return
        forward_s = stage.forward_s + self.idle_s(keeps + out - self.budget)
        back_s = stage.backward_s + self.idle_s(backs + late - self.budget)
        for moves in (False, True):
            new = self.after(kept, own, out, late, (forward_s, back_s), moves)
            yield forward_s + back_s + self.outer(1, i + 1, *new)

    def outer_ck(self, i: int, kept: int, own: int, out: float, late: float) -> Iterator[float]:
        loss_point = self.stages[-1].gradient_bytes
        for cut in range(i + 1, self.count):
            back_s = self.inner(i, cut - 1, kept + own, late)
            peaks = [loss_point + self.forward_bytes(i, k) for k in range(i, cut)]
            wait_s = passed_s = 0.0
            for k in range(i, cut):
                excess = kept + own + peaks[k - i] + out - self.budget
                wait_s = max(wait_s, self.idle_s(excess - self.beta * passed_s))
                passed_s += self.stages[k].forward_s
            forward_s = passed_s + wait_s
            for moves in (False, True):
                rest = kept if moves else kept + own
                if max(kept + own + peaks[0], rest + max(peaks)) > self.budget:
                    continue
                if back_s < math.inf:
                    new = self.after(kept, own, out, late, (forward_s, back_s), moves)
                    yield forward_s + back_s + self.outer(0, cut, *new)

    def after(
        self,
        kept: int,
        own: int,
        out: float,
        late: float,
        seconds: tuple[float, float],
        moves: bool,
    ) -> tuple[int, float, float]:
        """Table 2: the new state."""
        sent, fetched = seconds[0] * self.beta, seconds[1] * self.beta
        if moves:
            return kept, max(0.0, out + own - sent), max(0.0, late - fetched) + own
        return kept + own, max(0.0, out - sent), max(0.0, late - fetched)

    def loss(self, held: int, out: float, late: float) -> list[float]:
        """The last stage, at once or in its second way, and ``ε_G``."""
        i = self.count - 1
        stage = self.stages[i]
        gradient = stage.gradient_bytes
        runs = [held + gradient + self.all_bytes(i), held + gradient + self.forward_bytes(i, i)]
        backs = [held + self.back_bytes(i), held + gradient + stage.rebuild_bytes]
        last_s = [stage.backward_s, stage.rebuild_s + stage.backward_s]
        found = []
        for way in range(2):
            if max(runs[way], backs[way]) <= self.budget:
                forward_s = stage.forward_s + self.idle_s(runs[way] + out - self.budget)
                back_s = last_s[way] + self.idle_s(backs[way] + late - self.budget)
                found.append(max(forward_s, out / self.beta) + max(back_s, late / self.beta))
        return found
