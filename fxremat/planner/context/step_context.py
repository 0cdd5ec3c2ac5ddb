"""The context of a step: existing gradients, steps in flight, a wrapper's buckets, corrections."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

from fxremat.passes.joint.sizes import Values
from fxremat.planner.context.context_bytes import ContextBytes


@dataclass(frozen=True, slots=True)
class Correction:
    """Bytes that earlier steps in a similar context were measured to need beyond their plan.

    Attributes:
        loss_point_bytes: bytes at the loss point, for instance of a loss outside the model, or of
            what runs between forward and backward of a region.
        room_bytes: further bytes at the loss point, for other steps.
        left_bytes: bytes held from the loss point to the end, including gradients of the outputs.
            Negative for a region that has fewer bytes allocated in its backward than in its
            forward.
        more_bytes: bytes held throughout. Negative for a region that is given storages which are
            counted as held by an earlier region.
        observed: ``loss_point_bytes`` and ``left_bytes`` were measured, and replace what was
            assumed of the loss, whether they are more or less than that.
    """

    loss_point_bytes: int = 0
    room_bytes: int = 0
    left_bytes: int = 0
    more_bytes: int = 0
    observed: bool = False

    def times(self, factor: float) -> Correction:
        """Return a correction with all bytes multiplied by ``factor``, for other output sizes."""
        return Correction(
            math.ceil(factor * self.loss_point_bytes),
            math.ceil(factor * self.room_bytes),
            math.ceil(factor * self.left_bytes),
            math.ceil(factor * self.more_bytes),
            self.observed,
        )

    def __or__(self, other: Correction) -> Correction:
        """Return the field-wise maximum of two corrections."""
        return Correction(
            max(self.loss_point_bytes, other.loss_point_bytes),
            max(self.room_bytes, other.room_bytes),
            max(self.left_bytes, other.left_bytes),
            max(self.more_bytes, other.more_bytes),
            self.observed or other.observed,
        )


NO_CORRECTION = Correction()


@dataclass(frozen=True, slots=True)
class StepContext:
    """The memory in use when a planned graph is called, and how the training loop uses the step.

    Attributes:
        sizes: the value of each symbol of the graph.
        existing: indices of the primals that have a gradient.
        added: those of them whose new gradient is added to the existing one as soon as it is
            computed.
        hosted: indices of the primals whose gradient is moved to host memory as soon as it is
            computed. An existing one is in host memory, too.
        taken: primals without a gradient whose new one is taken away as soon as it is computed, by
            a post-accumulate hook.
        waiting: number of earlier steps whose backward has not run.
        waiting_bytes: bytes that these steps hold.
        kept_bytes: bytes of outputs of earlier steps that the caller still holds.
        state_bytes: bytes of optimizer state beyond what ``optimizer=`` declares; negative if there
            are fewer.
        step_bytes: bytes that a step of an optimizer has on the device, at least, if a part of its
            state or of the gradients is in host memory.
        networks_bytes: bytes held by other compiled networks of this process.
        bucket_bytes: size of each gradient buffer of a wrapper.
        workspace_bytes: bytes of library workspaces for threads and streams that ran no step before
            the capture.
        slack_bytes: bytes by which the blocks of existing tensors are larger than these tensors.
        wrapped_bytes: bytes of existing gradients of tensors of wrapper subclasses, such as
            distributed ones.
        buffer_bytes: bytes by which the storages of inputs exceed the planned ones: an input that
            is a view of a larger buffer holds all of it.
        hook_bytes: the most bytes that an optimizer allocates and frees which steps in a hook, in
            the backward.
        others_bytes: bytes of the budget that are reserved for further steps in flight.
        correction: what earlier steps needed beyond their plan.
        cleared: the existing gradients are released before the backward begins, as in torch's
            tutorials.
        released: the outputs that are still held are released before the loss is computed, for
            instance because a variable of the loop is assigned again.
        scaled: the gradient of the loss differs from step to step. Exact gradients that are
            computed together with the loss would be computed again in the backward.
        tangents_stay: the caller holds gradients of the outputs until the backward ends, or two of
            them share their memory.
        region: the call is one of several graphs of a step; ``correction`` covers what the others
            need.
        host_bytes: available bytes of host memory; ``None``: no limit.
    """

    sizes: Values = ()
    existing: frozenset[int] = frozenset()
    added: frozenset[int] = frozenset()
    hosted: frozenset[int] = frozenset()
    taken: frozenset[int] = frozenset()
    waiting: int = 0
    waiting_bytes: int = 0
    kept_bytes: int = 0
    state_bytes: int = 0
    step_bytes: int = 0
    networks_bytes: int = 0
    bucket_bytes: tuple[int, ...] = ()
    workspace_bytes: int = 0
    slack_bytes: int = 0
    wrapped_bytes: int = 0
    buffer_bytes: int = 0
    hook_bytes: int = 0
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
        """Number of earlier steps whose backward has not run, and whether gradients exist.

        Contexts that are equal in both share their correction.
        """
        return self.waiting, bool(self.existing)

    def loss_point_bytes(self, base: ContextBytes) -> int:
        """Return the bytes that the loss of this step needs between forward and backward.

        Measured bytes replace those that ``base`` assumes. For one of several graphs of a step the
        result is 0: :attr:`correction` covers the loss.
        """
        if self.region:
            return 0  # ``correction`` covers the loss of a step of several regions
        if self.correction.observed:
            return self.correction.loss_point_bytes
        return max(base.loss_point_bytes, self.correction.loss_point_bytes)

    @property
    def others_there_bytes(self) -> int:
        """Bytes that earlier steps, optimizers, other networks and distributed gradients hold."""
        return (
            self.waiting_bytes
            + self.kept_bytes
            + self.state_bytes
            + self.networks_bytes
            + self.wrapped_bytes
        )

    def around(self, base: ContextBytes) -> ContextBytes:
        """Return a copy of ``base`` with the memory added that this call needs.

        ``base`` is the memory that every call at these sizes needs.
        """
        each = base.gradient_each_bytes
        gradients = tuple(each[i] for i in sorted(self.existing - self.hosted))
        # An existing gradient in host memory is on the device while the new one is added to it.
        fetched = (each[i] for i in self.existing & self.hosted & self.added)
        more = (
            *gradients,
            *filter(None, (max(fetched, default=0),)),
            *self.bucket_bytes,
            *filter(None, (self.workspace_bytes,)),
        )
        given_bytes = (
            base.given_bytes
            + sum(more)
            + self.slack_bytes
            + self.buffer_bytes
            + self.hook_bytes
            + self.others_there_bytes
            + self.others_bytes
            + self.correction.more_bytes
        )
        held_bytes = self.correction.left_bytes
        if not (self.region or self.correction.observed):
            held_bytes = max(held_bytes, base.tangent_bytes)
        cleared = gradients if self.cleared else ()
        loss_point_bytes = (
            self.correction.loss_point_bytes if self.region else self.loss_point_bytes(base)
        )
        return replace(
            base,
            given_bytes=given_bytes,
            loss_point_bytes=loss_point_bytes + self.correction.room_bytes,
            tangent_bytes=held_bytes - sum(cleared),
            given_each_bytes=(*base.given_each_bytes, *more),
            added=(frozenset() if self.cleared else self.added) | self.hosted | self.taken,
            host_bytes=self.host_bytes,
            end_bytes=max(base.end_bytes, self.step_bytes),
            end_is_step=self.step_bytes > base.end_bytes,
            released_bytes=self.kept_bytes * self.released,
            cleared_each_bytes=cleared,
            tangents_stay=self.tangents_stay,
        )

    def described(self, base: ContextBytes) -> tuple[tuple[str, int], ...]:
        """Return ``(description, bytes)`` of each kind of memory that this call adds to ``base``.

        This is for reports. Measured bytes of the loss are left out if they are no more than was
        assumed. For ``base`` see :meth:`around`.
        """
        measured = NO_CORRECTION if self.region else self.correction
        loss_point = (
            measured.loss_point_bytes if measured.loss_point_bytes > base.loss_point_bytes else 0
        )
        left = measured.left_bytes if measured.left_bytes > base.tangent_bytes else 0
        named: Iterable[tuple[str, int]] = (
            (
                "gradients that exist",
                sum(base.gradient_each_bytes[i] for i in self.existing - self.hosted),
            ),
            ("earlier steps that wait for their backward", self.waiting_bytes),
            ("outputs of earlier steps that are still held", self.kept_bytes),
            ("state of optimizers beyond what optimizer= says", max(0, self.state_bytes)),
            ("other networks of this process, and copies", self.networks_bytes),
            ("further steps in flight", self.others_bytes),
            ("gradients of DTensors and other wrappers that exist", self.wrapped_bytes),
            ("buckets of DistributedDataParallel", sum(self.bucket_bytes)),
            ("workspaces of libraries for another thread or stream", self.workspace_bytes),
            ("blocks that are larger than what lies in them", self.slack_bytes),
            ("larger buffers around the inputs", self.buffer_bytes),
            ("what optimizers allocate that step in the backward", self.hook_bytes),
            ("what the loss was measured to take", loss_point),
            ("further steps", measured.room_bytes),
            ("what of that was measured to be held in the backward", left),
            ("what steps were measured to take beyond their plan", measured.more_bytes),
        )
        return tuple((what, nbytes) for what, nbytes in named if nbytes)
