"""What a step holds in memory, as a record for people."""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import PurePath

import torch
from torch import fx

from fxremat import torch_compat
from fxremat.ir import Move, Request
from fxremat.passes.emit.program import Call, Program
from fxremat.passes.emit.readers import readers_of, recomputation_of
from fxremat.passes.joint.constraints import constraint_of
from fxremat.passes.joint.graph import JointGraph
from fxremat.passes.stages.linearize import Line
from fxremat.planner.allocator.allocations import HELD_ON, requests_of_step
from fxremat.planner.allocator.footprints import WORKSPACE, Footprints
from fxremat.planner.context.context_bytes import ContextBytes
from fxremat.report.facts import Decided
from fxremat.report.memory import EXISTING, CodeLine, Kind, Life, StepMemory, Tensor, Waiting
from fxremat.report.modules import common_module
from fxremat.units import plural

_WORKSPACE = "workspace of "

_BESIDE = {
    Kind.GRADIENTS: EXISTING,
    Kind.OPTIMIZER: "optimizer state",
    Kind.RESERVE: "reserve",
}


def roles_of(
    tensors: Mapping[int, torch.Tensor],
    resident: Iterable[torch.Tensor],
    places: Mapping[int, str],
) -> dict[int, Kind]:
    """Return for each primal whether it is a parameter, a buffer of the model, or an input.

    Args:
        tensors: values of primals, by index.
        resident: tensors of the model, and arguments.
        places: primals that are arguments of the call.
    """
    owned = {id(tensor) for tensor in resident}
    roles = {}
    for index, tensor in tensors.items():
        is_owned = id(tensor) in owned and index not in places
        is_trained = isinstance(tensor, torch.nn.Parameter) or (is_owned and tensor.requires_grad)
        roles[index] = Kind.PARAMETERS if is_trained else Kind.BUFFERS if is_owned else Kind.INPUTS
    return roles


def record_memory(
    program: Program,
    context_bytes: ContextBytes,
    footprints: Footprints,
    moves: tuple[Move, ...],
    *,
    roles: Mapping[int, Kind],
    held_outside: Mapping[Kind, int],
    again_s: Mapping[fx.Node, float],
) -> StepMemory:
    """Return which tensors are held, from when to when, while ``program`` runs.

    Args:
        program: the calls of operations.
        context_bytes: what is held at the call of the step beyond what the graph allocates.
        footprints: the footprints of the program's line.
        moves: storages that are moved to host memory and back.
        roles: what primals are, where that is known.
        held_outside: bytes that are held before the step, by kind, and belong to no primal:
            gradients, optimizer state and reserve. The rest is recorded as one tensor.
        again_s: seconds of each operation that a recomputation may run.

    Ensures: the most at the instants of an operation, and what is held at the last of them, are
    those of an evaluation.
    """
    line = program.line
    requests = requests_of_step(program, context_bytes, footprints, moves)
    record = _Record(line)
    for tensor in _given(line.joint, context_bytes, roles, held_outside):
        record.take(tensor, (tensor.kind, 0))
    calls: list[int] = []
    loss_point = 0
    for index, (call, asked) in enumerate(zip(program.calls, requests.calls, strict=True)):
        if index == program.loss_point:
            loss_point = record.pass_loss_point(requests.loss_point, context_bytes)
        released = sum(m.release == index < program.loss_point for m in moves)
        record.follow(asked[:released])
        calls.append(record.next())
        record.follow(asked[released:], record.workspaces(call, footprints))
        record.next()
    if program.loss_point == len(program.calls):
        loss_point = record.pass_loss_point(requests.loss_point, context_bytes)
    end = record.next()
    needed = "step of the optimizer" if context_bytes.end_is_step else "copy of a gradient"
    record.follow(requests.end, [Tensor(needed, 0, Kind.WORKSPACES)])
    modules = tuple(
        common_module(map(torch_compat.module_path, s.forward or s.backward)) for s in line.stages
    )
    tensors, lives = record.done()
    return StepMemory(
        tensors=tensors,
        lives=lives,
        calls=tuple(calls),
        loss_point=loss_point,
        end=end,
        modules=modules,
        lines=tuple(record.lines),
        waiting=record.waiting_tensors(readers_of(program), again_s),
        again_s=tuple(again_s[node] for node in record.runs),
    )


