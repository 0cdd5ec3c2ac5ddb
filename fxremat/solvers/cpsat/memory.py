"""Memory of a step that keeps everything, as CP-SAT bounds it."""

from __future__ import annotations

from fxremat.ir import Problem
from fxremat.solvers.offload.line import Line


class Memory:
    """What device memory holds beside what is away; computations ``0 … 2 L - 1`` in order.

    Attributes:
        running: bytes while each computation runs, everything present.
        after: bytes once it is done; the last entry is not used.
    """

    def __init__(self, problem: Problem, line: Line) -> None:
        stages, count = problem.costs.stages, len(line)
        fixed = problem.costs.fixed_bytes
        gradients = [stage.gradient_bytes for stage in stages]
        around = [gradients[-1]] * count + gradients[::-1] + [0]
        extras = [s.keep_extra_bytes for s in stages]
        extras += [s.backward_extra_bytes for s in reversed(stages)]
        present = [c + 2 if c < count else 2 * count - c + 1 for c in range(2 * count)]
        self.running = [
            fixed + around[c] + extras[c] + line.before[present[c]] for c in range(2 * count)
        ]
        self.after = [
            fixed + around[c + 1] + line.before[c + 2 if c + 1 <= count else 2 * count - c]
            for c in range(2 * count)
        ]
