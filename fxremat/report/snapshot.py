"""A plan's memory as torch's own tools read it: a pickle as ``torch.cuda.memory._snapshot()``."""

from __future__ import annotations

import pickle
from bisect import bisect_left, insort
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

from fxremat.report.facts import PlanFacts
from fxremat.report.memory import Tensor
from fxremat.report.view import view_of

PROTOCOL = 4
"""The latest that the viewer on torch's page reads."""

BASE = 1 << 40
"""The first address."""


@dataclass(slots=True)
class _Addresses:
    """Hands out the lowest free addresses: a plan does not know those of the device's allocator.

    Attributes:
        free: begins and ends of gaps below ``top``, ascending.
        top: above which all is free.
    """

    free: list[tuple[int, int]] = field(default_factory=list)
    top: int = 0

    def take(self, nbytes: int) -> int:
        """So many bytes."""
        for i, (begin, end) in enumerate(self.free):
            if end - begin >= nbytes:
                self.free[i : i + 1] = [(begin + nbytes, end)] if end - begin > nbytes else []
                return begin
        self.top += nbytes
        return self.top - nbytes

    def give(self, begin: int, nbytes: int) -> None:
        """Give a range of addresses back."""
        gap = (begin, begin + nbytes)
        place = bisect_left(self.free, gap)
        if place < len(self.free) and self.free[place][0] == gap[1]:
            gap = (gap[0], self.free.pop(place)[1])
        if place and self.free[place - 1][1] == gap[0]:
            gap = (self.free.pop(place - 1)[0], gap[1])
        insort(self.free, gap)


def snapshot_of(plan: PlanFacts) -> bytes:
    """The pickle.

    What is there before the step is a block without an event, as in a snapshot whose recording
    began later; what is there after it is a block of the only segment. Sizes are
    requested ones, times predicted ones.

    Raises:
        PlanError: the plan does not say which tensors are held when.
    """
    view = view_of(plan)
    memory = view.memory
    addresses = _Addresses()
    place: dict[int, int] = {}
    events: list[dict[str, Any]] = []
    begins: defaultdict[int, list[int]] = defaultdict(list)
    ends: defaultdict[int, list[int]] = defaultdict(list)
    for index, life in enumerate(memory.lives):
        begins[life.begin].append(index)
        ends[life.end].append(index)
    for instant in range(memory.count):
        time_us = round(view.times_s[instant] * 1e6)
        for index in ends[instant]:
            tensor = memory.tensors[memory.lives[index].tensor]
            address = place.pop(index)
            addresses.give(address, tensor.nbytes)
            for action in ("free_requested", "free_completed"):
                events.append(_event(action, BASE + address, tensor, time_us))
        for index in begins[instant]:
            tensor = memory.tensors[memory.lives[index].tensor]
            place[index] = addresses.take(tensor.nbytes)
            if instant:
                events.append(_event("alloc", BASE + place[index], tensor, time_us))
    left = {place[i]: memory.tensors[memory.lives[i].tensor] for i in place}
    contents = {
        "segments": [_segment(left, addresses.top)],
        "device_traces": [events],
        "external_annotations": [],
        "allocator_settings": {},
    }
    return pickle.dumps(contents, protocol=PROTOCOL)


def _frames(tensor: Tensor) -> list[dict[str, Any]]:
    """What made a tensor, in place of a stack: ``module:stage:name``."""
    where = tensor.module or tensor.kind.value
    name = f"{tensor.name} ({tensor.operation})" if tensor.operation else tensor.name
    return [{"filename": where, "line": max(tensor.stage, 0), "name": name}]


def _event(action: str, address: int, tensor: Tensor, time_us: int) -> dict[str, Any]:
    return {
        "action": action,
        "addr": address,
        "size": tensor.nbytes,
        "stream": 0,
        "time_us": time_us,
        "frames": _frames(tensor),
    }


def _segment(left: dict[int, Tensor], total_bytes: int) -> dict[str, Any]:
    """The only segment, as it is after the step."""
    blocks: list[dict[str, Any]] = []
    end = 0
    for address in sorted(left):
        if address > end:
            blocks.append(_block(end, address - end))
        blocks.append(_block(address, left[address].nbytes, left[address]))
        end = address + left[address].nbytes
    if total_bytes > end:
        blocks.append(_block(end, total_bytes - end))
    active_bytes = sum(tensor.nbytes for tensor in left.values())
    return {
        "device": 0,
        "address": BASE,
        "total_size": total_bytes,
        "allocated_size": active_bytes,
        "active_size": active_bytes,
        "requested_size": active_bytes,
        "stream": 0,
        "segment_type": "large",
        "segment_pool_id": (0, 0),
        "is_expandable": False,
        "frames": [],
        "blocks": blocks,
    }


def _block(address: int, nbytes: int, tensor: Tensor | None = None) -> dict[str, Any]:
    return {
        "address": BASE + address,
        "size": nbytes,
        "requested_size": nbytes if tensor else 0,
        "state": "active_allocated" if tensor else "inactive",
        "frames": _frames(tensor) if tensor else [],
    }