def describe_peak(program: Program, context_bytes: ContextBytes, footprints: Footprints) -> str:
    """Return which operation needs the most memory of ``program``, as a phrase for a message.

    Such a phrase is ``"addmm in module blocks.3.mlp, at model.py:23 (operation B 13)"``.
    """
    memory = record_memory(
        program, context_bytes, footprints, (), roles={}, held_outside={}, again_s={}
    )
    instant = memory.peak_instant
    if instant == memory.loss_point:
        return "the loss point, between forward and backward"
    if instant == memory.end:
        if context_bytes.end_is_step:
            return "the optimizer's step, with the largest parameter's state"
        return "the end of the backward, when all gradients exist"
    op = program.calls[bisect_right(memory.calls, instant) - 1].op
    alive = memory.alive(instant)
    made = [life for life in alive if memory.tensors[life.tensor].operation]
    last = max(made or alive, key=lambda life: (life.begin, memory.tensors[life.tensor].nbytes))
    tensor, joint = memory.tensors[last.tensor], program.line.joint
    name = tensor.name.removeprefix(_WORKSPACE)
    lines = (_line_of(node) for node in (*joint.forward, *joint.backward) if node.name == name)
    module = tensor.module or memory.modules[op.stage]
    what = tensor.operation + f" in module {module}" * bool(module)
    line = next(lines, "")
    return f"{what}, at {line} (operation {op})" if line else f"{what} (operation {op})"


def _line_of(node: fx.Node) -> str:
    """Return ``file:line`` of the user's code that an operation comes from; empty if not known."""
    lines = torch_compat.user_lines(node.stack_trace or "")
    return f"{lines[-1].file}:{lines[-1].number}" if lines else ""


def _given(
    joint: JointGraph,
    context_bytes: ContextBytes,
    roles: Mapping[int, Kind],
    held_outside: Mapping[Kind, int],
) -> Iterator[Tensor]:
    """Yield what is held before the step, as one tensor for each kind, such as all parameters."""
    table = joint.storages
    storages: dict[Kind, set[int]] = {
        kind: set() for kind in (Kind.PARAMETERS, Kind.BUFFERS, Kind.INPUTS)
    }
    counted: set[int] = set()
    for index, node in enumerate((*joint.primals, *joint.constants)):
        is_primal = index < len(joint.primals)
        likely = is_primal and joint.backward_outputs[index] is not None
        kind = roles.get(index, Kind.PARAMETERS if likely else Kind.INPUTS)
        new = {*table.of_node[node]} - counted
        storages[kind if is_primal else Kind.BUFFERS] |= new
        counted |= new
    for kind, own in storages.items():
        yield Tensor(plural(len(own), kind.value.removesuffix("s")), table.total(own), kind)
    for kind, nbytes in held_outside.items():
        yield Tensor(_BESIDE[kind], nbytes, kind)
    other = context_bytes.given_bytes - table.total(counted) - sum(held_outside.values())
    yield Tensor("what else is held", other, Kind.OTHER)


_LOSS = Tensor("loss outside the model", 0, Kind.LOSS)
_TANGENT = Tensor("gradient of an output", 0, Kind.LOSS)

Key = tuple[Kind | None, int]
"""What identifies a tensor: its storage, or its kind where no storage has a number."""


