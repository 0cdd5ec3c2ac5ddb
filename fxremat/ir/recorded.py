"""What was measured of a graph, and what a plan holds for, as plain data.

Operations are told by their index among the nodes of the joint graph, storages by their index
in its table: the same for the same graph in any process.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from fxremat.ir.link import MeasuredLink


@dataclass(frozen=True, slots=True)
class Form:
    """How the operations of a step are computed; by default as they were traced.

    Attributes:
        exact: outputs and gradients have the bits that they have as traced.
        parts_bytes: values that take more are computed in parts, where that can be; 0: none is.
        shared: equal operations of the forward are one, whose result lives from the first reader to
            the last; else only where that takes next to no memory.
        peak: names of operations whose values are computed in parts, too, as they take part in the
            peak of the plan of least memory without that.
        peak_bytes: what a part that computes such values may hold.
        beside: gradients of losses in parts are computed with them, as if the loss's own were that
            of the step before; where it is another, exact ones are computed once more.
    """

    exact: bool = True
    parts_bytes: int = 0
    beside: bool = False
    shared: bool = True
    peak: tuple[str, ...] = ()
    peak_bytes: int = 0

    @property
    def has_parts(self) -> bool:
        """Whether something is computed in parts."""
        return self.parts_bytes > 0 or bool(self.peak)

    @property
    def keeps_bits(self) -> bool:
        """Whether parts are to keep bits, which must be asked at each size."""
        return self.exact and self.has_parts


TRACED = Form()
"""As they were traced."""


Request = tuple[int, int]
"""What is asked of the device's allocator: a key, and bytes that it is to hand out under that
key, or, negative, to take back. Keys below 0 are of workspaces."""


@dataclass(frozen=True, slots=True)
class StageSeconds:
    """Measured seconds of one stage."""

    forward_s: float
    rebuild_s: float
    backward_s: float


@dataclass(frozen=True, slots=True)
class RecordedCosts:
    """All that planning a graph needs to be measured; the same costs give the same plan.

    Attributes:
        stages: seconds of each stage.
        again_s: operations that a recomputation may run, and seconds of each, alone.
        workspace_bytes: operations, how each runs, and its peak beyond arguments and results.
        storage_bytes: of each storage, as large as it really is.
        displaced: storages with tensors whose strides are not those of the trace.
        link: to host memory, where storages may travel.
        asked: operations that ask for more than their results, or for these in another order
            than they return them, where an allocator rounds; how each runs, and what it asks for:
            ``(place, 0)`` is a result.
    """

    stages: tuple[StageSeconds, ...]
    again_s: tuple[tuple[int, float], ...]
    workspace_bytes: tuple[tuple[int, str, int], ...]
    storage_bytes: tuple[int, ...]
    displaced: tuple[int, ...]
    link: MeasuredLink | None = None
    asked: tuple[tuple[int, str, tuple[Request, ...]], ...] = ()

    @staticmethod
    def slowest(costs: Sequence[RecordedCosts]) -> RecordedCosts:
        """The most of each that was measured of one graph in several processes."""
        first = costs[0]
        again_s: dict[int, float] = {}
        workspace_bytes: dict[tuple[int, str], int] = {}
        for own in costs:
            for i, seconds in own.again_s:
                again_s[i] = max(again_s.get(i, 0.0), seconds)
            for i, mode, nbytes in own.workspace_bytes:
                workspace_bytes[i, mode] = max(workspace_bytes.get((i, mode), 0), nbytes)
        return replace(
            first,
            stages=tuple(map(_slowest, *(own.stages for own in costs))),
            again_s=tuple(again_s.items()),
            workspace_bytes=tuple((*of, nbytes) for of, nbytes in workspace_bytes.items()),
            storage_bytes=tuple(map(max, *(own.storage_bytes for own in costs))),
            displaced=tuple(sorted(set().union(*(own.displaced for own in costs)))),
        )


def _slowest(*stages: StageSeconds) -> StageSeconds:
    return StageSeconds(
        max(stage.forward_s for stage in stages),
        max(stage.rebuild_s for stage in stages),
        max(stage.backward_s for stage in stages),
    )


Facts = tuple[tuple[str, str], ...]
"""Names and what they stand for, as text."""


@dataclass(frozen=True, slots=True)
class Origin:
    """What a plan holds for: a step, where it runs, and what was asked for.

    Attributes:
        operations: digest of the traced operations, and of who reads whom.
        code: digest of the whole trace: with sizes, dtypes, strides, constants and names.
        inputs: dtype and shape of each parameter, buffer and argument.
        device: its name.
        versions: of the packages.
        settings: what chooses kernels, and the number of threads.
        options: what ``compile`` was asked for.
        held: bytes that the caller of the step holds, and the rules of the allocator.
    """

    operations: str
    code: str
    inputs: tuple[str, ...]
    device: str
    versions: Facts
    settings: Facts
    options: Facts
    held: Facts
