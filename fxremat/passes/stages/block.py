"""Blocks: the pieces of a stage that emitted code calls, and keys of equal ones."""

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
"""Equal for operations or blocks that share a piece of code, or a measurement."""


class Mode(Enum):
    """How a block runs operations: for the first time, again, or as the backward of a stage."""

    FIRST = "first"
    """The first forward of a stage: it draws random numbers and updates BatchNorm statistics."""
    AGAIN = "again"
    """A recomputation: it repeats draws, updates no statistics, and reads pinned tensors."""
    BACKWARD = "backward"
    """The backward of a stage: it recomputes what it reads and was not kept, as ``AGAIN`` does."""


@dataclass(frozen=True, slots=True)
class Block:
    """Operations of a stage, with the tensors that they read and return.

    Attributes:
        stage: the index of the stage.
        mode: how the operations run.
        nodes: operations of the joint graph, in the order in which they run.
        inputs: tensors from outside, by role and then in graph order.
        outputs: tensors that are returned, in the same order.
        reads: storages of the inputs.
        again: those of ``nodes`` that a backward recomputes, in the order of the forward, so that
            sums over them are the same in any process.
    """

    stage: int
    mode: Mode
    nodes: tuple[fx.Node, ...]
    inputs: tuple[fx.Node, ...] = ()
    outputs: tuple[fx.Node, ...] = ()
    reads: frozenset[int] = frozenset()
    again: Set[fx.Node] = frozenset()

    def connected(self, line: Line, wanted: Set[fx.Node]) -> Block:
        """Return the block with ``inputs``, ``outputs`` and ``reads`` filled in.

        Args:
            line: the stages.
            wanted: tensors that others read; the block returns those of them that it computes.
        """
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
        """The nodes except ``getitem`` nodes, which pick a result of an operation with several."""
        return tuple(node for node in self.nodes if not is_getitem(node))

    def mode_of(self, node: fx.Node) -> Mode:
        """Return the mode in which ``node`` runs: ``AGAIN`` if recomputed, else the block's."""
        return Mode.AGAIN if node in self.again else self.mode

    def sources(self, node: fx.Node) -> tuple[fx.Node, ...]:
        """Return the nodes that ``node`` reads when it runs in this block."""
        return dependencies(node, self.mode_of(node))


def dependencies(node: fx.Node, mode: Mode) -> tuple[fx.Node, ...]:
    """Return the nodes that ``node`` reads when it runs in ``mode``.

    A recomputed BatchNorm reads no running statistics, and a first random draw no recorded state.
    """
    if mode is Mode.AGAIN and batchnorm.updates_statistics(node):
        return batchnorm.reads_for_value(node)
    if mode is Mode.FIRST and rng.is_draw(node):
        return tuple(n for n in node.all_input_nodes if not rng.is_state(n))
    return tuple(node.all_input_nodes)


def extract(line: Line, stage: int, mode: Mode, outputs: Iterable[fx.Node]) -> Block:
    """Return the smallest block of a stage that computes ``outputs``.

    It is that of a schedule which keeps the saved set of the stage whole; ``planner.extract`` makes
    those of other schedules. In a backward, sums over branches are in the order of the line.

    Args:
        line: the stages.
        stage: the index of the stage.
        mode: how the block runs.
        outputs: tensors of the forward or backward of the stage.

    Ensures: every random draw runs, whether its result is needed or not, except in ``Mode.AGAIN``.
    """
    parts = line.stages[stage]
    operations = parts.backward if mode is Mode.BACKWARD else parts.forward
    wanted = set(outputs)
    needed = set(wanted)
    if mode is not Mode.AGAIN:
        needed.update(filter(rng.has_effect, operations))
    inside: list[fx.Node] = []
    for node in reversed(operations):
        if node in needed and not (mode is Mode.AGAIN and node in line.pinned):
            inside.append(node)
            needed.update(dependencies(node, mode))
    inside.reverse()
    return Block(stage, mode, tuple(_with_views(line, inside, mode))).connected(line, wanted)


