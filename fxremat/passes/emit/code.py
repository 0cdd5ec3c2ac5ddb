"""Emitted graphs: their code reads as the schedule, and frees each tensor at its last use."""

from __future__ import annotations

import linecache
import operator
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import count, groupby
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import fx

from fxremat import torch_compat
from fxremat.passes.joint.sizes import MODULES, names_in

GROUP = "fxremat_group"
"""Metadata of a value: the list it belongs to in the code; of a call: its parameters'."""

COMMENT = "fxremat_comment"
"""Metadata of a call: what it does, for people."""

WIDTH = 100
"""Columns of emitted code."""

PRIMALS = "primals"
"""AOTAutograd's name for parameters, buffers and inputs; here the list of them."""

ARENA = "ARENA"
"""A step's host memory in the code: its number is another in each process."""

FOLLOWS = "fxremat_follows"
"""Metadata of a module: its code names sizes, which it finds among its globals."""

_serial = count()


class ScheduleModule(torch_compat.GraphOfModules):
    """A graph of calls to stage submodules whose code takes its inputs in one list.

    The code empties the list it is given, passes each submodule a list of its own, and
    drops its own names of what is read last before the call, so that the submodule can
    free it as soon as it is done with it. The graph stays an ordinary graph: an
    interpreter computes the same with it.
    """

    _boxed_call = True

    @property
    def graphs(self) -> ScheduleModule:
        """Of the calls, and of what they call."""
        return self

    def calls(self) -> Iterator[tuple[str, torch_compat.BoxedCallable]]:
        """Each submodule's name, and what its calls run."""
        for name, stage in self.stages():
            yield name, stage.forward

    def stages(self) -> Iterator[tuple[str, torch.nn.Module]]:
        """Each submodule by the names that the code calls it; one may have several."""
        for name, stage in self._modules.items():
            assert stage is not None
            yield name, stage

    def call_by(self, name: str, run: torch_compat.BoxedCallable) -> None:
        """Have the code's calls of submodule ``name`` made by ``run``."""
        type(self).forward.__globals__[name] = run

    def at(self, names: Mapping[str, int]) -> SizedSchedule:
        """The same graph at other sizes; microseconds for each stage.

        Args:
            names: of sizes in the code, and their values; those of the capture for all others.
        """
        return SizedSchedule(self, names)

    def recompile(self) -> Any:
        """Write the code anew after a change of the graph."""
        source = render(self.graph)
        file_name = f"<fxremat {next(_serial)}>"
        scope: dict[str, Any] = {"inf": float("inf"), "nan": float("nan"), "torch": torch}
        scope["device"] = torch.device
        for node in self.graph.nodes:
            if _is_transfer(node):
                scope[_bare_name(node)] = node.target
            if _is_transfer(node) or node.op == "output":
                scope |= _names_at(node)
            if _opens_arena(node):
                scope[ARENA] = node.args[0]
        exec(compile(source, file_name, "exec"), scope)
        # Tracebacks show the emitted lines.
        linecache.cache[file_name] = (len(source), None, source.splitlines(True), file_name)
        weakref.finalize(self, linecache.cache.pop, file_name, None).atexit = False
        self.take_code(source, scope["forward"])
        # Its forward, found at once: calling a module takes microseconds, for hooks of nobody.
        for name, call in self.calls():
            self.call_by(name, call)


