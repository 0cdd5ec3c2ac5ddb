"""What it takes processes to agree on a plan, up to a thousand of them: a simulation.

As in compiling, all agree on what a step costs and follow the first one's plan, through the store
by which the processes of a group find each other. One process plays all of them, one after the
other: each sends what it has to, then the first one reads and tells, then another one reads that.
Run: python -m benchmarks.ranks [--most 1000] [--stages 200]
"""

from __future__ import annotations

import argparse
import contextlib
from time import perf_counter
from typing import Any

from torch import distributed

from benchmarks.common import save, show
from fxremat.ir import Origin, RecordedCosts, StageSeconds
from fxremat.planner.context.context_bytes import ContextBytes
from fxremat.ranks.combine import agreed_costs
from fxremat.ranks.peers import Peers
from fxremat.torch_compat import SharedStore

COUNTS = (2, 8, 32, 128, 512, 1000)

OPERATIONS = 10
"""Of a stage."""


class _SentError(Exception):
    """A process has sent what it has to, and would wait now."""


class _Counted(SharedStore):
    """A store that counts what a process sends and asks for.

    Args:
        base: the store of all.
        sends, waits: this process does so now.
    """

    def __init__(self, base: distributed.Store, *, sends: bool = True, waits: bool = True) -> None:
        super().__init__("ranks", base)
        self._sends, self._waits = sends, waits
        self.messages, self.nbytes = 0, 0

    def put(self, name: str, data: bytes) -> None:
        self._count(data)
        if self._sends:
            super().put(name, data)

    def get(self, name: str, timeout_s: float) -> bytes | None:
        if not self._waits:
            raise _SentError
        data = super().get(name, timeout_s)
        self._count(data or b"")
        return data

    def _count(self, data: bytes) -> None:
        self.messages += 1
        self.nbytes += len(data)


def recorded(stages: int, rank: int) -> RecordedCosts:
    """Costs of so many stages, measured a little differently by each process."""

    def seconds(place: int) -> float:
        return 1e-5 * (1 + (7919 * place + 104729 * rank) % 1000 / 1e4)

    operations = range(OPERATIONS * stages)
    return RecordedCosts(
        tuple(StageSeconds(*(seconds(3 * i + k) for k in range(3))) for i in range(stages)),
        tuple((i, seconds(i)) for i in operations),
        tuple((i, "first", 4096 * (i % 5)) for i in operations),
        tuple(1024 * (1 + i % 64) for i in operations),
        (),
    )


def simulate(count: int, stages: int) -> dict[str, Any]:
    """What ``count`` processes take: seconds of the first one and of another, messages, bytes."""
    server = distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    origin = Origin("o" * 64, "c" * 64, ("float32[8, 512, 1024]",) * stages, "", (), (), (), ())
    plan = "x" * 1000 * stages  # as large as that of a GPT, roughly

    def compiling(rank: int, store: _Counted) -> float:
        peers, costs = Peers(range(count), rank, store, timeout_s=60.0), recorded(stages, rank)
        began = perf_counter()
        with contextlib.suppress(_SentError):
            agreed_costs(peers, origin, "d" * 64, costs, ContextBytes(rank, 0, 0))
            peers.follow("a plan", str, lambda: plan)
        return perf_counter() - began

    for rank in range(1, count):
        compiling(rank, _Counted(server, waits=False))
    leading, following = _Counted(server), _Counted(server, sends=False)
    first_s, other_s = compiling(0, leading), compiling(1, following)
    return {
        "processes": count,
        "first": {"s": first_s, "messages": leading.messages, "bytes": leading.nbytes},
        "other": {"s": other_s, "messages": following.messages, "bytes": following.nbytes},
    }


def main() -> None:
    """Simulate all counts."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--most", type=int, default=COUNTS[-1])
    parser.add_argument("--stages", type=int, default=200)
    asked = parser.parse_args()
    found = [simulate(n, asked.stages) for n in COUNTS if n <= asked.most]
    save("ranks", {"stages": asked.stages, "counts": found}, quiet=True)
    rows = [
        [
            str(own["processes"]),
            f"{own['first']['s']:.3f}",
            str(own["first"]["messages"]),
            f"{own['other']['s']:.3f}",
            str(own["other"]["messages"]),
            f"{own['other']['bytes'] / 1024:.0f}",
        ]
        for own in found
    ]
    show(
        f"agreeing on a plan of {asked.stages} stages: work of one process",
        ["processes", "first, s", "messages", "other, s", "messages", "KiB"],
        rows,
    )


if __name__ == "__main__":
    main()