def _with_views(line: Line, nodes: Iterable[fx.Node], mode: Mode) -> list[fx.Node]:
    """Return ``nodes`` with views of given tensors inserted, each before its first reader.

    A block makes the views of primals and constants that it reads by itself.
    """
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
    """Return the block as a graph: placeholders, aten operations, and a tuple of outputs.

    Raises:
        GraphError: an input of the block is no tensor.
    """
    graph = fx.Graph()
    copied: dict[fx.Node, fx.Node] = {}
    for i, node in enumerate(block.inputs):
        if not is_tensor(node):
            raise GraphError(
                f"node {node.name} ({node.target}) crosses a stage boundary but is no tensor"
            )
        copied[node] = graph.placeholder(f"in{i}")
        copied[node].meta["val"] = node.meta["val"]
    for node in block.nodes:
        copied[node] = add_call(graph, call_of(node, block.mode_of(node)), copied, node.name)
        copied[node].meta = dict(node.meta)
    graph.output(tuple(copied[n] for n in block.outputs))
    graph.output_node().meta["val"] = tuple(n.meta["val"] for n in block.outputs)
    return graph


def call_of(node: fx.Node, mode: Mode) -> tuple[Any, Any, Any]:
    """Return function, arguments and keywords of the call that runs ``node`` in ``mode``."""
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
    """The blocks of a line that were asked for, each made once, and their keys."""

    def __init__(self, line: Line) -> None:
        self.line = line
        self._blocks: dict[tuple[object, ...], Block] = {}
        self._keys: dict[int, tuple[Block, Key]] = {}

    def __call__(self, stage: int, mode: Mode, outputs: frozenset[fx.Node]) -> Block:
        """Return the block of ``stage`` that computes ``outputs``; see :func:`extract`."""
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
        """Return the block that runs the operations ``runs``, as an evaluation of a plan chose.

        Args:
            stage: the index of the stage.
            mode: how the block runs.
            runs: for each operation, in order, twice its index in ``nodes``, plus 1 if it is
                recomputed.
            asked: the indices in ``nodes`` of the tensors that the block returns.
            nodes: all nodes; those of a forward are in its order.
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
        """Return a key that is equal for blocks that can share code; see :func:`block_key`."""
        entry = self._keys.get(id(block))
        if entry is None:  # the entry keeps the block alive, so that its id stays valid
            entry = self._keys[id(block)] = block, block_key(block, self.line.joint.storages)
        return entry[1]


def tensor_key(tensor: object) -> Key:
    """Return the dtype, layout, storage size and device of a tensor, as a key.

    The choice of a kernel depends on nothing else. The key of other objects is their ``repr``.
    """
    if not isinstance(tensor, torch.Tensor):
        return (repr(tensor),)
    return (
        str(tensor.dtype),
        tuple(tensor.shape),
        tuple(tensor.stride()),
        tensor.storage_offset(),
        int(tensor.untyped_storage().nbytes()),  # a symbol for parts, even of a fixed shape
        str(tensor.device),
    )


def node_key(node: fx.Node, block: Block) -> Key:
    """Return a key of ``node`` as ``block`` runs it.

    Operations with equal keys share a measurement.
    """
    return _call_key(
        call_of(node, block.mode_of(node)), lambda n: repr(tensor_key(n.meta.get("val")))
    )


def block_key(block: Block, storages: StorageTable) -> Key:
    """Return the key of a block; blocks with equal keys can share code.

    Keys also differ where inputs share a storage in one block only.
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
    """Return the key of a call: the function's name, and the arguments as text.

    Numbers that follow the sizes are equal only if their values are, as well.

    Args:
        call: function, arguments and keywords.
        describe: returns the text of a node among the arguments.
    """
    target, args, kwargs = call
    arguments = (args, dict(sorted(kwargs.items())))
    return (target_name(target), written(arguments, describe), *names_in(arguments).items())
