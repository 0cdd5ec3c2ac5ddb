"""Rewrite a program to the forward and the backward that AOTAutograd runs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from torch import fx

from fxremat.ir import Backward, Keep, Move
from fxremat.passes.emit.body import (
    GIVE,
    GRADIENTS,
    HOST,
    PRIMALS,
    RETURN,
    Body,
    Statement,
    Variable,
)
from fxremat.passes.emit.code import Emitted, compile_graph, emitted
from fxremat.passes.emit.early import Early
from fxremat.passes.emit.program import Call, Program
from fxremat.passes.joint.sizes import Size, layouts_of
from fxremat.passes.stages.block import Block, Key, Mode, block_key, build_graph
from fxremat.passes.stages.linearize import Line, Role
from fxremat.runtime import transfer
from fxremat.runtime.host_parameter import fetch_early
from fxremat.runtime.views import tensor_in
from fxremat.units import format_bytes


@dataclass(frozen=True, slots=True)
class Travel:
    """What travels to host memory, and its place there.

    Attributes:
        moves: when each storage leaves and comes back.
        offsets: offset of each storage in the step's host memory, in bytes.
        nbytes: size of that memory.
        arena: the id by which emitted code finds it.
    """

    moves: tuple[Move, ...]
    offsets: dict[int, int]
    nbytes: int
    arena: int

    def names(self) -> dict[str, int]:
        """Return the offsets and sizes in host memory by their names in code that follows sizes.

        At other sizes, the same moves need no other numbers.
        """
        slots = {slot_name(storage): offset for storage, offset in self.offsets.items()}
        sizes = {bytes_name(move.storage): move.nbytes for move in self.moves}
        return {**slots, **sizes, HOST_BYTES: self.nbytes}


HOST_BYTES = "HOST_BYTES"
"""Name of the size of the step's host memory, in code that follows sizes."""


def slot_name(storage: int) -> str:
    """Return the name of a storage's offset in host memory, in code that follows sizes."""
    return f"SLOT{storage}"


def bytes_name(storage: int) -> str:
    """Return the name of a storage's size in bytes, in code that follows sizes."""
    return f"BYTES{storage}"


@dataclass(slots=True)
class BlockModules:
    """One module for each distinct block, so that identical stages share theirs.

    Attributes:
        modules: modules by what they compute.
        by_block: each block that was asked for, with its module, by the id of the block.
    """

    modules: dict[Key, fx.GraphModule] = field(default_factory=dict)
    by_block: dict[int, tuple[Block, fx.GraphModule]] = field(default_factory=dict)

    def of(self, block: Block, line: Line) -> fx.GraphModule:
        """Return the module that runs ``block``; it is compiled if no equal block has one."""
        if id(block) not in self.by_block:  # the entry keeps the block alive, and so its id
            key = block_key(block, line.joint.storages)
            if key not in self.modules:
                self.modules[key] = compile_graph(build_graph(block))
            self.by_block[id(block)] = block, self.modules[key]
        return self.by_block[id(block)][1]


def rewrite(
    program: Program,
    peaks_bytes: Sequence[int],
    modules: BlockModules,
    travel: Travel | None = None,
    early: Sequence[Early] = (),
) -> tuple[Emitted, Emitted]:
    """Return the code of the forward and of the backward that carry out ``program``.

    Args:
        program: the calls.
        peaks_bytes: peak during each call, for comments.
        modules: blocks that are compiled already; new ones are added.
        travel: what is on the host at the loss point.
        early: copies of parameters that start before the call that reads them.

    Ensures: the forward returns its outputs, then the first inputs of the backward: the tensors of
        ``program.saved`` that do not travel, and the host memory of those that do. Then the
        backward takes the tangents, and last the receiver of gradients
        (:class:`fxremat.runtime.gradients.Gradients`). It hands over each gradient as soon as it is
        computed and its primal is not read any more, and returns nothing. Each line of code is one
        operation of the schedule.
    """
    joint = program.line.joint
    moves = travel.moves if travel else ()
    nodes = program.line.nodes
    away = {nodes[i] for move in moves for i in move.nodes}
    saved = tuple(node for node in program.saved if node not in away)
    forward = _GraphWriter(program, modules)
    forward.take(joint.primals)
    if travel:
        forward.open(travel)
    for index in range(program.loss_point + 1):
        forward.leave(moves, index)
        if index < program.loss_point:
            forward.fetch(early, index)
            forward.call(program.calls[index], peaks_bytes[index])
    backward = _GraphWriter(program, modules)
    backward.take(saved)
    if travel:
        backward.take_host(travel)
    backward.take(joint.tangents)
    backward.take_gradients()
    handed = handed_after(program)
    for index in range(program.loss_point, len(program.calls)):
        backward.come_back(moves, index)
        backward.fetch(early, index)
        backward.call(program.calls[index], peaks_bytes[index])
        backward.give(handed.get(index, ()))
    backward.give(handed.get(len(program.calls), ()))
    host = (forward.host,) if travel else ()
    return forward.finish((*joint.forward_outputs, *saved, *host)), backward.finish(())