@dataclass(slots=True)
class _Record:
    """Turns requests to the allocator into the lives of tensors, measured in instants."""

    line: Line
    tensors: dict[Tensor, int] = field(default_factory=dict)
    lives: list[Life] = field(default_factory=list)
    open: defaultdict[Key, list[tuple[Tensor, int]]] = field(
        default_factory=lambda: defaultdict(list)
    )
    of_storage: dict[int, Tensor] = field(default_factory=dict)
    lines: dict[CodeLine, int] = field(default_factory=dict)
    runs: dict[fx.Node, int] = field(default_factory=dict)
    waiting: frozenset[int] = frozenset()
    gradients: frozenset[int] = field(init=False)
    tangents: frozenset[int] = field(init=False)
    results: frozenset[int] = field(init=False)
    outputs: frozenset[int] = field(init=False)
    forward: frozenset[fx.Node] = field(init=False)
    now: int = 0
    gave: bool = False

    def __post_init__(self) -> None:
        joint = self.line.joint
        self.gradients = joint.storages.of(joint.gradients)
        self.tangents = joint.storages.of(joint.tangents)
        made = (node for node in joint.results if node in joint.storages.of_node)
        self.results = joint.storages.of(made)
        self.outputs = self.results - joint.saved
        self.forward = frozenset(joint.forward)

    def next(self) -> int:
        """Begin the next instant, and return its number."""
        self.now, self.gave = self.now + 1, False
        return self.now

    def take(self, tensor: Tensor, key: Key) -> None:
        """Record that ``tensor`` is held from now on, under ``key``."""
        if self.gave:
            self.next()
        self.open[key].append((tensor, self.now))

    def give(self, key: Key) -> Tensor:
        """Record that the latest tensor of ``key`` is released at the next instant; return it."""
        tensor, begin = self.open[key].pop()
        self._live(tensor, begin, self.now + 1)
        self.gave = True
        return tensor

    def follow(self, requests: Iterable[Request], workspaces: Iterable[Tensor] = ()) -> None:
        """Record the tensors that ``requests`` allocate and free.

        Args:
            requests: requests to the allocator, in order.
            workspaces: the workspaces that the requests for workspaces allocate, in order.
        """
        workspaces = iter(workspaces)
        for key, nbytes in requests:
            if nbytes < 0:
                self.give((None, key))
            elif key == WORKSPACE:
                self.take(replace(next(workspaces, _LOSS), nbytes=nbytes), (None, key))
            elif key in self.tangents or key == HELD_ON:
                self.take(replace(_TANGENT, nbytes=nbytes), (None, key))
            else:
                self.take(self._of(key), (None, key))

    def pass_loss_point(self, requests: tuple[Request, ...], context_bytes: ContextBytes) -> int:
        """Record what is allocated and freed between forward and backward; return that instant."""
        released = sum(nbytes < 0 <= key for key, nbytes in requests)
        self.follow(requests[:released])
        self.waiting = frozenset(key for (kind, key), own in self.open.items() if own and not kind)
        if context_bytes.released_bytes:
            self.shrink(Kind.OTHER, context_bytes.released_bytes)
        gone_bytes = sum(context_bytes.tangent_each_bytes) - context_bytes.tangent_bytes
        gone_bytes = max(0, gone_bytes - context_bytes.cleared_bytes)
        made_bytes = sum(n for key, n in requests[released:] if n > 0 and key != WORKSPACE)
        early_bytes = min(gone_bytes, max(0, made_bytes - context_bytes.loss_point_bytes))
        self.drop_outputs(early_bytes)
        instant = self.next()
        self.follow(requests[released:])
        if context_bytes.cleared_bytes:
            kind = Kind.GRADIENTS if self.open[Kind.GRADIENTS, 0] else Kind.OTHER
            self.shrink(kind, context_bytes.cleared_bytes)
        self.drop_outputs(gone_bytes - early_bytes)
        return instant

    def drop_outputs(self, nbytes: int) -> None:
        """Release ``nbytes`` of the forward's outputs at the next instant, as the loop does.

        What exceeds the outputs is released from the tensor that stands for everything else.
        """
        for key in sorted(self.outputs):
            if nbytes > 0 and self.open[None, key]:
                tensor = self.give((None, key))
                kept_bytes = max(0, tensor.nbytes - nbytes)
                self.open[None, key].append((replace(tensor, nbytes=kept_bytes), self.now + 1))
                nbytes -= tensor.nbytes - kept_bytes
        if nbytes > 0:
            self.shrink(Kind.OTHER, nbytes)

    def shrink(self, kind: Kind, nbytes: int) -> None:
        """Release ``nbytes`` of the tensor that stands for all of ``kind``, at the next instant."""
        tensor = self.give((kind, 0))
        left = replace(tensor, nbytes=tensor.nbytes - nbytes)
        self.open[kind, 0].append((left, self.now + 1))

    def workspaces(self, call: Call, footprints: Footprints) -> Iterator[Tensor]:
        """Yield the workspaces of a call's operations, in order, without their bytes.

        The call's allocation requests have the bytes.
        """
        for step in footprints.steps(call.block):
            if step.workspace_bytes > 0 and step.node is not None:
                name, operation = f"{_WORKSPACE}{step.node.name}", _operation(step.node)
                module, line = torch_compat.module_path(step.node), self._line_of(step.node)
                stage = call.op.stage
                yield Tensor(name, 0, Kind.WORKSPACES, stage, operation, module, line)

    def waiting_tensors(
        self, readers: Mapping[int, tuple[int, ...]], again_s: Mapping[fx.Node, float]
    ) -> tuple[Waiting, ...]:
        """Return the tensors that are held from the forward to the backward, by ascending index.

        Args:
            readers: indices of the calls that read each storage.
            again_s: seconds of each operation that a recomputation may run.
        """
        if not again_s:  # of a graph that is not planned yet
            return ()
        held = self.waiting - self.outputs
        found = []
        for storage in sorted(self.waiting & self.of_storage.keys()):
            tensor = self.of_storage[storage]
            if tensor not in self.tensors:  # it is empty
                continue
            own = Waiting(self.tensors[tensor], readers.get(storage, ()))
            if tensor.kind is Kind.ACTIVATIONS:
                again = recomputation_of(self.line, storage, held - {storage}, again_s)
                if again is not None:
                    needs = sorted(self.tensors[self._of(need)] for need in again.needs)
                    runs = (self.runs.setdefault(node, len(self.runs)) for node in again.runs)
                    own = replace(own, runs=tuple(sorted(runs)), needs=tuple(needs))
            found.append(own)
        return tuple(sorted(found, key=lambda own: own.tensor))

    def done(self) -> tuple[tuple[Tensor, ...], tuple[Life, ...]]:
        """Return all tensors, and their lives; what was not released is held until the end."""
        end = self.now + 1
        for own in self.open.values():
            for tensor, begin in own:
                self._live(tensor, begin, end)
        self.lives.sort(key=lambda life: (life.begin, life.tensor))
        return tuple(self.tensors), tuple(self.lives)

    def _live(self, tensor: Tensor, begin: int, end: int) -> None:
        """Record that ``tensor`` is held from instant ``begin`` to ``end``, unless it is empty."""
        if tensor.nbytes:
            self.lives.append(Life(self.tensors.setdefault(tensor, len(self.tensors)), begin, end))

    def _of(self, storage: int) -> Tensor:
        """Return the record of a storage of the graph, by the storage's number."""
        if storage not in self.of_storage:
            joint = self.line.joint
            owner = joint.storages.owner[storage]
            if storage in self.gradients:
                kind = Kind.GRADIENTS
            elif storage in self.results:
                kind = Kind.OUTPUTS
            elif owner in self.forward:
                kind = Kind.ACTIVATIONS
            else:
                kind = Kind.PASSING
            self.of_storage[storage] = Tensor(
                owner.name,
                joint.storages.nbytes[storage],
                kind,
                self.line.stage_of.get(owner, -1),
                _operation(owner),
                torch_compat.module_path(owner),
                self._line_of(owner),
            )
        return self.of_storage[storage]

    def _line_of(self, node: fx.Node) -> int:
        """Return the index of the line of the model that an operation comes from; -1 if unknown."""
        lines = torch_compat.user_lines(node.stack_trace or "")
        if not lines:
            return -1
        own = CodeLine(_short(lines[-1].file), lines[-1].number, lines[-1].code)
        return self.lines.setdefault(own, len(self.lines))


def _short(file: str) -> str:
    """Return the path of a file in its installed package; of any other file its name."""
    parts = PurePath(file).parts
    for folder in ("site-packages", "dist-packages"):
        if folder in parts:
            return "/".join(parts[parts.index(folder) + 1 :])
    return parts[-1] if parts else file


def decided_in(line: Line) -> tuple[Decided, ...]:
    """Return the operations of a line that a policy or a tag decides about, each once."""
    found: dict[str, Decided] = {}
    for node in line.joint.forward:
        own = constraint_of(node)
        if own is not None and node in line.stage_of:
            made = Decided(line.stage_of[node], own.operation, own.answer, own.by)
            found.setdefault(own.operation, made)
    return tuple(found.values())


def _operation(node: fx.Node) -> str:
    """Return the operation of a node without namespace and overload, e.g. ``"addmm"``."""
    packet = getattr(node.target, "overloadpacket", node.target)
    return str(getattr(packet, "__name__", packet))
