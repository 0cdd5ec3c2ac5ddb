"""The blocks of a line, each extracted once, and what makes two of them the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from fxremat.passes.joint.digest import target_name, written
from fxremat.passes.joint.graph import StorageTable
from fxremat.passes.joint.sizes import names_in
from fxremat.passes.stages.block import Block, Mode, call_of, extract
from fxremat.passes.stages.linearize import Line
from fxremat.passes.stages.order import Sums, home_sums

NOTHING: frozenset[fx.Node] = frozenset()

Key = tuple[object, ...]
"""Equal for what one piece of code, or one measurement, can stand for."""


class BlockCache:
    """Blocks of one line by what they give and what else makes them differ."""

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
        if sums is not None:
            if stage not in self._home:
                self._home[stage] = home_sums(self._line, stage)
            sums = None if sums == self._home[stage] else sums
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


def tensor_key(tensor: object) -> Key:
    """Dtype, shape, strides, offset and device: all that a kernel's choice depends on."""
    if not isinstance(tensor, torch.Tensor):
        return (repr(tensor),)
    return (
        str(tensor.dtype),
        tuple(tensor.shape),
        tuple(tensor.stride()),
        tensor.storage_offset(),
        int(tensor.untyped_storage().nbytes()),  # of a part, a symbol though its shape is none
        str(tensor.device),
    )


def node_key(node: fx.Node, block: Block) -> Key:
    """Of one operation as ``block`` runs it."""
    return _call_key(
        call_of(node, block.mode_of(node)), lambda n: repr(tensor_key(n.meta.get("val")))
    )


def block_key(block: Block, storages: StorageTable) -> Key:
    """Of a block: equal keys mean that one piece of code can stand for both.

    Inputs that share a storage are told from inputs that do not.
    """
    index: dict[fx.Node, int] = {}
    shared: dict[tuple[int, ...], int] = {}
    inputs = []
    for node in block.inputs:
        index[node] = len(index)
        group = shared.setdefault(storages.of_node[node], len(shared))
        inputs.append((tensor_key(node.meta["val"]), group))
    lines = []
    for node in block.nodes:
        held = tuple(index[n] for n in block.waits.get(node, ()))
        call = call_of(node, block.mode_of(node))
        lines.append((*_call_key(call, lambda n: f"%{index[n]}"), held))
        index[node] = len(index)
    outputs = tuple(index[n] for n in block.outputs)
    return (block.mode, tuple(inputs), tuple(lines), outputs)


def _call_key(call: tuple[Any, Any, Any], describe: Callable[[fx.Node], str]) -> Key:
    """Of a call whose nodes are described so; what follows the sizes differs by value, too."""
    target, args, kwargs = call
    arguments = (args, dict(sorted(kwargs.items())))
    return (target_name(target), written(arguments, describe), *names_in(arguments).items())