class SizedSchedule:
    """A :class:`ScheduleModule` at other sizes: the code is the same, its globals are its own.

    Args:
        module: at the sizes of the capture.
        names: of sizes in the code, and their values.
    """

    _boxed_call = True

    def __init__(self, module: ScheduleModule, names: Mapping[str, int]) -> None:
        self._module, self._names = module, names
        self._runs = {
            name: _sized(stage, names, {}) if _follows(stage) else stage.forward
            for name, stage in module.stages()
        }
        self.code: str = module.code
        self.forward: torch_compat.BoxedCallable = _sized(module, names, self._runs)

    def __call__(self, args: list[Any]) -> Sequence[Any]:
        """Run the graph; ``args`` is emptied."""
        return self.forward(args)

    @property
    def graphs(self) -> ScheduleModule:
        """As of the module."""
        return self._module

    def at(self, names: Mapping[str, int]) -> SizedSchedule:
        """As of the module; what is not named stays."""
        return SizedSchedule(self._module, {**self._names, **names})

    def calls(self) -> Iterator[tuple[str, torch_compat.BoxedCallable]]:
        """As of the module."""
        yield from self._runs.items()

    def call_by(self, name: str, run: torch_compat.BoxedCallable) -> None:
        """As of the module."""
        self.forward.__globals__[name] = run


def _follows(stage: torch.nn.Module) -> bool:
    return isinstance(stage, fx.GraphModule) and FOLLOWS in stage.meta


def _sized(
    module: torch.nn.Module,
    names: Mapping[str, int],
    runs: Mapping[str, torch_compat.BoxedCallable],
) -> torch_compat.BoxedCallable:
    """The forward of ``module`` with other globals."""
    function: Any = type(module).forward
    scope = {**function.__globals__, **names, **runs}
    return MethodType(FunctionType(function.__code__, scope, function.__name__), module)


def _names_at(node: fx.Node) -> dict[str, Any]:
    """What sizes in the arguments of ``node`` name; nothing where there are none."""
    names = names_in((node.args, node.kwargs))
    return {**MODULES, **names} if names else {}


def render(graph: fx.Graph) -> str:
    """Python code of a graph of submodule calls.

    Requires: its nodes are placeholders, ``get_attr``, ``call_module`` and the
        ``getitem`` of their results, operations of the runtime, which return one
        tensor or nothing, and methods that take tensors by number.
    """
    return _Renderer(graph).source()


