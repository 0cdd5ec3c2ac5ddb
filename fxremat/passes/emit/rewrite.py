"""From a program to the forward and backward graphs that AOTAutograd runs."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from fxremat import torch_compat
from fxremat.ir import Backward, Keep, Move
from fxremat.passes.emit.code import COMMENT, GROUP, ScheduleModule, compile_graph
from fxremat.passes.emit.program import Call, Program
from fxremat.passes.joint.sizes import Size, layouts_of
from fxremat.passes.stages.block import Block, Key, Mode, block_key, build_graph
from fxremat.passes.stages.linearize import Line, Role
from fxremat.runtime import transfer
from fxremat.runtime.views import tensor_in
from fxremat.units import format_bytes


@dataclass(frozen=True, slots=True)
class Travel:
    """What travels to host memory, and where it lies there.

    Attributes:
        moves: when each storage leaves and comes back.
        offsets: of each, in bytes from the start of a step's host memory.
        nbytes: of that memory.
        arena: the number by which emitted code finds it.
    """

    moves: tuple[Move, ...]
    offsets: dict[int, int]
    nbytes: int
    arena: int

    def names(self) -> dict[str, int]:
        """What the code of a step that follows its sizes calls these numbers, and what they are.

        For the same moves at other sizes the code needs no more than these.
        """
        slots = {slot_name(storage): offset for storage, offset in self.offsets.items()}
        sizes = {bytes_name(move.storage): move.nbytes for move in self.moves}
        return {**slots, **sizes, HOST_BYTES: self.nbytes}


HOST_BYTES = "HOST_BYTES"
"""Of the step's host memory, in code that follows sizes."""


def slot_name(storage: int) -> str:
    """Where a storage lies in it."""
    return f"SLOT{storage}"


def bytes_name(storage: int) -> str:
    """How large a storage is."""
    return f"BYTES{storage}"


@dataclass(slots=True)
class BlockModules:
    """One module for each distinct block: identical stages share theirs."""

    modules: dict[Key, fx.GraphModule] = field(default_factory=dict)
    known: dict[int, tuple[Block, fx.GraphModule]] = field(default_factory=dict)

    def of(self, block: Block, line: Line) -> fx.GraphModule:
        """The module that runs ``block``."""
        if id(block) not in self.known:  # the entry keeps the block, so its id, alive
            key = block_key(block, line.joint.storages)
            if key not in self.modules:
                self.modules[key] = compile_graph(build_graph(block))
            self.known[id(block)] = block, self.modules[key]
        return self.known[id(block)][1]


def rewrite(
    program: Program,
    peaks_bytes: Sequence[int],
    modules: BlockModules,
    travel: Travel | None = None,
) -> tuple[ScheduleModule, ScheduleModule]:
    """Emit the forward and the backward graph.

    Args:
        program: the calls.
        peaks_bytes: most memory held during each, for people.
        modules: blocks that are compiled already; new ones are added.
        travel: what is on the host over the turn.

    Ensures: the forward returns its outputs, then what the backward takes first: the
        tensors of ``program.saved`` that do not travel, and the host memory of those that
        do. Then the backward takes the tangents, and last what it gives gradients to
        (:class:`fxremat.runtime.gradients.Gradients`), each as soon as it is made and its
        primal is not read any more; it returns nothing. Each line of their code is one
        operation of the schedule.
    """
    joint = program.line.joint
    moves = travel.moves if travel else ()
    nodes = program.line.nodes
    away = {nodes[i] for move in moves for i in move.nodes}
    saved = tuple(node for node in program.saved if node not in away)
    forward = _Writer(program, modules, "forward")
    forward.take(joint.primals)
    if travel:
        forward.open(travel)
    for index in range(program.turn + 1):
        forward.leave(moves, index)
        if index < program.turn:
            forward.call(program.calls[index], peaks_bytes[index])
    backward = _Writer(program, modules, "backward")
    backward.take(saved)
    if travel:
        backward.take_host(travel)
    backward.take(joint.tangents)
    backward.take_gradients()
    handed = handed_after(program)
    for index in range(program.turn, len(program.calls)):
        backward.come_back(moves, index)
        backward.call(program.calls[index], peaks_bytes[index])
        backward.give(handed.get(index, ()))
    backward.give(handed.get(len(program.calls), ()))
    host = (_Writer.HOST,) if travel else ()
    return forward.finish((*joint.forward_outputs, *saved, *host)), backward.finish(())


