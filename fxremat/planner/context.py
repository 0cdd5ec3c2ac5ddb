"""What a call of a captured step finds: gradients that exist, other steps, a wrapper's buckets."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

from fxremat.passes.joint.graph import JointGraph
from fxremat.passes.joint.sizes import Values
from fxremat.planner.context_bytes import ContextBytes, tensor_bytes


@dataclass(frozen=True, slots=True)
class Correction:
    """What earlier steps in like contexts needed beyond what was planned for.

    Attributes:
        turn_bytes: at the turn, as by a loss outside the model, or by what runs between the two
            directions of a region.
        room_bytes: at the turn, too, by further steps.
        left_bytes: from the turn to the end, gradients of the outputs included; of a region less
            than none, where less is there in its backward than in its forward.
        more_bytes: throughout; of a region less than none, where it is given what is counted as
            held by an earlier one.
        observed: ``turn_bytes`` and ``left_bytes`` are what steps took, and hold in place of what
            was assumed of the loss, be they more or less than that.
    """

    turn_bytes: int = 0
    room_bytes: int = 0
    left_bytes: int = 0
    more_bytes: int = 0
    observed: bool = False

    def times(self, factor: float) -> Correction:
        """The correction for outputs ``factor`` times as large."""
        return Correction(
            math.ceil(factor * self.turn_bytes),
            math.ceil(factor * self.room_bytes),
            math.ceil(factor * self.left_bytes),
            math.ceil(factor * self.more_bytes),
            self.observed,
        )

    def __or__(self, other: Correction) -> Correction:
        """The larger of two corrections, number by number."""
        return Correction(
            max(self.turn_bytes, other.turn_bytes),
            max(self.room_bytes, other.room_bytes),
            max(self.left_bytes, other.left_bytes),
            max(self.more_bytes, other.more_bytes),
            self.observed or other.observed,
        )


NO_CORRECTION = Correction()


@dataclass(frozen=True, slots=True)
class StepContext:
    """What is true at a call, beside what is true at every call of the graph.

    Attributes:
        sizes: a number for each symbol of the graph.
        existing: primals that have a gradient.
        added: those of them to whose gradient the new one is added as soon as it is made.
        waiting: how many earlier steps wait for their backward.
        waiting_bytes: what these hold.
        kept_bytes: outputs of earlier steps that somebody still holds.
        state_bytes: state of optimizers beyond what ``optimizer=`` says; less than none where there
            is less.
        networks_bytes: held by other networks that are compiled in this process.
        bucket_bytes: of each buffer of a wrapper for gradients.
        workspace_bytes: of libraries, for threads and streams that ran no step when the graph was
            captured.
        slack_bytes: by how much blocks of what is there are larger than what lies in them.
        spread_bytes: parts of gradients that exist, of tensors that several processes share.
        buffer_bytes: by how much the storages of inputs are larger than planned: a view of a larger
            buffer holds all of it.
        others_bytes: of the budget, for steps that may wait beside those that do.
        correction: from earlier steps.
        cleared: the gradients that exist will be gone when the backward begins, as torch's own
            tutorial clears them.
        released: the outputs that are still held will be gone before the loss is computed, as a
            loop's variable drops them for the new ones.
        scaled: gradients of losses are others each time, as steps have shown: exact ones of what a
            loss is computed from would be computed twice, beside it and once it is known.
        tangents_stay: somebody holds gradients of the outputs to the end of the backward, or two of
            them share their memory.
        region: the call is one of several of a step: ``correction`` has all that is beside it.
        host_bytes: of host memory, left for it; ``None``: as much as it takes.
    """

    sizes: Values = ()
    existing: frozenset[int] = frozenset()
    added: frozenset[int] = frozenset()
    waiting: int = 0
    waiting_bytes: int = 0
    kept_bytes: int = 0
    state_bytes: int = 0
    networks_bytes: int = 0
    bucket_bytes: tuple[int, ...] = ()
    workspace_bytes: int = 0
    slack_bytes: int = 0
    spread_bytes: int = 0
    buffer_bytes: int = 0
    others_bytes: int = 0
    correction: Correction = NO_CORRECTION
    cleared: bool = False
    released: bool = False
    scaled: bool = False
    tangents_stay: bool = False
    region: bool = False
    host_bytes: int | None = None

    @property
    def kind(self) -> tuple[int, bool]:
        """The kind of context, by steps that wait and gradients: one kind shares corrections."""
        return self.waiting, bool(self.existing)

    def gradient_bytes(self, joint: JointGraph) -> tuple[int, ...]:
        """Bytes of each gradient that exists, in the order of the primals."""
        sizes = joint.sizes.named(self.sizes)
        return tuple(tensor_bytes(joint.primals[i], sizes) for i in sorted(self.existing))

    def turn_bytes(self, base: ContextBytes) -> int:
        """What the step's own loss needs at the turn."""
        if self.region:
            return 0  # it is none of the region's
        if self.correction.observed:
            return self.correction.turn_bytes
        return max(base.turn_bytes, self.correction.turn_bytes)

    @property
    def others_there_bytes(self) -> int:
        """What is there of others than the call's own graph."""
        return (
            self.waiting_bytes
            + self.kept_bytes
            + self.state_bytes
            + self.networks_bytes
            + self.spread_bytes
        )

    def given_bytes(self, base: ContextBytes, joint: JointGraph) -> int:
        """What is held throughout the call; arguments are those of :meth:`around`."""
        return self._given_bytes(base, sum(self.gradient_bytes(joint)))

    def _given_bytes(self, base: ContextBytes, gradients_bytes: int) -> int:
        return (
            base.given_bytes
            + gradients_bytes
            + sum(self.bucket_bytes)
            + self.workspace_bytes
            + self.slack_bytes
            + self.buffer_bytes
            + self.others_there_bytes
            + self.others_bytes
            + self.correction.more_bytes
        )

    def around(self, base: ContextBytes, joint: JointGraph) -> ContextBytes:
        """The context bytes of the call.

        Args:
            base: those of every call of these sizes.
            joint: the captured graph.
        """
        gradients = self.gradient_bytes(joint)
        more = (*gradients, *self.bucket_bytes, *filter(None, (self.workspace_bytes,)))
        held_bytes = self.correction.left_bytes
        if not (self.region or self.correction.observed):
            held_bytes = max(held_bytes, base.tangent_bytes)
        cleared_bytes = sum(gradients) * self.cleared
        turn_bytes = self.correction.turn_bytes if self.region else self.turn_bytes(base)
        return replace(
            base,
            given_bytes=self._given_bytes(base, sum(gradients)),
            turn_bytes=turn_bytes + self.correction.room_bytes,
            tangent_bytes=held_bytes - cleared_bytes,
            given_each_bytes=(*base.given_each_bytes, *more),
            added=frozenset() if self.cleared else self.added,
            host_bytes=self.host_bytes,
            released_bytes=self.kept_bytes * self.released,
            cleared_bytes=cleared_bytes,
            tangents_stay=self.tangents_stay,
        )

    def described(self, base: ContextBytes, joint: JointGraph) -> tuple[tuple[str, int], ...]:
        """What is found and its bytes, for people; arguments are those of :meth:`around`.

        What steps were measured to take is left out where it is no more than was assumed.
        """
        seen = NO_CORRECTION if self.region else self.correction
        loss_point = seen.turn_bytes if seen.turn_bytes > base.turn_bytes else 0
        left = seen.left_bytes if seen.left_bytes > base.tangent_bytes else 0
        named: Iterable[tuple[str, int]] = (
            ("gradients that exist", sum(self.gradient_bytes(joint))),
            ("earlier steps that wait for their backward", self.waiting_bytes),
            ("outputs of earlier steps that are still held", self.kept_bytes),
            ("state of optimizers beyond what optimizer= says", max(0, self.state_bytes)),
            ("other networks of this process, and copies", self.networks_bytes),
            ("further steps in flight", self.others_bytes),
            ("gradients of DTensors that exist", self.spread_bytes),
            ("buckets of DistributedDataParallel", sum(self.bucket_bytes)),
            ("workspaces of libraries for another thread or stream", self.workspace_bytes),
            ("blocks that are larger than what lies in them", self.slack_bytes),
            ("larger buffers around the inputs", self.buffer_bytes),
            ("what the loss was measured to take", loss_point),
            ("further steps", seen.room_bytes),
            ("what of that was measured to be held in the backward", left),
            ("what steps were measured to take beyond their plan", seen.more_bytes),
        )
        return tuple((what, nbytes) for what, nbytes in named if nbytes)
