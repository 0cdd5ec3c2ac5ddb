"""What each stage costs in seconds and bytes."""

from __future__ import annotations

from collections.abc import Sequence
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

    @staticmethod
    def from_paper(
        *,
        forward_s: Sequence[float],
        backward_s: Sequence[float],
        gradient_bytes: Sequence[int],
        saved_bytes: Sequence[int],
        forward_extra_bytes: Sequence[int],
        backward_extra_bytes: Sequence[int],
        fixed_bytes: int = 0,
    ) -> Costs:
        """Costs in the papers' terms.

        Args:
            forward_s, backward_s: ``u_f^1 … u_f^L`` and ``u_b^1 … u_b^L``.
            gradient_bytes: ``L + 1`` sizes ``ω_δ^0 … ω_δ^L``.
            saved_bytes: ``ω_ā^1 … ω_ā^L``.
            forward_extra_bytes, backward_extra_bytes: ``o_f`` and ``o_b``; ``o_b``
                does not count ``δ^{l-1}``, which is added here.
            fixed_bytes: memory outside the chain.

        Raises:
            ValueError: a length differs from that of ``forward_s``, or from one more.
        """
        count = len(forward_s)
        lengths = {
            "backward_s": (backward_s, count),
            "gradient_bytes": (gradient_bytes, count + 1),
            "saved_bytes": (saved_bytes, count),
            "forward_extra_bytes": (forward_extra_bytes, count),
            "backward_extra_bytes": (backward_extra_bytes, count),
        }
        for name, (values, expected) in lengths.items():
            if len(values) != expected:
                raise ValueError(f"{name} has {len(values)} entries, expected {expected}")
        stages = []
        for i, (u_f, u_b) in enumerate(zip(forward_s, backward_s, strict=True)):
            backward_extra = backward_extra_bytes[i] + gradient_bytes[i]
            stages.append(
                StageCosts(
                    forward_s=u_f,
                    backward_s=u_b,
                    rebuild_s=u_f,
                    gradient_bytes=gradient_bytes[i + 1],
                    forward_extra_bytes=forward_extra_bytes[i],
                    keep_extra_bytes=forward_extra_bytes[i],
                    backward_extra_bytes=backward_extra,
                    rebuild_bytes=saved_bytes[i] + max(forward_extra_bytes[i], backward_extra),
                )
            )
        return Costs(tuple(stages), fixed_bytes)
