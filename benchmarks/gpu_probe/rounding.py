"""What the allocator hands out and takes, beside the rules and the simulator."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import torch

from benchmarks.gpu_probe.probe import Finding, Probe
from fxremat import torch_compat
from fxremat.planner.allocator.allocator import AllocatorSettings, CachingAllocator
from fxremat.units import format_bytes

MIB = 1 << 20

ASKED_MIB = (1.5, 19.5, 21.2)

KNOWN_MIB: dict[tuple[float, bool], tuple[float | None, float]] = {
    # Asked, with segments that grow: what is handed out (None: the request in units of 512
    # bytes), and what is taken from the device for it, from an empty cache.
    (1.5, False): (None, 20),
    (19.5, False): (20, 20),
    (21.2, False): (22, 22),
    (1.5, True): (None, 20),
    (19.5, True): (None, 20),
    (21.2, True): (None, 40),
}
"""Worked out by hand from the allocator's rules."""

SEQUENCES, EVENTS = 200, 60

Sizes = tuple[int, int]
"""Bytes allocated, bytes reserved."""


def rounding(probe: Probe) -> None:
    """Single requests, then random sequences of them. The process has allocated nothing yet."""
    if not probe.cuda:
        for mib in ASKED_MIB:
            probe.ask(f"{mib} MiB", lambda m=mib: _on_the_cpu(m))
        return
    expandable = probe.part.endswith("expandable")
    probe.ask("settings", lambda: _settings(expandable))
    for mib in ASKED_MIB:
        probe.ask(f"{mib} MiB, fresh", lambda m=mib: _fresh(probe.device, m, expandable))
        probe.ask(f"{mib} MiB, cached", lambda m=mib: _cached(probe.device, m, expandable))
    count = 5 if probe.tiny else SEQUENCES
    probe.ask(f"{count} sequences, one stream", lambda: _sequences(probe.device, count, streams=1))
    probe.ask(f"{count} sequences, two streams", lambda: _sequences(probe.device, count, streams=2))


def _on_the_cpu(mib: float) -> Finding:
    asked = int(mib * MIB)
    with torch_compat.AllocationLog() as log:
        held = torch.empty(asked, dtype=torch.uint8)
    given = sum(change for _mark, change in log.events)
    del held
    return Finding(f"{given} bytes", f"{asked} bytes", given == asked)


def _settings(expandable: bool) -> Finding:
    """The names under which torch tells its settings, and whether the process has those meant."""
    told = torch_compat.allocator_settings() or {}
    read = AllocatorSettings.read(told)
    return Finding(
        f"expandable_segments: {told.get('expandable_segments')}",
        f"expandable_segments: {expandable}",
        "expandable_segments" in told and read.expandable_segments is expandable,
        {"told": {str(name): repr(value) for name, value in told.items()}, "read": repr(read)},
    )


def _sizes(device: torch.device) -> Sizes:
    stats = torch.cuda.memory_stats(device)
    return stats["allocated_bytes.all.current"], stats["reserved_bytes.all.current"]


def _empty(device: torch.device) -> None:
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()


def _known(mib: float, expandable: bool) -> Sizes:
    given, taken = KNOWN_MIB[mib, expandable]
    asked = -(-int(mib * MIB) // 512) * 512
    return asked if given is None else int(given * MIB), int(taken * MIB)


def _fresh(device: torch.device, mib: float, expandable: bool) -> Finding:
    _empty(device)
    base = _sizes(device)
    held = torch.empty(int(mib * MIB), dtype=torch.uint8, device=device)
    after = _sizes(device)
    del held
    return _compared(_less(after, base), _known(mib, expandable))


def _cached(device: torch.device, mib: float, expandable: bool) -> Finding:
    """The same request when a block of that size has just been given back."""
    _empty(device)
    base = _sizes(device)
    torch.empty(int(mib * MIB), dtype=torch.uint8, device=device)
    held = torch.empty(int(mib * MIB), dtype=torch.uint8, device=device)
    after = _sizes(device)
    del held
    return _compared(_less(after, base), _known(mib, expandable))


def _less(after: Sizes, before: Sizes) -> Sizes:
    return after[0] - before[0], after[1] - before[1]


def _compared(found: Sizes, assumed: Sizes) -> Finding:
    return Finding(
        _text(found), _text(assumed), found == assumed, {"bytes": found, "assumed_bytes": assumed}
    )


def _text(sizes: Sizes) -> str:
    return f"{format_bytes(sizes[0])} of {format_bytes(sizes[1])}"


def _sequences(device: torch.device, count: int, *, streams: int) -> Finding:
    """Device and simulator after each event of random sequences."""
    agreeing, first = 0, None
    for seed in range(count):
        difference = _first_difference(device, seed, streams=streams)
        agreeing += difference is None
        if difference is not None and first is None:
            first = f"sequence {seed}, {difference}"
    return Finding(
        f"{agreeing} as simulated",
        f"{count} as simulated",
        agreeing == count,
        {"first_difference": first},
    )


def _first_difference(device: torch.device, seed: int, *, streams: int) -> str | None:
    """Where the simulator first says something else; ``None`` if it never does."""
    _empty(device)
    base = _sizes(device)
    simulated = CachingAllocator(AllocatorSettings.read(torch_compat.allocator_settings() or {}))
    lanes: list[Any] = [torch.cuda.default_stream(device)]
    lanes += [torch.cuda.Stream(device) for _ in range(streams - 1)]
    held: dict[int, torch.Tensor] = {}
    for index, (kind, number, lane) in enumerate(_events(seed, streams=streams)):
        if kind == "free":
            handle = list(held)[number % len(held)]
            del held[handle]
            simulated.free(handle)
        else:
            with torch.cuda.stream(lanes[lane]):
                made = torch.empty(number, dtype=torch.uint8, device=device)
            held[simulated.allocate(number, stream=lane)] = made
            del made
        found = _less(_sizes(device), base)
        expected = (simulated.allocated_bytes, simulated.reserved_bytes)
        if found != expected:
            return f"event {index} ({kind} {number}): {_text(found)}, simulated {_text(expected)}"
    return None


def _events(seed: int, *, streams: int) -> Iterator[tuple[str, int, int]]:
    """Requests, as ``("allocate", bytes, stream)``, and releases, as ``("free", which, 0)``."""
    draw = random.Random(seed)
    live = 0
    for _ in range(EVENTS):
        if live and draw.random() < 0.45:
            live -= 1
            yield "free", draw.randrange(1 << 30), 0
            continue
        live += 1
        # As likely below the bounds of the rules as above: 512 bytes, 1, 10 and 20 MiB.
        yield "allocate", int(2 ** draw.uniform(0, 26.5)), draw.randrange(streams)
