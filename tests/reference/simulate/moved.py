"""What transfers may move, where it is, and when it gets there."""

from __future__ import annotations

from dataclasses import dataclass, field

from fxremat.errors import ScheduleError
from fxremat.ir import Activations, Chain
from tests.reference.simulate.memory import Instance


@dataclass(frozen=True, slots=True)
class Copy:
    """``nbytes`` on their way to the host."""

    begin_s: float
    end_s: float
    nbytes: float


@dataclass(slots=True, eq=False)
class Moved:
    """A value that is kept, as far as it brought in instances that no value kept before.

    Attributes:
        what: the value.
        instances: what it is made of.
        nbytes: their size.
        ready_s: when they are in device memory, whole.
        borrows: it has instances, but none that it brought in.
        read_s: when the last reader so far is done.
        copies: its ways to the host so far, in order.
        out: some of it was freed and not waited for.
        freed: bytes given back, or that will be.
        freed_s: when the last of them are.
        back: bytes of these that were prefetched.
        back_s: when the last of these are.
    """

    what: Activations
    instances: list[Instance]
    nbytes: int
    ready_s: float
    borrows: bool
    read_s: float = 0.0
    copies: list[Copy] = field(default_factory=list)
    out: bool = False
    freed: float = 0
    freed_s: float = 0.0
    back: float = 0
    back_s: float = 0.0

    @property
    def copied(self) -> float:
        """Bytes of which the host has a copy, or will have."""
        return sum(copy.nbytes for copy in self.copies)

    @property
    def copied_s(self) -> float:
        """When the last of the copies ends."""
        return self.copies[-1].end_s if self.copies else 0.0

    def come_back(self) -> None:
        """All that was freed is in device memory again; the copies stay."""
        self.out, self.freed, self.back = False, 0, 0
        self.ready_s = max(self.ready_s, self.back_s)


class Book:
    """Every value that is kept, and which of them brought in an instance."""

    def __init__(self, chain: Chain) -> None:
        self.storages = chain.storages
        self.values: dict[Activations, Moved] = {}
        self.owner: dict[Instance, Moved] = {}

    def keep(
        self, what: Activations, instances: list[Instance], *, ready: dict[Instance, float]
    ) -> None:
        """``what`` is kept from now on, made of ``instances``, each there when ``ready``."""
        own = [i for i in instances if i not in self.owner]
        if instances and not own and what in self.values:
            return
        nbytes = sum(self.storages[storage].nbytes for storage, _ in own)
        ready_s = max((ready[i] for i in own), default=0.0)
        moved = Moved(what, own, nbytes, ready_s, bool(instances) and not own)
        self.values[what] = moved
        self.owner |= dict.fromkeys(own, moved)

    def find(self, what: Activations) -> Moved:
        """The value that a transfer names."""
        if what not in self.values:
            raise ScheduleError(f"{what} is not kept")
        moved = self.values[what]
        if moved.borrows:
            raise ScheduleError(f"{what} is part of other values: move those")
        return moved

    def read(self, instances: list[Instance], *, until_s: float) -> None:
        """Somebody reads ``instances``, until ``until_s``."""
        for instance in instances:
            moved = self.owner.get(instance)
            if moved is not None:
                moved.read_s = max(moved.read_s, until_s)

    def require(self, instances: list[Instance]) -> None:
        """Complain of what is not known to be in device memory."""
        for instance in instances:
            moved = self.owner.get(instance)
            if moved is not None and moved.out:
                raise ScheduleError(f"{moved.what} was offloaded and not waited for")

    def forget(self, instances: list[Instance]) -> None:
        """Nobody holds ``instances`` any more."""
        for instance in instances:
            moved = self.owner.pop(instance, None)
            if moved is None:
                continue
            moved.instances.remove(instance)
            if not moved.instances and self.values.get(moved.what) is moved:
                del self.values[moved.what]
