"""What a graph may leave for its backward: plans among which a step of several calls chooses."""

from __future__ import annotations

from dataclasses import replace

from fxremat.frontend.pipeline import Planner
from fxremat.frontend.ways import Way
from fxremat.planner.situation import Beside, Situation
from fxremat.planner.transfers import Sent
from fxremat.solvers.knapsack import Choice

SHARES = (1.0, 0.5, 0.25, 0.125, 0.0)
"""Of all that a region ever allocates: so much else is at the turn where plans are looked for."""


def least_beside(planner: Planner, situation: Situation, host_bytes: int | None = None) -> Beside:
    """Beside a call that is to leave least, whatever else that takes.

    Args:
        planner: of its graph.
        situation: what it finds.
        host_bytes: of host memory, left for it; ``None``: as much as it takes.
    """
    table = planner.step.at(situation.sizes)[0].measured.line.joint.storages
    return Beside(0, sum(table.nbytes), 0, host_bytes)


def choices_of(planner: Planner, situation: Situation) -> tuple[Choice, ...]:
    """Plans of a graph that no other beats in all of bytes held, both peaks, seconds and, where
    that is limited, host memory.

    What travels in them is known to the planner from then on. The last one keeps everything.
    """
    whole_bytes = least_beside(planner, situation).turn_bytes
    found: dict[Choice, tuple[int, Sent]] = {}
    for share in SHARES:
        beside = Beside(0, int(share * whole_bytes), 0)
        ways = planner.schedules.searched(replace(situation, waiting_bytes=0, beside=beside))
        for graph, way in enumerate(ways):
            for sent in way.graded():
                found.setdefault(_choice(way, sent), (graph, sent))
        kept = _choice(ways[0], ways[0].kept)
    found.pop(kept, None)
    best = [choice for choice in found if not any(_beats(other, choice) for other in found)]
    planner.schedules.sent[situation.sizes] = tuple(
        tuple(sent for graph, sent in map(found.__getitem__, best) if graph == place and sent.moves)
        for place in range(len(ways))
    )
    return (*best, kept)


def _choice(way: Way, sent: Sent) -> Choice:
    evaluation, around = sent.evaluation, way.search.setting.surroundings
    turn, peaks_bytes = evaluation.turn, evaluation.peaks_bytes
    return Choice(
        evaluation.turn_bytes - around.given_bytes - around.turn_bytes,
        max(peaks_bytes[:turn]) - around.given_bytes,
        max((*peaks_bytes[turn:], evaluation.end_bytes)) - around.given_bytes,
        sent.total_s,
        sent.host_bytes if way.host_limited else 0,
    )


def _beats(one: Choice, other: Choice) -> bool:
    return one != other and (
        one.held_bytes <= other.held_bytes
        and one.forward_bytes <= other.forward_bytes
        and one.backward_bytes <= other.backward_bytes
        and one.seconds <= other.seconds
        and one.host_bytes <= other.host_bytes
    )
