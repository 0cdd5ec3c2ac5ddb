"""Measurements of a graph, and the conditions that a plan holds for, as plain data.

Operations are identified by their index among the nodes of the joint graph, storages by their index
in its table. Both are the same for the same graph in any process.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from fxremat.ir.link import MeasuredLink


@dataclass(frozen=True, slots=True)
class Form:
    """How the operations of a step are computed; by default as they were traced.

    Attributes:
        exact: outputs and gradients have the same bits as in the trace.
        parts_bytes: values of more bytes are computed in parts where possible; 0: no value is.
        shared: equal operations of the forward are merged into one, whose result lives from its
            first reader to its last; else only those are merged whose result takes next to no
            memory.
        peak: names of operations whose values are computed in parts too, because they are part of
            the peak of the least-memory plan without that.
        peak_bytes: bytes that a part that computes such values may hold.
        early_gradients: gradients of losses in parts are computed together with the losses,
            assuming that the gradient of the loss is that of the step before. Where it differs,
            exact gradients are computed afterwards.
        inner_bytes: values of more bytes are computed in parts too, except those that are all that
            is held of forward or backward at some place, such as a residual stream; 0: they are
            not.
    """

    exact: bool = True
    parts_bytes: int = 0
    early_gradients: bool = False
    shared: bool = True
    peak: tuple[str, ...] = ()
    peak_bytes: int = 0
    inner_bytes: int = 0

    @property
    def has_parts(self) -> bool:
        """Whether any value is computed in parts."""
        return self.parts_bytes > 0 or bool(self.peak) or self.inner_bytes > 0

    @property
    def keeps_bits(self) -> bool:
        """Whether values are computed in parts that must have the same bits as in the trace.

        Whether an operation in parts keeps its bits has to be checked at each size.
        """
        return self.exact and self.has_parts


TRACED = Form()
"""All operations as they were traced."""


Request = tuple[int, int]
"""A request to the device's allocator: a key, and bytes to allocate under that key, or, if
negative, to free. Keys below 0 belong to workspaces."""


@dataclass(frozen=True, slots=True)
class StageSeconds:
    """Measured seconds of one stage, including those of its call in emitted code.

    Attributes:
        forward_s: seconds of the first forward.
        rebuild_s: seconds of rebuilding the saved set.
        backward_s: seconds of the backward.
    """

    forward_s: float
    rebuild_s: float
    backward_s: float


@dataclass(frozen=True, slots=True)
class RecordedCosts:
    """All measurements that planning a graph needs. The same costs give the same plan.

    Attributes:
        stages: seconds of each stage.
        again_s: pairs of an operation that a recomputation may run, and its seconds when it runs by
            itself.
        workspace_bytes: triples of an operation, how it runs, and its peak in bytes beyond
            arguments and results.
        storage_bytes: actual size of each storage.
        displaced: storages with tensors whose strides differ from the trace.
        link: link to host memory, where storages may be offloaded.
        asked: triples of an operation, how it runs, and its requests to the allocator, where the
            allocator rounds. Only operations are listed that request more than their results, or
            request these in another order than they return them. The request ``(place, 0)`` is that
            of a result.
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
        """Return the maxima of the measurements that several processes made of the same graph.

        ``displaced`` is the union; ``link`` and ``asked`` are those of the first.
        """
        first = costs[0]
        again_s: dict[int, float] = {}
        workspace_bytes: dict[tuple[int, str], int] = {}
        for each in costs:
            for i, seconds in each.again_s:
                again_s[i] = max(again_s.get(i, 0.0), seconds)
            for i, mode, nbytes in each.workspace_bytes:
                workspace_bytes[i, mode] = max(workspace_bytes.get((i, mode), 0), nbytes)
        return replace(
            first,
            stages=tuple(map(_slowest, *(each.stages for each in costs))),
            again_s=tuple(again_s.items()),
            workspace_bytes=tuple((*of, nbytes) for of, nbytes in workspace_bytes.items()),
            storage_bytes=tuple(map(max, *(each.storage_bytes for each in costs))),
            displaced=tuple(sorted(set().union(*(each.displaced for each in costs)))),
        )


def _slowest(*stages: StageSeconds) -> StageSeconds:
    return StageSeconds(
        max(stage.forward_s for stage in stages),
        max(stage.rebuild_s for stage in stages),
        max(stage.backward_s for stage in stages),
    )


Facts = tuple[tuple[str, str], ...]
"""Pairs of a name and a value, as text."""


@dataclass(frozen=True, slots=True)
class Origin:
    """The conditions that a plan holds for: a step, its environment, and what was requested.

    Attributes:
        operations: digest of the traced operations and the edges between them.
        code: digest of the whole trace, including sizes, dtypes, strides, constants and names.
        inputs: dtype and shape of each parameter, buffer and argument.
        device: name of the device.
        versions: versions of packages.
        settings: settings that affect the choice of kernels, and the number of threads.
        options: options of ``compile``.
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
