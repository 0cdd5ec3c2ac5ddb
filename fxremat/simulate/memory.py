"""What device memory holds during a replay."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from fxremat.ir import Storage

Value = dict[int, int]
"""Storage id to instance number."""


@dataclass(slots=True)
class Memory:
    """Instances held, each counted once however many values share it."""

    storages: tuple[Storage, ...]
    nbytes: int = 0
    holders: Counter[tuple[int, int]] = field(default_factory=Counter)

    def take(self, value: Value) -> None:
        """Hold ``value`` once more."""
        for instance in value.items():
            if not self.holders[instance]:
                self.nbytes += self.storages[instance[0]].nbytes
            self.holders[instance] += 1

    def drop(self, value: Value | None) -> None:
        """Hold ``value`` once less; ``None`` is nothing."""
        for instance in (value or {}).items():
            self.holders[instance] -= 1
            if not self.holders[instance]:
                self.nbytes -= self.storages[instance[0]].nbytes
                del self.holders[instance]
