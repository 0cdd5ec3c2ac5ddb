"""The rules of the caching allocator once more: lists of bytes, searched from end to end."""

from __future__ import annotations

from dataclasses import dataclass, field

KIB, MIB = 1 << 10, 1 << 20


@dataclass
class Part:
    nbytes: int
    owner: int | None = None


@dataclass
class Segment:
    stream: int
    small: bool
    parts: list[Part]


@dataclass
class PlainAllocator:
    """As ``CachingAllocator``, without rounding to parts of powers of two."""

    expandable: bool = False
    most: int | None = None
    segments: list[Segment] = field(default_factory=list)
    count: int = 0

    @property
    def allocated_bytes(self) -> int:
        return sum(p.nbytes for s in self.segments for p in s.parts if p.owner is not None)

    @property
    def reserved_bytes(self) -> int:
        return sum(p.nbytes for s in self.segments for p in s.parts)

    def allocate(self, nbytes: int, *, stream: int = 0) -> int:
        self.count += 1
        if nbytes == 0:
            return self.count
        size = (nbytes + 511) // 512 * 512
        small = size <= MIB
        segment, place = self.find(size, stream, small) or self.fresh(size, stream, small)
        part = segment.parts[place]
        left = part.nbytes - size
        if small or self.expandable:
            split = left >= 512
        else:
            split = left > MIB and (self.most is None or size < self.most)
        if split:
            part.nbytes = size
            segment.parts.insert(place + 1, Part(left))
        part.owner = self.count
        return self.count

    def find(self, size: int, stream: int, small: bool) -> tuple[Segment, int] | None:
        fitting = [
            (part.nbytes, number, place)
            for number, segment in enumerate(self.segments)
            if (segment.stream, segment.small) == (stream, small)
            for place, part in enumerate(segment.parts)
            if part.owner is None and part.nbytes >= size
        ]
        if not fitting:
            return None
        if self.expandable and len(fitting) > 1:
            at_end = [f for f in fitting if f[2] == len(self.segments[f[1]].parts) - 1]
            fitting = [f for f in fitting if f not in at_end]
        nbytes, number, place = min(fitting)
        if self.most is not None:
            if size < self.most and nbytes >= self.most:
                return None
            if size >= self.most and nbytes >= size + 20 * MIB:
                return None
        return self.segments[number], place

    def fresh(self, size: int, stream: int, small: bool) -> tuple[Segment, int]:
        if self.expandable:
            return self.grown(size, stream, small)
        if small:
            nbytes = 2 * MIB
        elif size < 10 * MIB:
            nbytes = 20 * MIB
        else:
            nbytes = (size + 2 * MIB - 1) // (2 * MIB) * (2 * MIB)
        self.segments.append(Segment(stream, small, [Part(nbytes)]))
        return self.segments[-1], 0

    def grown(self, size: int, stream: int, small: bool) -> tuple[Segment, int]:
        own = [s for s in self.segments if (s.stream, s.small) == (stream, small)]
        if not own:
            own = [Segment(stream, small, [])]
            self.segments += own
        (segment,) = own
        if not segment.parts or segment.parts[-1].owner is not None:
            segment.parts.append(Part(0))
        while segment.parts[-1].nbytes < size:
            segment.parts[-1].nbytes += 2 * MIB if small else 20 * MIB
        return segment, len(segment.parts) - 1

    def free(self, handle: int) -> None:
        for segment in self.segments:
            for part in segment.parts:
                if part.owner == handle:
                    part.owner = None
            merged: list[Part] = []
            for part in segment.parts:
                if merged and merged[-1].owner is None and part.owner is None:
                    merged[-1].nbytes += part.nbytes
                else:
                    merged.append(part)
            segment.parts = merged
