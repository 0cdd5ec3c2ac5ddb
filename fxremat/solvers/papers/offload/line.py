"""A chain whose forwards keep everything, as numbers to decide what to offload.

Beaumont, Eyraud-Dubois, Shilova, "Optimal GPU-CPU offloading strategies for deep neural network
training" (2019), section 3. Activation ``x_0`` is boundary 0, and ``x_{i+1}`` is saved set ``i``,
including the boundary after it. Both ``F_i`` and ``B_i`` need ``x_i`` and ``x_{i+1}``, their extra
bytes, and nothing else of the chain.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

from fxremat.ir import Activations, Chain, Part, Problem
from fxremat.solvers.numbers import check_total

_MOST_BYTES = 1 << 62
"""Upper bound of sums of sizes, half of what an int64 holds."""


@dataclass(frozen=True, slots=True)
class OffloadChain:
    """A chain of ``L`` stages in the terms of Beaumont, Eyraud-Dubois, Shilova (2019), in bytes.

    Activation ``x_0`` is boundary 0, and ``x_{i+1}`` is saved set ``i``. ``F_i`` and ``B_i`` are
    forward and backward of stage ``i``.

    Attributes:
        sizes: ``L + 1`` sizes ``|x_i|``.
        before: ``L + 2`` sums of them, ``before[i]`` over ``x_0 … x_{i-1}``.
        forward_s, backward_s: seconds ``u_F`` and ``u_B``.
        forward_bytes: what ``F_i`` holds beyond ``x_0 … x_{i-1}``: ``x_i``, ``x_{i+1}``, its extra
            bytes, gradients and fixed bytes.
        after_forward_bytes: what of that is held right after ``F_i``.
        backward_bytes: what ``B_i`` holds beyond ``x_0 … x_{i-1}``.
        after_backward_bytes: what is held beyond them right after ``B_i``.
        budget: device memory.
        offload_rate, prefetch_rate: bytes per second; 1 where there is no link.
        linked: whether there is a link.
        shared: whether the link carries one transfer at a time, in either direction.
    """

    sizes: tuple[int, ...]
    before: tuple[int, ...]
    forward_s: tuple[float, ...]
    backward_s: tuple[float, ...]
    forward_bytes: tuple[int, ...]
    after_forward_bytes: tuple[int, ...]
    backward_bytes: tuple[int, ...]
    after_backward_bytes: tuple[int, ...]
    budget: int
    offload_rate: float
    prefetch_rate: float
    linked: bool
    shared: bool

    def __len__(self) -> int:
        return len(self.forward_s)

    @property
    def most_backward_bytes(self) -> tuple[int, ...]:
        """For each stage the greater of ``backward_bytes`` and ``after_backward_bytes``."""
        return tuple(map(max, self.backward_bytes, self.after_backward_bytes))

    @property
    def running(self) -> list[int]:
        """Bytes held during each of the ``2 L`` computations, if nothing is offloaded."""
        return [*self.totals(self.forward_bytes), *reversed(self.totals(self.backward_bytes))]

    @property
    def after(self) -> list[int]:
        """Bytes held right after each of the ``2 L`` computations, if nothing is offloaded."""
        return [
            *self.totals(self.after_forward_bytes),
            *reversed(self.totals(self.after_backward_bytes)),
        ]

    @property
    def movable(self) -> range:
        """Indices of the activations that may be worth moving.

        ``x_L`` and ``x_{L-1}`` are needed by ``F_{L-1}``, and next by ``B_{L-1}``.
        """
        return range(max(0, len(self) - 1)) if self.linked else range(0)

    @property
    def peak_bytes(self) -> int:
        """Greatest sum of device and host memory in bytes, ``M_peak``."""
        return max(*self.totals(self.forward_bytes), *self.totals(self.most_backward_bytes))

    def totals(self, nbytes: tuple[int, ...]) -> list[int]:
        """Return the bytes of each stage's operation if nothing is offloaded.

        They are ``nbytes`` of each stage, such as ``forward_bytes``, plus ``x_0 … x_{i-1}``.
        """
        return [n + m for n, m in zip(nbytes, self.before, strict=False)]

    def away(self, nbytes: tuple[int, ...]) -> list[int]:
        """Return for each stage's operation how many bytes have to be on the host only.

        If it is negative, none have to. ``nbytes`` are as in ``totals``.
        """
        return [m - self.budget for m in self.totals(nbytes)]

    @property
    def least_budget_bytes(self) -> int:
        """Least budget in bytes of any schedule, however long it takes.

        Whatever an operation does not need can be on the host, both for whole and for interruptible
        transfers: nothing has to be back before the previous operation is done.
        """
        return (
            max(*self.forward_bytes, *self.most_backward_bytes) if self.linked else self.peak_bytes
        )

    @property
    def compute_s(self) -> float:
        """Seconds of all computations together."""
        return sum(self.forward_s) + sum(self.backward_s)


def line_of(problem: Problem) -> OffloadChain:
    """Return the chain, costs, budget and link of a problem as an ``OffloadChain``.

    Raises:
        ValueError: a storage crosses two cuts, or the sizes are too large to add up.
    """
    chain, stages = problem.chain, problem.costs.stages
    _check_boundaries(chain)
    count = len(chain)
    saved = [chain.nbytes(chain.saved_set(i)) for i in range(count)]
    sizes = [chain.nbytes(chain.boundaries[0]), *saved]
    forward_bytes, after_forward_bytes, backward_bytes, after_backward_bytes = [], [], [], []
    fixed = problem.costs.fixed_bytes
    for i, stage in enumerate(stages):
        both = fixed + sizes[i] + sizes[i + 1]
        after_forward_bytes.append(both + stages[-1].gradient_bytes)
        forward_bytes.append(after_forward_bytes[-1] + stage.keep_extra_bytes)
        backward_bytes.append(both + stage.gradient_bytes + stage.backward_extra_bytes)
        after_backward_bytes.append(fixed + sizes[i] + (stages[i - 1].gradient_bytes if i else 0))
    check_total(
        sum(sizes) + max(*forward_bytes, *backward_bytes, *after_backward_bytes), most=_MOST_BYTES
    )
    link = problem.link
    return OffloadChain(
        sizes=tuple(sizes),
        before=(0, *accumulate(sizes)),
        forward_s=tuple(stage.forward_s for stage in stages),
        backward_s=tuple(stage.backward_s for stage in stages),
        forward_bytes=tuple(forward_bytes),
        after_forward_bytes=tuple(after_forward_bytes),
        backward_bytes=tuple(backward_bytes),
        after_backward_bytes=tuple(after_backward_bytes),
        budget=problem.budget_bytes,
        offload_rate=link.offload_bytes_per_s if link else 1.0,
        prefetch_rate=link.prefetch_bytes_per_s if link else 1.0,
        linked=link is not None,
        shared=link is not None and link.shared,
    )


def activations(index: int) -> Activations:
    """Return what a transfer of activation ``x_index`` moves: boundary 0, or a saved set."""
    return Activations(Part.SAVED, index - 1) if index else Activations(Part.INPUT, 0)


def _check_boundaries(chain: Chain) -> None:
    for i in range(1, len(chain.boundaries)):
        for storage in chain.boundaries[i]:
            if storage in chain.boundaries[i - 1] and chain.storages[storage].nbytes:
                raise ValueError(
                    f"chain.boundaries[{i}] has storage {storage} like boundary {i - 1}: "
                    "offloading solvers require that no storage is in two boundaries"
                )
