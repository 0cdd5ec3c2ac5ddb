"""Blocks: the pieces of a stage that an emitted graph calls, and what makes two alike."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Set
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import fx

from fxremat.errors import GraphError
from fxremat.passes.joint import batchnorm, rng
from fxremat.passes.joint.digest import target_name, written
from fxremat.passes.joint.graph import StorageTable, add_call, is_getitem, is_tensor
from fxremat.passes.joint.sizes import names_in
from fxremat.passes.stages.linearize import Line
from fxremat.runtime.rng import redraw

Key = tuple[object, ...]
"""Equal for what one piece of code, or one measurement, can stand for."""


class Mode(Enum):
    """How a block runs its operations."""

    FIRST = "first"
    """The stage's first forward: draws random numbers, moves BatchNorm statistics."""
    AGAIN = "again"
    """A recomputation: repeats draws, leaves statistics alone, reads pinned tensors."""
    BACKWARD = "backward"
    """The stage's backward; what it reads and nobody kept it recomputes, as ``AGAIN`` does."""


@dataclass(frozen=True, slots=True)
class Block:
    """Operations of one stage with what goes in and out.

    Attributes:
        stage: which stage.
        mode: how they run.
        nodes: operations of the joint graph in the order in which they run.
        inputs: tensors from outside, by role and then in graph order.
        outputs: tensors asked for, likewise.
        reads: storages of the inputs.
        again: those of ``nodes`` that a backward recomputes, in the order of the forward: sums
            over them are the same in any process.
    """

    stage: int
    mode: Mode
    nodes: tuple[fx.Node, ...]
    inputs: tuple[fx.Node, ...] = ()
    outputs: tuple[fx.Node, ...] = ()
    reads: frozenset[int] = frozenset()
    again: Set[fx.Node] = frozenset()

    def connected(self, line: Line, wanted: Set[fx.Node]) -> Block:
        """The block with its inputs, and with ``wanted`` of what it makes as its outputs."""
        inside = set(self.nodes)
        inputs = {n for node in self.nodes for n in self.sources(node) if n not in inside}
        return replace(
            self,
            inputs=tuple(sorted(inputs, key=line.rank)),
            outputs=tuple(sorted(inside & wanted, key=line.rank)),
            reads=line.joint.storages.of(inputs),
        )

    @property
    def operations(self) -> tuple[fx.Node, ...]:
        """Its nodes, but those that only pick a value of an operation with several."""
        return tuple(node for node in self.nodes if not is_getitem(node))

    def mode_of(self, node: fx.Node) -> Mode:
        """How ``node``, one of the operations, runs."""
        return Mode.AGAIN if node in self.again else self.mode

    def sources(self, node: fx.Node) -> tuple[fx.Node, ...]:
        """What running ``node`` here reads."""
        return dependencies(node, self.mode_of(node))


def dependencies(node: fx.Node, mode: Mode) -> tuple[fx.Node, ...]:
    """What running ``node`` in ``mode`` reads."""
    if mode is Mode.AGAIN and batchnorm.updates_statistics(node):
        return batchnorm.reads_for_value(node)
    if mode is Mode.FIRST and rng.is_draw(node):
        return tuple(n for n in node.all_input_nodes if not rng.is_state(n))
    return tuple(node.all_input_nodes)


def extract(line: Line, stage: int, mode: Mode, outputs: Iterable[fx.Node]) -> Block:
    """The least block of a stage, none of whose forward is missing or held, that gives ``outputs``.

    Blocks of a schedule are the planner's: see ``planner.extract``. In a backward the line's own
    order has sums over branches where they are.

    Args:
        line: the stages.
        stage: which of them.
        mode: how the block runs.
        outputs: what is asked for, of the stage's forward or backward.

    Ensures: but in ``Mode.AGAIN``, every random draw runs, asked for or not.
    """
    parts = line.stages[stage]
    own = parts.backward if mode is Mode.BACKWARD else parts.forward
    wanted = set(outputs)
    needed = set(wanted)
    if mode is not Mode.AGAIN:
        needed.update(filter(rng.draws, own))
    inside: list[fx.Node] = []
    for node in reversed(own):
        if node in needed and not (mode is Mode.AGAIN and node in line.pinned):
            inside.append(node)
            needed.update(dependencies(node, mode))
    inside.reverse()
    return Block(stage, mode, tuple(_with_views(line, inside, mode))).connected(line, wanted)


def _with_views(line: Line, nodes: Iterable[fx.Node], mode: Mode) -> list[fx.Node]:
    """``nodes``, and each view of a given tensor before its first reader."""
    result: dict[fx.Node, None] = {}
    for last in nodes:
        waiting = [last]
        while waiting:
            sources = dependencies(waiting[-1], mode)
            before = [n for n in sources if n in line.views and n not in result]
            waiting.extend(reversed(before))
            if not before:
                result[waiting.pop()] = None
    return list(result)