class _Renderer:
    def __init__(self, graph: fx.Graph) -> None:
        self._nodes = list(graph.nodes)
        self._index = {node: i for i, node in enumerate(self._nodes)}
        self._primals = {n: i for i, n in enumerate(filter(_is_primal, self._nodes))}
        self._places: dict[fx.Node, dict[int, int]] = {}  # by reader: where it first reads each
        self._lists = dict.fromkeys(self._primals, PRIMALS) | self._find_lists()
        self._parameters: dict[tuple[str, ...], str] = {}
        self._lines: list[str] = []

    def source(self) -> str:
        placeholders = [n for n in self._nodes if n.op == "placeholder"]
        self._take(placeholders)
        constants = [n for n in self._nodes if n.op == "get_attr"]
        self._lines.extend(f"{node.name} = self.{node.target}" for node in constants)
        body_start = len(self._lines)
        for node in self._nodes:
            if node.op == "call_module":
                self._call(node)
            elif _is_transfer(node):
                self._transfer(node)
            elif node.op == "call_method":
                self._give(node)
            elif node.op == "output":
                results = ", ".join(self._names(node.args[0]))
                self._lines.extend(_wrap("return [", results, "]"))
        parameters = [
            line for names, name in self._parameters.items() for line in _assign_list(name, names)
        ]
        self._lines[body_start:body_start] = parameters
        return "def forward(self, args):\n" + "".join(f"    {line}\n" for line in self._lines)

    def _find_lists(self) -> dict[fx.Node, str]:
        """Values that can live in one list: made together, read together."""
        lists: dict[fx.Node, str] = {}
        taken: dict[str, object] = {}
        for key, run in groupby(self._nodes, key=self._list_key):
            members = list(run)
            if key is None or not all(self._adjoin(members, user) for user in members[0].users):
                continue
            if taken.setdefault(str(key[0]), key) is not key:
                continue
            lists.update(dict.fromkeys(members, str(key[0])))
        return lists

    def _adjoin(self, members: Sequence[fx.Node], user: fx.Node) -> bool:
        """Whether ``user`` reads ``members`` one right after the other, in their order."""
        if user not in self._places:
            values: Any = user.args[0] if user.op == "output" else user.args
            self._places[user] = {id(value): i for i, value in reversed([*enumerate(values)])}
        places = self._places[user]
        begin = places.get(id(members[0]), 0)
        return all(places.get(id(node)) == begin + i for i, node in enumerate(members))

    def _list_key(self, node: fx.Node) -> tuple[object, ...] | None:
        if GROUP not in node.meta or node.op not in ("placeholder", "call_function"):
            return None
        source = node.args[0] if node.op == "call_function" else None
        readers = tuple(user for user in node.users if user.target is not operator.getitem)
        if any(_is_transfer(reader) or reader.op == "call_method" for reader in readers):
            return None
        return (node.meta[GROUP], source, readers)

    def _take(self, placeholders: Sequence[fx.Node]) -> None:
        """Bind the inputs: neighbours of one list by a slice, others by one assignment."""
        start = 0
        for name, run in groupby(placeholders, key=self._list_of):
            nodes = list(run)
            end = start + len(nodes)
            if name is not None:
                self._lines.append(f"{name} = args[{start}:{end}]")
            else:
                names = ", ".join(n.name for n in nodes)
                self._lines.extend(_wrap("[", names, f"] = args[{start}:{end}]"))
            start = end
        self._lines.append("args.clear()")

    def _call(self, node: fx.Node) -> None:
        comment = f"  # {node.meta[COMMENT]}" if COMMENT in node.meta else ""
        arguments = [n for n in node.args if isinstance(n, fx.Node)]
        given = [n for n in arguments if self._is_given(n)]
        names = list(self._names(n for n in arguments if n not in given))
        if given:
            names.append(f"*{self._parameter_list(node, given)}")
        self._lines.extend(_wrap("args = [", ", ".join(names), "]"))
        self._drop(self._last_read_by(node, arguments))
        results = ", ".join(self._names(self._results(node)))
        call = f"{node.target}(args)"
        if results:
            self._lines.extend(_wrap("[", results, f"] = {call}{comment}"))
        else:
            self._lines.append(f"{call}{comment}")
        # A view that only the backward reads, whose memory travels: others rebuild it there.
        self._drop(result for result in self._results(node) if not result.users)

    def _transfer(self, node: fx.Node) -> None:
        """An operation of the runtime, as a call of its bare name."""
        comment = f"  # {node.meta[COMMENT]}" if COMMENT in node.meta else ""
        result = f"{node.name} = " if isinstance(node.meta.get("val"), torch.Tensor) else ""
        written = list(map(self._write, node.args))
        if _opens_arena(node):
            written[0] = ARENA
        arguments = ", ".join(written)
        self._lines.append(f"{result}{_bare_name(node)}({arguments}){comment}")
        self._drop(self._last_read_by(node, node.all_input_nodes))

    def _give(self, node: fx.Node) -> None:
        """Gradients that are handed over, by primal."""
        receiver, made = node.args
        assert isinstance(made, dict)
        items = ", ".join(f"{primal}: {self._write(value)}" for primal, value in made.items())
        self._lines.extend(_wrap(f"{self._write(receiver)}.{node.target}({{", items, "})"))
        self._drop(self._last_read_by(node, node.all_input_nodes))

    def _is_given(self, node: fx.Node) -> bool:
        """Parameters and inputs, which the caller holds anyway."""
        return node.op == "get_attr" or _is_primal(node)

    def _parameter_list(self, call: fx.Node, given: Sequence[fx.Node]) -> str:
        names = tuple(self._given_runs(given))
        if names not in self._parameters:
            wish = str(call.meta.get(GROUP, "params"))
            used = set(self._parameters.values())
            options = (wish if i == 0 else f"{wish}_{i}" for i in count())
            self._parameters[names] = next(name for name in options if name not in used)
        return self._parameters[names]

    def _given_runs(self, given: Sequence[fx.Node]) -> Iterator[str]:
        """``primals[3:7]`` for neighbours, names for constants."""
        place = self._primals
        for _, run in groupby(enumerate(given), key=lambda pair: place.get(pair[1], -1) - pair[0]):
            nodes = [node for _, node in run]
            if nodes[0] not in place:
                yield from (node.name for node in nodes)
            elif len(nodes) == 1:
                yield f"primals[{place[nodes[0]]}]"
            else:
                yield f"*primals[{place[nodes[0]]}:{place[nodes[-1]] + 1}]"

    def _results(self, call: fx.Node) -> list[fx.Node]:
        picks = [user for user in call.users if user.target is operator.getitem]
        return sorted(picks, key=lambda n: n.args[1])  # type: ignore[arg-type, return-value]

    def _names(self, values: Iterable[object]) -> Iterator[str]:
        """How to write ``values`` in a list: whole lists starred, constants as they are."""
        for name, run in groupby(values, key=self._list_of):
            if name == PRIMALS:
                yield from self._given_runs(list(run))  # type: ignore[arg-type]
                continue
            if name is not None:
                yield f"*{name}"
                continue
            for value in run:
                yield self._write(value)

    def _list_of(self, value: object) -> str | None:
        return self._lists.get(value) if isinstance(value, fx.Node) else None

    def _write(self, value: object) -> str:
        if not isinstance(value, fx.Node):
            return repr(value)
        return next(iter(self._given_runs([value]))) if self._is_given(value) else value.name

    def _last_read_by(self, call: fx.Node, arguments: Sequence[fx.Node]) -> Iterator[fx.Node]:
        """Those that nobody reads after ``call``."""
        here = self._index[call]
        for n in arguments:
            if not self._is_given(n) and all(self._index[user] <= here for user in n.users):
                yield n

    def _drop(self, values: Iterable[fx.Node]) -> None:
        """Delete the names of values."""
        names = ", ".join(name.lstrip("*") for name in self._names(values))
        if names:
            line = f"del {names}"
            self._lines.extend([line] if len(line) <= WIDTH else _wrap("del (", names, ")"))


