"""A line as arrays of numbers, for the compiled loops that evaluate decisions."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import fx

from fxremat.costs.measured.cost import Measured
from fxremat.errors import FAULT, CostError, ScheduleError
from fxremat.ir.schedule import Codes
from fxremat.passes.joint.graph import is_getitem
from fxremat.passes.stages.block import Mode
from fxremat.passes.stages.linearize import Line
from fxremat.planner.decision.save_options import Options
from fxremat.planner.replay.places import (
    MODES,
    ROOM,
    UNKNOWN,
    At,
    Flags,
    Floats,
    Ints,
)

MOST_ROOM = 1 << 27
"""Entries that the array of integers may grow to."""


@dataclass(frozen=True, slots=True, eq=False)
class SizedNumbers:
    """Bytes and seconds of a step at one size of its inputs; for shapes see :class:`At`."""

    nbytes: Ints
    workspace: Ints
    forward_s: Floats
    backward_s: Floats
    once_s: Floats

    @staticmethod
    def of(measured: Measured, options: Options, number: Mapping[fx.Node, int]) -> SizedNumbers:
        """Return the bytes and seconds in ``measured``, in arrays by the ``number`` of a node."""
        return SizedNumbers(
            np.array(measured.line.joint.storages.nbytes, dtype=np.int64),
            _workspace(measured, number),
            np.array([s.forward_s for s in measured.stages]),
            np.array([s.backward_s for s in measured.stages]),
            _once_s(measured.line, options, tuple(number)),
        )

    @staticmethod
    def nothing(line: Line, number: Mapping[fx.Node, int]) -> SizedNumbers:
        """Return the storage sizes of ``line``, with zeros for workspaces and seconds.

        They suffice to derive the calls of a schedule.
        """
        stages = np.zeros(len(line.stages))
        return SizedNumbers(
            np.array(line.joint.storages.nbytes, dtype=np.int64),
            np.zeros((3, len(number)), dtype=np.int64),
            stages,
            stages,
            np.zeros((2, len(number))),
        )


@dataclass(slots=True)
class LineArrays:
    """The stages of a step as two arrays of numbers, which compiled loops read and write.

    The arrays include working memory, so they are not thread-safe.

    Attributes:
        data: all integers.
        seconds: all times.
        at: the places in ``data`` or ``seconds`` where each kind of number begins.
        number: the number of each node.
        nodes: the nodes by number.
        storages: storages of the value of each forward node.
        numbers: the sized numbers that ``data`` and ``seconds`` hold now.
        context_key: identifies the context bytes that ``data`` holds now.
    """

    data: Ints
    seconds: Floats
    at: At
    number: dict[fx.Node, int]
    nodes: tuple[fx.Node, ...]
    storages: tuple[tuple[int, ...], ...]
    numbers: SizedNumbers
    context_key: object = None

    def load(self, numbers: SizedNumbers) -> None:
        """Replace the bytes and seconds in the arrays by ``numbers``, and update cached blocks."""
        from fxremat.planner.replay.extract import resize  # noqa: PLC0415

        if numbers is self.numbers:
            return
        self.numbers = numbers
        for place, integers in (
            (self.at.nbytes, numbers.nbytes),
            (self.at.workspace, numbers.workspace.ravel()),
        ):
            self.data[place : place + integers.size] = integers
        for place, seconds in (
            (self.at.forward_s, numbers.forward_s),
            (self.at.backward_s, numbers.backward_s),
            (self.at.once_s, numbers.once_s.ravel()),
        ):
            self.seconds[place : place + seconds.size] = seconds
        resize(self.data, self.seconds, self.at)

    def set_context(
        self,
        key: object,
        nbytes: Sequence[int],
        handed: Iterable[fx.Node],
        released: Mapping[int, bool],
    ) -> None:
        """Write the memory that is held outside the step's graphs to the arrays.

        Args:
            key: identifies this memory, and is stored as ``context_key``.
            nbytes: bytes held throughout the step, needed at the loss point, held in the backward,
                and needed at the end.
            handed: gradients whose memory is released as soon as they are computed.
            released: storages of tangents, and whether their last reader releases them.
        """
        data, at = self.data, self.at
        data[at.context : at.context + len(nbytes)] = nbytes
        data[at.handed : at.handed + at.nodes] = 0
        data[[at.handed + self.number[node] for node in handed]] = 1
        for storage, is_released in released.items():
            data[at.never_freed + storage] = not is_released
        self.context_key = key

    def flags(self, held: bytes) -> Flags:
        """Unpack ``held``, one bit for each node, to an array; an empty ``held`` sets none."""
        if not held:
            return np.zeros(self.at.nodes, dtype=np.uint8)
        return np.unpackbits(np.frombuffer(held, dtype=np.uint8), count=self.at.nodes)

    def evaluate(self, codes: Codes, held: Flags) -> tuple[Ints, Floats, float]:
        """Evaluate a schedule that holds the values of the nodes flagged in ``held``.

        Returns:
            An array with a column for each call (for its rows see ``replay.OP``), the seconds of
            each call, and the seconds of the step.
        """
        # Loading numba takes longer than all else in the package: not at import.
        from fxremat.planner.replay.replay import ROWS, evaluate  # noqa: PLC0415

        calls, call_s = np.zeros((ROWS, codes.size), dtype=np.int64), np.zeros(codes.size)
        total_s = self.run(evaluate, codes, held, calls, call_s)
        return calls, call_s, float(total_s)

    def run(self, kernel: Callable[..., Any], *args: object) -> Any:
        """Call ``kernel`` with the arrays and ``args``, and return its result.

        If its blocks do not fit into the arrays, these are enlarged, and it is called again.

        Raises:
            CostError: the kernel runs an operation that was never measured.
            ScheduleError: the kernel reads a value that no operation computes.
        """
        from fxremat.planner.replay.replay import TOO_LONG  # noqa: PLC0415

        result = kernel(self.data, self.seconds, self.at, *args)
        while self.totals()["ended"] == TOO_LONG and self.data.size < MOST_ROOM:
            arena = self.data.size - self.at.arena  # doubles the arena
            self.data = np.concatenate([self.data, np.zeros(arena, dtype=np.int64)])
            self.data[self.at.counts + ROOM] = self.data.size
            result = kernel(self.data, self.seconds, self.at, *args)
        self._raise_if_failed()
        return result

    def totals(self) -> dict[str, int]:
        """Return figures of the last evaluation by name, such as ``"peak_bytes"``."""
        names = (
            "calls",
            "loss_point",
            "peak_bytes",
            "loss_point_bytes",
            "end_bytes",
            "ended",
            "node",
        )
        total = self.at.total
        values = self.data[total : total + len(names)].tolist()
        return dict(zip(names, values, strict=True))

    def _raise_if_failed(self) -> None:
        from fxremat.planner.replay.replay import NEVER_COMPUTED, TOO_LONG, UNTIMED  # noqa: PLC0415

        totals = self.totals()
        if not totals["ended"]:
            return
        if totals["ended"] == TOO_LONG:
            raise ScheduleError(
                f"a schedule needs more than {MOST_ROOM} entries to be evaluated: it has too many "
                "operations",
                code="FXR631",
            )
        node = self.nodes[totals["node"]]
        if totals["ended"] == NEVER_COMPUTED:
            raise ScheduleError(
                f"{node.name} is read but no operation computes it: its forward must come first",
                code="FXR631",
            )
        what = "timed" if totals["ended"] == UNTIMED else "measured in this way"
        raise CostError(
            f"{node.name} ({node.target}) is run by a schedule but was never {what}; "
            "please report this model",
            code=FAULT,
        )


def _workspace(measured: Measured, number: Mapping[fx.Node, int]) -> Ints:
    workspace = np.full((3, len(number)), UNKNOWN, dtype=np.int64)
    nodes = tuple(measured.line.joint.module.graph.nodes)
    for index, mode, nbytes in measured.costs.workspace_bytes:
        workspace[MODES[Mode(mode)], number[nodes[index]]] = nbytes
    return workspace


def _once_s(line: Line, options: Options, nodes: Sequence[fx.Node]) -> Floats:
    once_s = np.full((2, len(nodes)), float(UNKNOWN))
    for i, node in enumerate(nodes):
        if node in line.views or is_getitem(node):
            once_s[:, i] = 0.0
        elif node in line.stage_of:
            charges = options.parts[line.stage_of[node]].charges
            if node in charges.alone_s:
                once_s[0, i] = charges.once_s(node, rebuilds=False)
                once_s[1, i] = charges.once_s(node, rebuilds=True)
    return once_s
