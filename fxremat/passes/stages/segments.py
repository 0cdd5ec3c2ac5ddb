"""The forward as a tree: branches that meet, and within a branch others that met before."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Segments:
    """Runs of places (operations or stages) between a fork and a meeting.

    A segment comes after all that flow into it and directly after the last of them, so
    whatever flows into it, together with it, is one run of places too. The last segment is
    the trunk: what comes after the outermost branches, or the whole line where there are none.

    Attributes:
        ends: the place after each segment's last, but for the trunk.
        into: for each of these segments the one that it flows into.
    """

    ends: tuple[int, ...] = ()
    into: tuple[int, ...] = ()

    @property
    def trunk(self) -> int:
        """The last segment."""
        return len(self.ends)

    @property
    def depth(self) -> int:
        """Most segments that a place flows through until the trunk; 0 on a line."""
        return max(map(self._depth_of, range(self.trunk)), default=0)

    def at(self, place: int) -> int:
        """The segment of a place."""
        return bisect_right(self.ends, place)

    def start(self, segment: int) -> int:
        """The first place of a segment."""
        return self.ends[segment - 1] if segment else 0

    def path(self, segment: int) -> tuple[int, ...]:
        """A segment and those that come after it, up to the trunk."""
        found = [segment]
        while found[-1] != self.trunk:
            found.append(self.into[found[-1]])
        return tuple(found)

    def meeting(self, segments: Iterable[int]) -> int:
        """The first segment that all of these flow into, or are."""
        first, *others = map(self.path, segments)
        return next(s for s in first if all(s in path for path in others))

    def outmost(self, segments: Iterable[int]) -> frozenset[int]:
        """Those that no other of them flows into."""
        found = frozenset(segments)
        return found.difference(*(self.path(s)[1:] for s in found))

    def branches(self, depth: int) -> tuple[range, ...]:
        """The line as branches of this depth, in places; what they flow into is left out.

        At depth 1 they are the outermost, each with all that flows into it; at the greatest
        depth those into which nothing flows.
        """
        found = []
        for segment in range(self.trunk):
            here = self._depth_of(segment)
            if here == depth or (here < depth and segment not in self.into):
                first = min(s for s in range(segment + 1) if segment in self.path(s))
                found.append(range(self.start(first), self.ends[segment]))
        return tuple(found)

    def name_of(self, segment: int) -> str:
        """For people and emitted code: a branch of a branch has two numbers."""
        if segment == self.trunk:
            return "trunk"
        numbers = []
        for one, parent in zip(self.path(segment), self.path(segment)[1:], strict=False):
            numbers.append(sum(1 for s in range(one) if self.into[s] == parent))
        return "branch" + "_".join(map(str, reversed(numbers)))

    def _depth_of(self, segment: int) -> int:
        return len(self.path(segment)) - 1