def _is_transfer(node: fx.Node) -> bool:
    """Whether the node calls the runtime."""
    return node.op == "call_function" and node.target is not operator.getitem


def _opens_arena(node: fx.Node) -> bool:
    return _is_transfer(node) and _bare_name(node) == "open_arena"


def _bare_name(node: fx.Node) -> str:
    """The name of a function of the runtime."""
    return str(node.target.__name__)  # type: ignore[union-attr]


def _assign_list(name: str, items: tuple[str, ...]) -> list[str]:
    if len(items) == 1 and items[0].startswith("*"):
        return [f"{name} = {items[0][1:]}"]
    return _wrap(f"{name} = [", ", ".join(items), "]")


def _is_primal(node: fx.Node) -> bool:
    return node.op == "placeholder" and node.name.startswith(PRIMALS)


def _wrap(head: str, items: str, tail: str) -> list[str]:
    """``head items tail`` on one line if it fits, else with the items below."""
    line = f"{head}{items}{tail}"
    code = line.split("  # ", maxsplit=1)[0]
    if len(code) <= WIDTH:
        return [line]
    lines, current = [head], "   "
    for item in items.split(", "):
        if len(current) + len(item) + 2 > WIDTH:
            lines.append(current)
            current = "   "
        current += f" {item},"
    return [*lines, current, tail]


def compile_graph(graph: fx.Graph) -> fx.GraphModule:
    """A module that takes its inputs in one list and frees each after its last use.

    Where its operations follow the sizes of the step it runs at those of the capture.
    """
    torch_compat.boxed_code(graph)
    module = fx.GraphModule(torch.nn.Module(), graph)
    names = {name: x for node in graph.nodes for name, x in _names_at(node).items()}
    if names:
        type(module).forward.__globals__.update(names)
        module.meta[FOLLOWS] = tuple(names)
    return module
