"""What processes that run the same steps of several calls tell each other as one begins."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from fxremat.frontend.agreed import Seen, agreed_profiles, agreed_step
from fxremat.frontend.known import Called, Key, KnownStep, KnownSteps
from fxremat.frontend.pipeline import Planner
from fxremat.frontend.ranks import Peers
from fxremat.frontend.walk import Walk


class News:
    """What one process tells the others about steps, and hears of them.

    Args:
        peers: the processes; ``None``: this one has nobody to tell.

    Attributes:
        elsewhere_bytes: that the one that has most has more than this one when a step begins.
        learned: the step before has taught this one something that it has not told.
    """

    def __init__(self, peers: Peers | None) -> None:
        self.elsewhere_bytes = 0
        self.learned = False
        self._peers = peers
        self._numbers: dict[int, int] = {}

    def number(self, planner: Planner) -> None:
        """A graph is called, for the first time or again: all processes number graphs alike."""
        self._numbers.setdefault(id(planner), len(self._numbers))

    def of_any(self, known: KnownSteps, there_bytes: int) -> None:
        """Let all processes know of the step before what any of them has seen of it.

        Args:
            known: steps; what others have seen of the latest is taken over.
            there_bytes: what is there at the begin of this one.
        """
        if self._peers is None:
            return
        own, latest = Seen(there_bytes), known.latest
        if latest is not None:
            own = replace(own, calls=self._described(latest.keys), profiles=latest.rows)
        most = agreed_profiles(self._peers, own)
        self.elsewhere_bytes = most.base_bytes - there_bytes
        if latest is not None and most.profiles:
            latest.see(most.profiles)

    def of_all(
        self, known: KnownSteps, before: Walk, called: Called, there_bytes: int, *, fits: bool
    ) -> None:
        """As :meth:`of_any`, where all processes must go on alike and so know the same steps.

        Where none has news, each of them only says so.

        Args:
            known: steps; what others have seen of ``before`` is taken over.
            before: the step before.
            called: the first call of the step that begins.
            there_bytes: what is there at its begin.
            fits: plans that were chosen for steps that begin so leave room for that.

        Raises:
            RankError: other processes make other calls.
        """
        if self._peers is None:
            return
        latest = known.find(before.keys)
        (begins,) = self._described((called.key,))
        own = Seen(there_bytes, self._described(before.keys), begins=begins)
        if self.learned and latest is not None:
            own = replace(own, profiles=latest.rows)
        most = agreed_step(self._peers, own, settled=not self.learned and fits)
        self.learned = False
        if most is None:
            return
        self.elsewhere_bytes = most.base_bytes - there_bytes
        for step in known:
            step.besides = []
        if most.profiles:
            if latest is None:
                latest = KnownStep(tuple(before.calls), [])
                known.add(latest)
            latest.see(most.profiles)

    def _described(self, keys: Sequence[Key]) -> tuple[str, ...]:
        """Calls as every process has them."""
        return tuple(
            f"{self._numbers[planner]} {values} {sorted(existing)}"
            for planner, values, existing in keys
        )
