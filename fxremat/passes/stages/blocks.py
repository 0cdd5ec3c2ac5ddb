"""The blocks of a line, each extracted once, and what a call of them reads and gives.

Thousands of programs are built for a plan, each of hundreds of calls, so sets of tensors are
integers here, with a bit for each tensor.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from torch import fx

from fxremat.passes.stages.block import Block, Mode, candidates, extract
from fxremat.passes.stages.linearize import Line, Role
from fxremat.passes.stages.signature import Key, block_key
from fxremat.passes.stages.sums import Sums, home_sums

NOTHING: frozenset[fx.Node] = frozenset()


class TensorBits:
    """The tensors of a line as bits: parameters and pinned ones first, then stage by stage."""

    def __init__(self, line: Line) -> None:
        def rank(node: fx.Node) -> tuple[int, int, int]:
            role, order = line.rank(node)
            return (line.stage_of[node] if role < Role.PINNED else -role, role, order)

        inside = (n for n in line.role_of if line.role_of[n] >= Role.PINNED or n in line.stage_of)
        self._nodes = (*sorted(inside, key=rank), *line.joint.tangents)
        self._bit = {node: 1 << i for i, node in enumerate(self._nodes)}
        self._in_storage = [0] * len(line.joint.storages.nbytes)
        for node, bit in self._bit.items():
            for storage in line.joint.storages.of_node.get(node, ()):
                self._in_storage[storage] |= bit

    def of(self, nodes: Iterable[fx.Node]) -> int:
        """These tensors."""
        bits = 0
        for node in nodes:
            bits |= self._bit[node]
        return bits

    def nodes(self, bits: int) -> tuple[fx.Node, ...]:
        """The tensors of ``bits``, in order."""
        found = []
        while bits:
            lowest = bits & -bits
            found.append(self._nodes[lowest.bit_length() - 1])
            bits ^= lowest
        return tuple(found)

    def in_storages(self, storages: Iterable[int]) -> int:
        """All tensors that lie in any of ``storages``."""
        bits = 0
        for storage in storages:
            bits |= self._in_storage[storage]
        return bits

    def storages(self, storages: Iterable[int], bits: int) -> frozenset[int]:
        """Those of ``storages`` in which a tensor of ``bits`` lies."""
        return frozenset([s for s in storages if self._in_storage[s] & bits])


@dataclass(frozen=True, slots=True)
class Taken:
    """A block as a program takes it.

    Attributes:
        block: what runs.
        inputs, outputs: its tensors, as bits.
        around: all tensors in storages that it reads.
        kept: by what of ``around`` is read after it: the storages that it leaves alone.
    """

    block: Block
    inputs: int
    outputs: int
    around: int
    kept: dict[int, frozenset[int]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _Offer:
    """What a stage can give in some mode.

    Attributes:
        tensors: that a block of it can give, as bits.
        taken: by the tensors asked for and those that are missing.
    """

    tensors: int
    taken: dict[tuple[int, frozenset[fx.Node]], Taken] = field(default_factory=dict)


class BlockCache:
    """Blocks of one line, each extracted once."""

    def __init__(self, line: Line) -> None:
        self.bits = TensorBits(line)
        self._line = line
        joint = line.joint
        self._never_freed = self.bits.of((*joint.given, *joint.tangents))
        self._blocks: dict[tuple[object, ...], Block] = {}
        self._offers: dict[tuple[object, ...], _Offer] = {}
        self._home: dict[int, Sums] = {}
        self._keys: dict[int, tuple[Block, Key]] = {}

    def key(self, block: Block) -> Key:
        """Equal for blocks for which one piece of code can stand; see :func:`block_key`."""
        found = self._keys.get(id(block))
        if found is None:  # the entry keeps the block, so its id, alive
            found = self._keys[id(block)] = block, block_key(block, self._line.joint.storages)
        return found[1]

    def __call__(
        self,
        stage: int,
        mode: Mode,
        outputs: frozenset[fx.Node],
        missing: frozenset[fx.Node] = NOTHING,
        held: frozenset[fx.Node] = NOTHING,
        sums: Sums | None = None,
    ) -> Block:
        """The block of ``stage`` that gives ``outputs``; see :func:`extract`."""
        if mode is not Mode.AGAIN and not missing:
            held = NOTHING  # makes no difference
        sums = self._unusual(stage, sums)
        key = (stage, mode, outputs, missing, held, sums)
        if key not in self._blocks:
            self._blocks[key] = extract(
                self._line,
                stage=stage,
                mode=mode,
                outputs=outputs,
                missing=missing,
                held=held,
                sums=sums,
            )
        return self._blocks[key]

    def take(
        self,
        stage: int,
        mode: Mode,
        needed: int,
        *,
        missing: frozenset[fx.Node],
        held: frozenset[fx.Node],
        sums: Sums | None,
    ) -> Taken:
        """The block of ``stage`` that gives all it can of the tensors ``needed``."""
        sums = self._unusual(stage, sums)
        key = (stage, mode, held, sums)
        offer = self._offers.get(key)
        if offer is None:
            given = candidates(self._line, stage, mode, held, sums)
            offer = self._offers[key] = _Offer(self.bits.of(given))
        outputs = offer.tensors & needed
        taken = offer.taken.get((outputs, missing))
        if taken is None:
            asked = frozenset(self.bits.nodes(outputs))
            block = self(stage, mode, asked, missing, held, sums)
            around = self.bits.in_storages(block.reads)
            taken = Taken(block, self.bits.of(block.inputs), outputs, around)
            offer.taken[outputs, missing] = taken
        return taken

    def kept(self, taken: Taken, needed: int) -> frozenset[int]:
        """Those storages that ``taken`` reads in which something needed lies, or never freed."""
        around = needed & taken.around
        kept = taken.kept.get(around)
        if kept is None:
            kept = self.bits.storages(taken.block.reads, around | self._never_freed)
            taken.kept[around] = kept
        return kept

    def _unusual(self, stage: int, sums: Sums | None) -> Sums | None:
        """``sums``, or ``None`` where they are those of the line's own order."""
        if sums is None:
            return None
        if stage not in self._home:
            self._home[stage] = home_sums(self._line, stage)
        return None if sums == self._home[stage] else sums
