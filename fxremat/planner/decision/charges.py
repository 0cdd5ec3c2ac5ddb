"""What a plan charges for running part of a stage's forward again.

A forward is measured as a whole, and so is a rebuild, which leaves out what only later stages read.
Each is distributed over its operations in proportion to their times when run by themselves, so the
parts add up to the measurement.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from torch import fx

from fxremat.costs.measured.cost import Measured
from fxremat.errors import FAULT, CostError
from fxremat.passes.joint.graph import is_getitem
from fxremat.passes.stages.block import Mode, dependencies


@dataclass(frozen=True, slots=True)
class Charges:
    """Seconds that a plan charges for each operation of one stage that runs again.

    Attributes:
        rebuilt: operations that compute the saved set again, which is what the backward reads.
        views: views of given tensors, which every block creates for itself. Their time is part of
            the times of other operations.
        alone_s: seconds of each operation that may run again, measured by itself.
        of_forward: seconds charged per second of ``alone_s`` where a forward runs again.
        of_rebuild: seconds charged per second of ``alone_s`` where the saved set is rebuilt.
    """

    rebuilt: frozenset[fx.Node]
    views: frozenset[fx.Node]
    alone_s: dict[fx.Node, float]
    of_forward: float
    of_rebuild: float

    @staticmethod
    def of(measured: Measured, index: int) -> Charges:
        """Return the charges for rerunning operations of stage ``index``, as it was measured."""
        line = measured.line
        rebuilt = set(line.stages[index].saved)
        for node in reversed(line.stages[index].forward):
            if node in rebuilt and node not in line.pinned:
                rebuilt.update(dependencies(node, Mode.AGAIN))
        return Charges(frozenset(rebuilt), line.views, {}, 0.0, 0.0).at(measured, index)

    def at(self, measured: Measured, index: int) -> Charges:
        """Return a copy of the charges with the seconds that ``measured`` has for this stage.

        ``index`` is the number of the stage.
        """
        seconds, again_s = measured.stages[index], measured.again_s
        alone_s = {n: again_s[n] for n in measured.line.stages[index].forward if n in again_s}
        rebuilt_s = (s for n, s in alone_s.items() if n in self.rebuilt)
        return replace(
            self,
            alone_s=alone_s,
            of_forward=_share(seconds.forward_s, alone_s.values()),
            of_rebuild=_share(seconds.rebuild_s, rebuilt_s),
        )

    def once_s(self, node: fx.Node, *, rebuilds: bool) -> float:
        """Return the seconds that are charged each time ``node`` is recomputed.

        Args:
            node: the operation.
            rebuilds: whether it is recomputed to rebuild the stage's saved set, right before the
                backward; else its forward runs again.

        Raises:
            CostError: the operation was never timed, since no recomputation should need it.
        """
        if is_getitem(node) or node in self.views:
            return 0.0
        if node not in self.alone_s:
            raise CostError(
                f"{node.name} ({node.target}) is run again by a schedule but was never timed; "
                "please report this model",
                code=FAULT,
            )
        return (self.of_rebuild if rebuilds else self.of_forward) * self.alone_s[node]

    def least_s(self, node: fx.Node) -> float:
        """Return the least seconds charged when ``node`` is recomputed; 0 if it never is."""
        share = self.of_forward
        if node in self.rebuilt:
            share = min(share, self.of_rebuild)
        return share * self.alone_s.get(node, 0.0)


def _share(whole_s: float, parts_s: Iterable[float]) -> float:
    total = sum(parts_s)
    return whole_s / total if total else 0.0