def handed_after(program: Program) -> dict[int, list[int]]:
    """Return the indices of the primals whose gradients are handed over right after each call.

    That is after the call that computes the gradient, and after the last one that reads the primal:
    the receiver may change the primal at once, as an optimizer in the backward does. Gradients that
    no call of the backward computes are handed over at the end, under the number of calls.
    """
    joint, calls = program.line.joint, program.calls
    table = joint.storages
    made: dict[fx.Node, int] = {}
    last_read: dict[int, int] = {}
    for index in range(program.loss_point, len(calls)):
        made.update(dict.fromkeys(calls[index].block.outputs, index))
        last_read.update(dict.fromkeys(calls[index].block.reads, index))
    handed: dict[int, list[int]] = {}
    for i, (primal, gradient) in enumerate(zip(joint.primals, joint.backward_outputs, strict=True)):
        if isinstance(gradient, fx.Node):
            reads = (last_read.get(storage, 0) for storage in table.of_node[primal])
            call = max(made.get(gradient, len(calls)), *reads, 0)
            handed.setdefault(call, []).append(i)
    return handed


class _GraphWriter:
    def __init__(self, program: Program, modules: BlockModules) -> None:
        self._line = program.line
        self._modules = modules
        self._body = Body()
        self._values: dict[fx.Node, Variable] = {}
        self._back: dict[int, Variable] = {}

    def take(self, nodes: Iterable[fx.Node]) -> None:
        """Add an input of the code for each of ``nodes``."""
        primals = sum(value.primal is not None for value in self._body.takes)
        for node in nodes:
            value = self._made(node)
            if node.op == "placeholder" and node.name.startswith(PRIMALS):
                value.primal, value.given = primals, True
                primals += 1
            self._body.takes.append(value)

    def open(self, travel: Travel) -> None:
        self._travel, self.host = travel, Variable(HOST)
        nbytes = self._number(HOST_BYTES, travel.nbytes)
        comment = f"{format_bytes(travel.nbytes)} on the host"
        self._body.statements.append(
            Statement(transfer.open_arena, (travel.arena, nbytes), [self.host], comment=comment)
        )

    def take_host(self, travel: Travel) -> None:
        """Add the step's host memory, which the forward has opened, as an input of the code."""
        self._travel, self.host = travel, Variable(HOST)
        self._body.takes.append(self.host)

    def take_gradients(self) -> None:
        self._gradients = Variable(GRADIENTS)
        self._body.takes.append(self._gradients)

    def give(self, primals: Iterable[int]) -> None:
        outputs = self._line.joint.backward_outputs
        made = {i: self._variable(node) for i in primals if isinstance(node := outputs[i], fx.Node)}
        if made:
            self._body.statements.append(Statement(GIVE, (self._gradients, made)))

    def leave(self, moves: Iterable[Move], place: int) -> None:
        """Start copies to the host before call ``place``, and release memory that was copied.

        Statements that do so are added to the code.
        """
        for move in moves:
            if move.offload == place:
                self._add_transfer(transfer.offload, move, f"D2H {format_bytes(move.nbytes)}")
        for move in moves:
            if move.release == place:
                self._add_transfer(
                    transfer.release,
                    move,
                    f"frees {format_bytes(move.nbytes)} once copied",
                )

    def _add_transfer(self, target: Callable[..., object], move: Move, comment: str) -> None:
        value = self._values[self._line.nodes[move.nodes[0]]]
        self._body.statements.append(
            Statement(target, (value, self.host, self._offset(move)), comment=comment)
        )

    def come_back(self, moves: Iterable[Move], place: int) -> None:
        """Start copies back before call ``place``, and wait for those that the call needs.

        Statements that do so are added to the code.
        """
        for move in sorted(moves, key=lambda m: m.wait):
            if move.prefetch == place:
                self._prefetch(move)
        for move in moves:
            if move.wait == place:
                self._wait(move)

    def fetch(self, early: Iterable[Early], place: int) -> None:
        """Start copies of parameters before call ``place``."""
        for own in early:
            if own.begin == place:
                name = self._body.named(f"{own.source.name}_early", own)
                arguments = (self._variable(own.source), own.node.args[1])
                comment = f"H2D {format_bytes(own.nbytes)}"
                self._body.statements.append(
                    Statement(fetch_early, arguments, [Variable(name)], comment=comment)
                )

    def _prefetch(self, move: Move) -> None:
        first = self._line.nodes[move.nodes[0]]
        nbytes = self._number(bytes_name(move.storage), move.nbytes)
        back = Variable(self._body.named(f"{self._value_name(first)}_bytes", move))
        arguments = (self.host, self._offset(move), nbytes, first.meta["val"].device)
        comment = f"H2D {format_bytes(move.nbytes)}"
        self._body.statements.append(
            Statement(transfer.prefetch, arguments, [back], comment=comment)
        )
        self._back[move.storage] = back

    def _wait(self, move: Move) -> None:
        memory = self._back.pop(move.storage)
        self._body.statements.append(Statement(transfer.wait, (memory,)))
        for node in map(self._line.nodes.__getitem__, move.nodes):
            (layout,) = layouts_of(node)
            place = (node.meta["val"].dtype, [*layout.shape], [*layout.stride], layout.offset)
            value = Variable(self._body.named(self._value_name(node), node))
            self._body.statements.append(Statement(tensor_in, (memory, *place), [value]))
            self._values[node] = value

    def _offset(self, move: Move) -> int:
        return self._number(slot_name(move.storage), self._travel.offsets[move.storage])

    def _number(self, name: str, value: int) -> int:
        """Return ``value``; if the code follows the sizes of the step, as the symbol ``name``."""
        return Size.named(name, value) if self._line.joint.sizes else value

    def _value_name(self, node: fx.Node) -> str:
        """Return a name for ``node``: with prefix ``x`` for a boundary, ``kept`` if it is saved."""
        stage = self._line.stage_of.get(node)
        match self._line.role_of[node]:
            case Role.BOUNDARY:
                return f"x{stage}_{node.name}"
            case Role.SAVED:
                return f"kept{stage}_{node.name}"
            case _:
                return node.name

    def _made(self, node: fx.Node) -> Variable:
        """Return a new variable for ``node``; only tensors that one stage saves share a list."""
        saved = self._line.role_of[node] is Role.SAVED
        value = self._values[node] = Variable(
            self._body.named(self._value_name(node), node),
            group=f"kept{self._line.stage_of[node]}" if saved else None,
        )
        return value

    def call(self, call: Call, peak_bytes: int) -> None:
        """Add a statement that runs ``call``, and a variable for each of its results."""
        block = call.block
        module = self._modules.of(block, self._line)
        arguments = [self._variable(node) for node in block.inputs]
        statement = Statement(
            self._body.stage(self._block_name(call), module),
            arguments,
            [self._made(node) for node in block.outputs],
            comment=self._comment(call, peak_bytes),
            params=f"params{call.op.stage}",
        )
        self._body.statements.append(statement)

    def _variable(self, node: fx.Node) -> Variable:
        if node not in self._values:  # a constant, which forward and backward both refer to
            name = str(node.target)
            constant: object = self._line.joint.module
            for part in name.split("."):
                constant = getattr(constant, part)
            flat = self._body.named(name.replace(".", "_"), node)
            self._body.constants[flat] = constant
            self._values[node] = Variable(flat, given=True)
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
        parts.append(f"peak {format_bytes(peak_bytes)}")
        return ", ".join(parts)

    def finish(self, results: Iterable[object]) -> Emitted:
        """Add a statement that returns ``results``, and return the code.

        Args:
            results: nodes, variables, or numbers.
        """
        values = [self._variable(x) if isinstance(x, fx.Node) else x for x in results]
        self._body.statements.append(Statement(RETURN, values))
        return emitted(self._body)

    def _block_name(self, call: Call) -> str:
        stage = self._line.name_of(call.op.stage)
        if isinstance(call.op, Backward):
            return f"{stage}_backward"
        if call.rebuilds:
            return f"{stage}_rebuild"
        again = "_again" if call.block.mode is Mode.AGAIN else ""
        nosave = "" if call.op.keep is Keep.ALL else "_nosave"
        return f"{stage}_forward{nosave}{again}"
