"""Costs of stages in seconds and bytes."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SaveOption:
    """A choice of the storages that a stage's forward keeps for its backward (``F_all``).

    The backward rebuilds the rest of the saved set.

    Attributes:
        kept: ids of the storages kept. The boundary after the stage is kept too; the one before it
            is in memory in any case.
        recompute_s: seconds that rebuilding adds to the backward.
        keep_extra_bytes: peak of this ``F_all`` beyond its input and what it keeps.
        backward_extra_bytes: peak of the backward, including rebuilding, beyond ``gradient_bytes``,
            what was kept, and the input.
    """

    kept: tuple[int, ...]
    recompute_s: float
    keep_extra_bytes: int
    backward_extra_bytes: int


@dataclass(frozen=True, slots=True)
class StageCosts:
    """Seconds and peak bytes of one stage. Sizes of storages are in the ``Chain``.

    ``F_none``, ``F_ck`` and ``F_all`` are the forwards of ``schedule.Keep``, ``B`` is the backward.
    Symbols such as ``u_f`` are those of Beaumont et al. (2019), see ``solvers.rotor``.

    Attributes:
        forward_s: seconds of the whole forward, ``u_f``.
        backward_s: seconds of the backward, ``u_b``.
        rebuild_s: seconds of a recomputation right before the stage's own backward, which skips
            what only later stages need. The papers take ``u_f``.
        gradient_bytes: all that the backward holds at the cut after this stage, ``ω_δ``: the
            gradients of the boundary, and parameter gradients computed so far. It is 0 for the last
            stage, unless gradients exist before the loss point.
        forward_extra_bytes: peak of ``F_none`` and ``F_ck`` beyond the input and the output
            boundary, ``o_f``.
        keep_extra_bytes: peak of ``F_all`` beyond the input and the saved set.
        backward_extra_bytes: peak of ``B`` beyond ``gradient_bytes``, the saved set and the input.
            It includes the gradient that ``B`` writes (``ω_δ^{l-1} + o_b`` of the papers).
        rebuild_bytes: peak, beyond the input and ``gradient_bytes``, of rebuilding the saved set
            and running the backward right after that. In the papers ``ω_ā + max(o_f, ω_δ^{l-1} +
            o_b)``.
        options: choices other than keeping the whole saved set. Schedules number them from 1, and
            the whole saved set is option 0.
    """

    forward_s: float
    backward_s: float
    rebuild_s: float
    gradient_bytes: int
    forward_extra_bytes: int
    keep_extra_bytes: int
    backward_extra_bytes: int
    rebuild_bytes: int
    options: tuple[SaveOption, ...] = ()

    def choices(self, saved: tuple[int, ...]) -> tuple[SaveOption, ...]:
        """Return the choices of what a forward may keep: the whole saved set, then ``options``.

        Args:
            saved: ids of the storages of the whole saved set.
        """
        whole = SaveOption(saved, 0.0, self.keep_extra_bytes, self.backward_extra_bytes)
        return (whole, *self.options)


@dataclass(frozen=True, slots=True)
class Costs:
    """Seconds and bytes of the stages of a chain.

    Attributes:
        stages: costs of each stage.
        fixed_bytes: bytes held during the whole step under any schedule: parameters, buffers,
            inputs, pinned storages, outputs.
    """

    stages: tuple[StageCosts, ...]
    fixed_bytes: int = 0
