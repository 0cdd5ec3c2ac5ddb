"""What each stage costs in seconds and bytes."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SaveOption:
    """A choice of what ``F_all`` keeps of a stage; its backward rebuilds the rest.

    Attributes:
        kept: ids of the storages kept. The boundary after the stage is kept as well,
            and the one before it is there anyway.
        recompute_s: seconds by which the backward takes longer.
        keep_extra_bytes: peak of this ``F_all`` beyond input and what it keeps.
        backward_extra_bytes: peak of the backward, rebuilding included, beyond
            ``gradient_bytes``, what was kept and the input.
    """

    kept: tuple[int, ...]
    recompute_s: float
    keep_extra_bytes: int
    backward_extra_bytes: int


@dataclass(frozen=True, slots=True)
class StageCosts:
    """Times and peaks of one stage ``i``; sizes of storages are in the ``Chain``.

    Attributes:
        forward_s: seconds of the whole forward, ``u_f``.
        backward_s: seconds of the backward, ``u_b``.
        rebuild_s: seconds of a recomputation right before the stage's own backward,
            which skips what only later stages need. In the papers: ``u_f``.
        gradient_bytes: all that the backward holds at the cut after this stage, that
            is the gradients of the boundary and what it has finished so far
            (parameter gradients), ``ω_δ``. For the last stage 0 unless gradients
            exist before the turn.
        forward_extra_bytes: peak of ``F_none`` and ``F_ck`` beyond input and output
            boundary, ``o_f``.
        keep_extra_bytes: peak of ``F_all`` beyond input and saved set.
        backward_extra_bytes: peak of ``B`` beyond ``gradient_bytes``, saved set and
            input. The gradient that ``B`` writes is counted here (``ω_δ^{l-1} + o_b``
            of the papers).
        rebuild_bytes: peak, beyond the input and ``gradient_bytes``, of rebuilding the
            saved set and running the backward straight after. In the papers
            ``ω_ā + max(o_f, ω_δ^{l-1} + o_b)``.
        options: choices beside that of keeping the whole saved set. Schedules count
            that one as option 0 and these from 1.
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
        """What ``F_all`` may keep: ``saved``, the ids of the whole saved set, then each option."""
        whole = SaveOption(saved, 0.0, self.keep_extra_bytes, self.backward_extra_bytes)
        return (whole, *self.options)


@dataclass(frozen=True, slots=True)
class Costs:
    """Costs of a chain.

    Attributes:
        stages: one entry a stage.
        fixed_bytes: held during the whole step whatever the schedule does:
            parameters, buffers, inputs, pinned storages, outputs.
    """

    stages: tuple[StageCosts, ...]
    fixed_bytes: int = 0