def build_graph(block: Block) -> fx.Graph:
    """The block as a graph of its own: placeholders, aten operations, a tuple of outputs.

    Raises:
        GraphError: a node reads a value that is neither inside nor a tensor.
    """
    graph = fx.Graph()
    copied: dict[fx.Node, fx.Node] = {}
    for i, node in enumerate(block.inputs):
        if not is_tensor(node):
            raise GraphError(f"{node.name} crosses a stage boundary but is no tensor")
        copied[node] = graph.placeholder(f"in{i}")
        copied[node].meta["val"] = node.meta["val"]
    for node in block.nodes:
        copied[node] = add_call(graph, call_of(node, block.mode_of(node)), copied, node.name)
        copied[node].meta = dict(node.meta)
    graph.output(tuple(copied[n] for n in block.outputs))
    graph.output_node().meta["val"] = tuple(n.meta["val"] for n in block.outputs)
    return graph


def call_of(node: fx.Node, mode: Mode) -> tuple[Any, Any, Any]:
    """Function, arguments and keywords that ``node`` stands for in ``mode``."""
    kwargs = dict(node.kwargs)
    if rng.is_draw(node):
        if mode is Mode.AGAIN:
            return redraw, node.args, kwargs
        _state, _device, op, *args = node.args
        return op, tuple(args), kwargs
    if mode is Mode.AGAIN and batchnorm.updates_statistics(node):
        return batchnorm.STATELESS, batchnorm.stateless_arguments(node), {}
    return node.target, node.args, kwargs


class BlockCache:
    """Blocks of one line, each made once."""

    def __init__(self, line: Line) -> None:
        self.line = line
        self._blocks: dict[tuple[object, ...], Block] = {}
        self._keys: dict[int, tuple[Block, Key]] = {}

    def __call__(self, stage: int, mode: Mode, outputs: frozenset[fx.Node]) -> Block:
        """The block of ``stage`` that gives ``outputs``; see :func:`extract`."""
        key = stage, mode, outputs
        if key not in self._blocks:
            self._blocks[key] = extract(self.line, stage, mode, outputs)
        return self._blocks[key]

    def of(
        self,
        stage: int,
        mode: Mode,
        runs: NDArray[np.int64],
        asked: NDArray[np.int64],
        nodes: tuple[fx.Node, ...],
    ) -> Block:
        """The block that an evaluation found for a call.

        Args:
            stage: of the call.
            mode: how it runs.
            runs: twice the number of each operation, and 1 more where it is recomputed; in order.
            asked: numbers of the tensors that it gives.
            nodes: by number; operations of a forward have theirs in order.
        """
        key = stage, mode, runs.tobytes(), asked.tobytes()
        if key not in self._blocks:
            again = np.sort(runs[runs % 2 == 1]) if mode is Mode.BACKWARD else runs[:0]
            self._blocks[key] = Block(
                stage,
                mode,
                tuple(nodes[i] for i in (runs // 2).tolist()),
                again=dict.fromkeys(nodes[i] for i in (again // 2).tolist()).keys(),
            ).connected(self.line, frozenset(nodes[i] for i in asked.tolist()))
        return self._blocks[key]

    def clear(self) -> None:
        """Forget all blocks."""
        self._blocks.clear()
        self._keys.clear()

    def key(self, block: Block) -> Key:
        """Equal for blocks for which one piece of code can stand; see :func:`block_key`."""
        found = self._keys.get(id(block))
        if found is None:  # the entry keeps the block, so its id, alive
            found = self._keys[id(block)] = block, block_key(block, self.line.joint.storages)
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
    """The key of an operation as ``block`` runs it."""
    return _call_key(
        call_of(node, block.mode_of(node)), lambda n: repr(tensor_key(n.meta.get("val")))
    )


def block_key(block: Block, storages: StorageTable) -> Key:
    """The key of a block: one piece of code can stand for all blocks with an equal one.

    Inputs that share a storage differ from inputs that do not.
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
        call = call_of(node, block.mode_of(node))
        lines.append(_call_key(call, lambda n: f"%{index[n]}"))
        index[node] = len(index)
    outputs = tuple(index[n] for n in block.outputs)
    return (block.mode, tuple(inputs), tuple(lines), outputs)


def _call_key(call: tuple[Any, Any, Any], describe: Callable[[fx.Node], str]) -> Key:
    """The key of a call whose nodes are described so; numbers that follow sizes differ by value."""
    target, args, kwargs = call
    arguments = (args, dict(sorted(kwargs.items())))
    return (target_name(target), written(arguments, describe), *names_in(arguments).items())
