"""What device memory holds during a replay."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from fxremat.ir import Storage

Value = dict[int, int]
"""Storage id to instance number."""

Instance = tuple[int, int]
"""A storage id and an instance number: one piece of memory, once."""


@dataclass(slots=True)
class Memory:
    """Instances held, each counted once however many values share it."""

    storages: tuple[Storage, ...]
    nbytes: int = 0
    holders: Counter[Instance] = field(default_factory=Counter)

    def take(self, value: Value) -> list[Instance]:
        """Hold ``value`` once more; returns what nobody held before."""
        new = [instance for instance in value.items() if not self.holders[instance]]
        for instance in value.items():
            self.holders[instance] += 1
        self.nbytes += self.size(new)
        return new

    def drop(self, value: Value | None) -> list[Instance]:
        """Hold ``value`` once less; returns what nobody holds any more."""
        gone = []
        for instance in (value or {}).items():
            self.holders[instance] -= 1
            if not self.holders[instance]:
                gone.append(instance)
                del self.holders[instance]
        self.nbytes -= self.size(gone)
        return gone

    def size(self, instances: list[Instance]) -> int:
        """Bytes of ``instances``."""
        return sum(self.storages[storage].nbytes for storage, _ in instances)
