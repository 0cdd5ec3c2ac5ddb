"""The blocks of a line, each extracted once."""

from __future__ import annotations

from torch import fx

from fxremat.passes.stages.block import Block, Mode, extract
from fxremat.passes.stages.linearize import Line
from fxremat.passes.stages.signature import Key, block_key
from fxremat.passes.stages.sums import Sums, home_sums

NOTHING: frozenset[fx.Node] = frozenset()


class BlockCache:
    """Blocks of one line by what they give, and what tells them apart."""

    def __init__(self, line: Line) -> None:
        self._line = line
        self._blocks: dict[tuple[object, ...], Block] = {}
        self._home: dict[int, Sums] = {}
        self._keys: dict[int, tuple[Block, Key]] = {}

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

    def clear(self) -> None:
        """Forget all blocks."""
        self._blocks.clear()
        self._keys.clear()

    def key(self, block: Block) -> Key:
        """Equal for blocks for which one piece of code can stand; see :func:`block_key`."""
        found = self._keys.get(id(block))
        if found is None:  # the entry keeps the block, so its id, alive
            found = self._keys[id(block)] = block, block_key(block, self._line.joint.storages)
        return found[1]

    def _unusual(self, stage: int, sums: Sums | None) -> Sums | None:
        """``sums``, or ``None`` where they are those of the line's own order."""
        if sums is None:
            return None
        if stage not in self._home:
            self._home[stage] = home_sums(self._line, stage)
        return None if sums == self._home[stage] else sums
