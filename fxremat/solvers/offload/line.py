"""A chain whose forwards keep everything, as numbers for deciding what to offload.

Beaumont, Eyraud-Dubois, Shilova, "Optimal GPU-CPU offloading strategies for deep neural
network training" (2019), section 3. Activation ``x_0`` is boundary 0, and ``x_{i+1}`` is saved
set ``i``, the boundary after it included. Both ``F_i`` and ``B_i`` need ``x_i`` and
``x_{i+1}``; nothing else of the chain but what they hold for themselves.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

from fxremat.ir import Activations, Chain, Part, Problem
from fxremat.solvers.numbers import check_total

_MOST_BYTES = 1 << 62
"""Sums of sizes stay below this, half of what an int64 holds."""


@dataclass(frozen=True, slots=True)
class OffloadChain:
    """``L`` stages in the paper's terms; sizes in bytes.

    Attributes:
        sizes: ``L + 1`` sizes ``|x_i|``.
        before: ``L + 2`` sums of them, ``before[i]`` over ``x_0 … x_{i-1}``.
        forward_s, backward_s: ``u_F`` and ``u_B``.
        forward_own: what ``F_i`` holds beside ``x_0 … x_{i-1}``: ``x_i``, ``x_{i+1}``, its
            extra, gradients and what is fixed.
        left_own: what is there of that right after it.
        during_own, after_own: what ``B_i`` holds, and what is there right after it.
        budget: device memory.
        offload_rate, prefetch_rate: bytes per second; infinite where there is no link.
        linked: there is one.
        shared: it carries one transfer at a time, whatever its direction.
    """

    sizes: tuple[int, ...]
    before: tuple[int, ...]
    forward_s: tuple[float, ...]
    backward_s: tuple[float, ...]
    forward_own: tuple[int, ...]
    left_own: tuple[int, ...]
    during_own: tuple[int, ...]
    after_own: tuple[int, ...]
    budget: int
    offload_rate: float
    prefetch_rate: float
    linked: bool
    shared: bool

    def __len__(self) -> int:
        return len(self.forward_s)

    @property
    def backward_own(self) -> tuple[int, ...]:
        """The greater of what is there during ``B_i`` and after it."""
        return tuple(map(max, self.during_own, self.after_own))

    @property
    def running(self) -> list[int]:
        """Bytes while each of the ``2 L`` computations runs in their order, nothing away."""
        return [*self.totals(self.forward_own), *reversed(self.totals(self.during_own))]

    @property
    def after(self) -> list[int]:
        """Bytes once each of them is done."""
        return [*self.totals(self.left_own), *reversed(self.totals(self.after_own))]

    @property
    def movable(self) -> range:
        """Activations that are ever worth moving.

        ``x_L`` and ``x_{L-1}`` are needed by ``F_{L-1}``, and next by ``B_{L-1}``.
        """
        return range(max(0, len(self) - 1)) if self.linked else range(0)

    @property
    def peak_bytes(self) -> int:
        """Memory of host and device together where it is most, ``M_peak``."""
        return max(m for own in (self.forward_own, self.backward_own) for m in self.totals(own))

    def totals(self, own: tuple[int, ...]) -> list[int]:
        """``m_F`` or ``m_B``: what ``own`` is with ``x_0 … x_{i-1}``."""
        return [n + m for n, m in zip(own, self.before, strict=False)]

    def away(self, own: tuple[int, ...]) -> list[int]:
        """How much must be in host memory alone while each operation runs."""
        return [m - self.budget for m in self.totals(own)]

    @property
    def least_budget_bytes(self) -> int:
        """The least budget with all the time there is.

        Whatever an operation does not need itself can be on the host, for whole and for
        interruptible transfers alike: nothing need come back before the operation before is
        done.
        """
        return max(*self.forward_own, *self.backward_own) if self.linked else self.peak_bytes

    @property
    def compute_s(self) -> float:
        """All computations back to back."""
        return sum(self.forward_s) + sum(self.backward_s)


def line_of(problem: Problem) -> OffloadChain:
    """The numbers of a problem.

    Raises:
        ValueError: a storage crosses two cuts, or the sizes are too large to add up.
    """
    chain, stages = problem.chain, problem.costs.stages
    _check_boundaries(chain)
    count = len(chain)
    saved = [chain.nbytes(chain.saved_set(i)) for i in range(count)]
    sizes = [chain.nbytes(chain.boundaries[0]), *saved]
    forward_own, left_own, during_own, after_own = [], [], [], []
    fixed = problem.costs.fixed_bytes
    for i, stage in enumerate(stages):
        both = fixed + sizes[i] + sizes[i + 1]
        left_own.append(both + stages[-1].gradient_bytes)
        forward_own.append(left_own[-1] + stage.keep_extra_bytes)
        during_own.append(both + stage.gradient_bytes + stage.backward_extra_bytes)
        after_own.append(fixed + sizes[i] + (stages[i - 1].gradient_bytes if i else 0))
    check_total(sum(sizes) + max(*forward_own, *during_own, *after_own), most=_MOST_BYTES)
    link = problem.link
    return OffloadChain(
        sizes=tuple(sizes),
        before=(0, *accumulate(sizes)),
        forward_s=tuple(stage.forward_s for stage in stages),
        backward_s=tuple(stage.backward_s for stage in stages),
        forward_own=tuple(forward_own),
        left_own=tuple(left_own),
        during_own=tuple(during_own),
        after_own=tuple(after_own),
        budget=problem.budget_bytes,
        offload_rate=link.offload_bytes_per_s if link else 1.0,
        prefetch_rate=link.prefetch_bytes_per_s if link else 1.0,
        linked=link is not None,
        shared=link is not None and link.shared,
    )


def activations(index: int) -> Activations:
    """What ``x_index`` is in a schedule."""
    return Activations(Part.SAVED, index - 1) if index else Activations(Part.INPUT, 0)


def _check_boundaries(chain: Chain) -> None:
    for i in range(1, len(chain.boundaries)):
        for storage in chain.boundaries[i]:
            if storage in chain.boundaries[i - 1] and chain.storages[storage].nbytes:
                raise ValueError(
                    f"chain.boundaries[{i}] has storage {storage} like boundary {i - 1}: "
                    "offloading solvers want every activation to be of one stage"
                )