def handed_after(program: Program) -> dict[int, list[int]]:
    """The primals whose gradients are handed over right after each call.

    That is after the call that makes the gradient, and after the last one that reads the primal:
    whoever takes the gradient may change the primal at once, as an optimizer in the backward does.
    Gradients that no call of the backward makes are handed over at the end.
    """
    joint, calls = program.line.joint, program.calls
    table = joint.storages
    made: dict[fx.Node, int] = {}
    last_read: dict[int, int] = {}
    for index in range(program.turn, len(calls)):
        made.update(dict.fromkeys(calls[index].block.outputs, index))
        last_read.update(dict.fromkeys(calls[index].block.reads, index))
    found: dict[int, list[int]] = {}
    for i, (primal, gradient) in enumerate(zip(joint.primals, joint.backward_outputs, strict=True)):
        if isinstance(gradient, fx.Node):
            reads = (last_read.get(storage, 0) for storage in table.of_node[primal])
            place = max(made.get(gradient, len(calls)), *reads, 0)
            found.setdefault(place, []).append(i)
    return found


_DESCRIBED = ("val", "desc", "tensor_meta")
"""What is told of a value in metadata."""


class _Writer:
    """Builds one of the two graphs."""

    HOST = object()
    """Among results: the step's host memory."""

    def __init__(self, program: Program, modules: BlockModules, name: str) -> None:
        self._line = program.line
        self._modules = modules
        self._name = name
        self._graph = fx.Graph()
        self._root = torch.nn.Module()
        self._values: dict[fx.Node, fx.Node] = {}
        self._back: dict[int, fx.Node] = {}

    def take(self, nodes: Iterable[fx.Node]) -> None:
        """Add a placeholder for each of ``nodes``."""
        for node in nodes:
            name = self._value_name(node)  # told, or fx makes one of the target: that takes long
            self._values[node] = self._graph.create_node("placeholder", name, name=name)
            self._describe(node)

    def open(self, travel: Travel) -> None:
        """Get the step's host memory."""
        self._travel = travel
        self._host = self._graph.create_node(
            "call_function",
            transfer.open_arena,
            (travel.arena, self._number(HOST_BYTES, travel.nbytes)),
            name="host",
        )
        self._describe_host(travel)
        self._host.meta[COMMENT] = f"{format_bytes(travel.nbytes)} on the host"

    def take_host(self, travel: Travel) -> None:
        """Get the step's host memory from the forward."""
        self._travel = travel
        self._host = self._graph.placeholder("host")
        self._describe_host(travel)

    def take_gradients(self) -> None:
        """Get what gradients are given to."""
        self._gradients = self._graph.placeholder("gradients")
        self._gradients.meta["val"] = None

    def give(self, primals: Iterable[int]) -> None:
        """Hand the gradients of ``primals`` over."""
        outputs = self._line.joint.backward_outputs
        made: Any = {
            i: self._value(node) for i in primals if isinstance(node := outputs[i], fx.Node)
        }
        if made:
            node = self._graph.call_method("give", (self._gradients, made))
            node.meta["val"] = None

    def _describe_host(self, travel: Travel) -> None:
        """As AOTAutograd wants it of everything that the forward hands to the backward."""
        example = self._line.nodes[travel.moves[0].nodes[0]].meta["val"]
        self._host.meta["val"] = example.new_empty(travel.nbytes, dtype=torch.uint8, device="cpu")

    def leave(self, moves: Iterable[Move], place: int) -> None:
        """Before call ``place``: copies to the host begin, and memory is given back."""
        for move in moves:
            if move.offload == place:
                self._run(transfer.offload, move, f"D2H {format_bytes(move.nbytes)}")
        for move in moves:
            if move.release == place:
                self._run(
                    transfer.release,
                    move,
                    f"frees {format_bytes(move.nbytes)} once copied",
                )

    def _run(self, target: Callable[..., object], move: Move, comment: str) -> None:
        value = self._values[self._line.nodes[move.nodes[0]]]
        offset = self._offset(move)
        node = self._graph.call_function(target, (value, self._host, offset))
        node.meta["val"] = None
        node.meta[COMMENT] = comment

    def come_back(self, moves: Iterable[Move], place: int) -> None:
        """Before call ``place``: copies back begin, and those it needs are waited for."""
        for move in sorted(moves, key=lambda m: m.wait):
            if move.prefetch == place:
                self._prefetch(move)
        for move in moves:
            if move.wait == place:
                self._wait(move)

    def _prefetch(self, move: Move) -> None:
        first = self._line.nodes[move.nodes[0]]
        value = first.meta["val"]
        nbytes = self._number(bytes_name(move.storage), move.nbytes)
        back = self._graph.create_node(
            "call_function",
            transfer.prefetch,
            (self._host, self._offset(move), nbytes, value.device),
            name=f"{self._value_name(first)}_bytes",
        )
        back.meta["val"] = value.new_empty(move.nbytes, dtype=torch.uint8)
        back.meta[COMMENT] = f"H2D {format_bytes(move.nbytes)}"
        self._back[move.storage] = back

    def _wait(self, move: Move) -> None:
        memory = self._back.pop(move.storage)
        waiting = self._graph.call_function(transfer.wait, (memory,))
        waiting.meta["val"] = None
        for node in map(self._line.nodes.__getitem__, move.nodes):
            value, (layout,) = node.meta["val"], layouts_of(node)
            place = (value.dtype, [*layout.shape], [*layout.stride], layout.offset)
            self._values[node] = self._graph.create_node(
                "call_function", tensor_in, (memory, *place), name=self._value_name(node)
            )
            self._values[node].meta["val"] = value

    def _offset(self, move: Move) -> int:
        return self._number(slot_name(move.storage), self._travel.offsets[move.storage])

    def _number(self, name: str, value: int) -> int:
        """``value``, under a name in the code where it follows the sizes of the step."""
        return Size.named(name, value) if self._line.joint.sizes else value

    def _value_name(self, node: fx.Node) -> str:
        """Boundaries are x, what a stage keeps is kept; the rest goes by its own name."""
        stage = self._line.stage_of.get(node)
        match self._line.role_of[node]:
            case Role.BOUNDARY:
                return f"x{stage}_{node.name}"
            case Role.SAVED:
                return f"kept{stage}_{node.name}"
            case _:
                return node.name

    def _describe(self, node: fx.Node) -> None:
        new = self._values[node]
        new.meta = {k: node.meta[k] for k in _DESCRIBED if k in node.meta}
        if self._line.role_of[node] is Role.SAVED:
            new.meta[GROUP] = f"kept{self._line.stage_of[node]}"

    def call(self, call: Call, peak_bytes: int) -> None:
        """Add the call and a value for each of its results."""
        module = self._modules.of(call.block, self._line)
        target = self._attach(self._block_name(call), module)
        arguments = tuple(self._value(n) for n in call.block.inputs)
        made = self._graph.call_module(target, arguments)
        made.meta["val"] = tuple(n.meta["val"] for n in call.block.outputs)
        made.meta[COMMENT] = self._comment(call, peak_bytes)
        made.meta[GROUP] = f"params{call.op.stage}"
        for index, node in enumerate(call.block.outputs):
            self._values[node] = self._graph.create_node(
                "call_function", operator.getitem, (made, index), name=self._value_name(node)
            )
            self._describe(node)
            if node in call.block.guests:  # a call gives one list at most
                self._values[node].meta.pop(GROUP, None)

    def _attach(self, name: str, module: fx.GraphModule) -> str:
        """Hang ``module`` into the root under ``name``, or a free name like it."""
        candidate, count = name, 1
        while getattr(self._root, candidate, module) is not module:
            count += 1
            candidate = f"{name}_{count}"
        if not hasattr(self._root, candidate):
            self._root.add_module(candidate, module)
        return candidate

    def _value(self, node: fx.Node) -> fx.Node:
        if node not in self._values:  # a constant: both graphs carry their own reference
            name = str(node.target)
            value: object = self._line.joint.module
            for part in name.split("."):
                value = getattr(value, part)
            flat = name.replace(".", "_")
            setattr(self._root, flat, value)
            self._values[node] = self._graph.get_attr(flat)
            self._describe(node)
        return self._values[node]

    def _comment(self, call: Call, peak_bytes: int) -> str:
        storages = self._line.joint.storages
        kept = [n for n in call.block.outputs if self._line.role_of[n] is Role.SAVED]
        parts = [str(call.op)]
        if call.rebuilds:
            parts = [f"rebuild {call.op.stage}"]
        elif call.block.mode is Mode.AGAIN:
            parts.append("again")
        if kept:
            parts.append(f"keeps {format_bytes(storages.total(storages.of(kept)))}")
        if call.block.again:
            made = storages.of(call.block.again) - storages.of(call.block.inputs)
            parts.append(f"rebuilds {format_bytes(storages.total(made))}")
        parts.extend(_overlapping(call.block))
        parts.append(f"peak {format_bytes(peak_bytes)}")
        return ", ".join(parts)

    def finish(self, results: Sequence[object]) -> ScheduleModule:
        """Return ``results`` and make a module of the graph."""
        values = [
            self._host if n is self.HOST else self._value(n) if isinstance(n, fx.Node) else n
            for n in results
        ]
        self._graph.output(tuple(values))  # type: ignore[arg-type]
        self._graph.lint()
        return ScheduleModule(self._root, self._graph, f"Fxremat{self._name.title()}")

    def _block_name(self, call: Call) -> str:
        stage = self._line.name_of(call.op.stage)
        if isinstance(call.op, Backward):
            return f"{stage}_backward"
        if call.rebuilds:
            return f"{stage}_rebuild"
        again = "_again" if call.block.mode is Mode.AGAIN else ""
        nosave = "" if call.op.keep is Keep.ALL else "_nosave"
        return f"{stage}_forward{nosave}{again}"


def _overlapping(block: Block) -> Iterable[str]:
    """What a call starts for a later one, and waits for of an earlier one."""
    starts = sum(torch_compat.group_of(node) is not None for node in block.guests)
    waits = sum(map(torch_compat.is_wait, block.guests))
    if starts:
        yield f"starts {starts} of a later call's collectives"
    if waits:
        yield f"waits for {waits} of an earlier call's collectives"
