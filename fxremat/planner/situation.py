"""What a call of a captured step finds: gradients that exist, other steps, a wrapper's buckets."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch

from fxremat.passes.joint.graph import JointGraph
from fxremat.passes.joint.storage import allocated_bytes
from fxremat.planner.surroundings import Surroundings


@dataclass(frozen=True, slots=True)
class Situation:
    """What is true at a call, beside what is true at every call of the graph.

    Attributes:
        existing: primals that have a gradient.
        added: those of them to whose gradient the new one is added as soon as it is made.
        waiting: how many earlier steps wait for their backward.
        waiting_bytes: what these hold.
        bucket_bytes: of each buffer of a wrapper for gradients.
    """

    existing: frozenset[int] = frozenset()
    added: frozenset[int] = frozenset()
    waiting: int = 0
    waiting_bytes: int = 0
    bucket_bytes: tuple[int, ...] = ()

    def gradient_bytes(self, joint: JointGraph) -> tuple[int, ...]:
        """Of each gradient that exists."""
        values = (joint.primals[i].meta["val"] for i in sorted(self.existing))
        return tuple(
            allocated_bytes(v.numel() * v.element_size(), v.device)
            for v in values
            if isinstance(v, torch.Tensor)
        )

    def around(self, base: Surroundings, joint: JointGraph) -> Surroundings:
        """The surroundings of the call.

        Args:
            base: those of every call.
            joint: the captured graph.
        """
        more = (*self.gradient_bytes(joint), *self.bucket_bytes)
        return replace(
            base,
            given_bytes=base.given_bytes + sum(more) + self.waiting_bytes,
            given_each_bytes=(*base.given_each_bytes, *more),
            added=self.added,
        )

    def described(self, joint: JointGraph) -> tuple[tuple[str, int], ...]:
        """What is found and its bytes, for people."""
        named: Iterable[tuple[str, int]] = (
            ("gradients that exist", sum(self.gradient_bytes(joint))),
            (f"{self.waiting} steps that wait for their backward", self.waiting_bytes),
            ("buckets of DistributedDataParallel", sum(self.bucket_bytes)),
        )
        return tuple((what, nbytes) for what, nbytes in named if nbytes)
