"""What it takes processes to agree on a plan, up to a thousand of them: a simulation.

Threads stand for processes, each with a connection of its own to the store through which the
processes of a group find each other. As in compiling they agree on what a step costs, and follow
the first one's plan. Threads of one interpreter wait for each other, so all of them together take
longer than processes would: what counts is the work of the first one, and that of any other.
Run: python -m benchmarks.ranks [--most 1000] [--stages 200]
"""

from __future__ import annotations

import argparse
import threading
from concurrent.futures import ThreadPoolExecutor
from time import perf_counter, thread_time
from typing import Any

from torch import distributed

from benchmarks.common import save, show
from fxremat.frontend.agreed import agreed_costs
from fxremat.frontend.ranks import Peers
from fxremat.ir import Origin, RecordedCosts, StageSeconds
from fxremat.planner.surroundings import Surroundings
from fxremat.torch_compat import SharedStore

COUNTS = (2, 8, 32, 128, 512, 1000)

OPERATIONS = 10
"""Of a stage."""


class _Counted(SharedStore):
    """A store that counts what a process sends and asks for."""

    def __init__(self, base: distributed.Store) -> None:
        super().__init__("ranks", base)
        self.messages, self.nbytes = 0, 0

    def put(self, name: str, data: bytes) -> None:
        self._count(data)
        super().put(name, data)

    def get(self, name: str, timeout_s: float) -> bytes | None:
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
    """What ``count`` processes take, in seconds of their own work, messages and bytes."""
    server = distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    origin = Origin("o" * 64, "c" * 64, ("float32[8, 512, 1024]",) * stages, "", (), (), (), ())
    costs = [recorded(stages, rank) for rank in range(count)]
    plan = "x" * 1000 * stages  # as large as that of a GPT, roughly
    begin = threading.Barrier(count)

    def one(rank: int) -> tuple[float, int, int]:
        store = _Counted(distributed.TCPStore("127.0.0.1", server.port, is_master=False))
        peers = Peers(range(count), rank, store, timeout_s=600.0)
        begin.wait()
        began = thread_time()
        agreed_costs(peers, origin, costs[rank], Surroundings(rank, 0, 0))
        peers.follow("a plan", str, lambda: plan)
        return thread_time() - began, store.messages, store.nbytes

    began = perf_counter()
    with ThreadPoolExecutor(count) as threads:
        first, *others = threads.map(one, range(count))
    own, messages, nbytes = map(max, *others) if len(others) > 1 else others[0]
    return {
        "processes": count,
        "all_s": perf_counter() - began,
        "first": {"s": first[0], "messages": first[1], "bytes": first[2]},
        "others": {"s": own, "messages": messages, "bytes": nbytes},
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
            f"{own['others']['s']:.3f}",
            str(own["others"]["messages"]),
            f"{own['others']['bytes'] / 1024:.0f}",
            f"{own['all_s']:.1f}",
        ]
        for own in found
    ]
    show(
        f"agreeing on a plan of {asked.stages} stages: work of one process",
        ["processes", "first, s", "messages", "other, s", "messages", "KiB", "all threads, s"],
        rows,
    )


if __name__ == "__main__":
    main()
