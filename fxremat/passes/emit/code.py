"""Emitted code: Python that reads as the schedule, and frees each tensor at its last use."""

from __future__ import annotations

import hashlib
import linecache
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import count, groupby
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import fx

from fxremat import torch_compat
from fxremat.passes.emit.body import ARENA, ARGS, GIVE, PRIMALS, RETURN, Body, Statement, Variable
from fxremat.passes.joint.digest import structure_digest, written
from fxremat.passes.joint.sizes import MODULES, names_in
from fxremat.runtime import transfer
from fxremat.runtime.nested import Nested

WIDTH = 100
"""Maximum line length of emitted code."""

FOLLOWS = "fxremat_follows"
"""Metadata key of modules whose code refers to sizes by name, as globals."""

Around = Callable[[torch_compat.BoxedCallable], torch_compat.BoxedCallable]

_serial = count()


class Emitted:
    """The forward or the backward of a step: Python code that calls its stages.

    The code takes its inputs in one list, which it empties. It passes each stage a new list, and
    drops its own names for what is read last before the call, so that the stage can free it as soon
    as possible. At other sizes the code is the same, with other globals.

    Args:
        body: the statements.
        code: their text.
        function: runs that text, possibly at other sizes.
        names: sizes in the code, and their values; other sizes have their values at the capture.
        around: wraps the functions of stages; ``None``: they are called directly.

    Attributes:
        forward: runs the code; an attribute, because calling a module takes microseconds for hooks.
    """

    def __init__(
        self,
        body: Body,
        code: str,
        function: FunctionType,
        names: Mapping[str, int],
        around: Around | None = None,
    ) -> None:
        self.body, self.code, self._names, self._around = body, code, names, around
        self._runs = {
            name: _sized(stage, names) if names and _follows_sizes(stage) else stage.forward
            for name, stage in body.stages.items()
        }
        scope = {**function.__globals__, **names, **self._stage_functions()}
        self._function = FunctionType(function.__code__, scope)
        self.forward: torch_compat.BoxedCallable = self._function

    def __call__(self, args: list[Any]) -> Sequence[Any]:
        """Run the code and return its results; ``args``, its inputs, is emptied."""
        return self.forward(args)

    def at(self, names: Mapping[str, int]) -> Emitted:
        """Return the same code for other sizes; takes microseconds per stage.

        Args:
            names: the new values of sizes, by name; other sizes keep theirs.
        """
        names = {**self._names, **names}
        return Emitted(self.body, self.code, self._function, names, self._around)

    def call_through(self, around: Around | None) -> None:
        """Call stages through ``around`` from now on, also at other sizes.

        Args:
            around: returns a function to call in place of that of a stage; ``None``: stages are
                called directly.
        """
        self._around = around
        self._function.__globals__.update(self._stage_functions())

    def _stage_functions(self) -> dict[str, torch_compat.BoxedCallable]:
        if self._around is None:
            return self._runs
        return {name: self._around(run) for name, run in self._runs.items()}

    def structure_digest(self) -> str:
        """Return a digest of the stages that the code runs, and of how it calls them.

        It is the same for all shards of a step.
        """
        number: dict[Variable, int] = {}

        def numbers(values: Iterable[Variable]) -> list[int]:
            return [number.setdefault(value, len(number)) for value in values]

        digests = {
            name: structure_digest(stage)
            for name, stage in self.body.stages.items()
            if isinstance(stage, fx.GraphModule)
        }
        rows = [str(numbers(self.body.takes))]
        for statement in self.body.statements:
            name = getattr(statement.target, "__name__", str(statement.target))
            target = digests.get(name, name)
            numbered = (Variable, dict, torch.device)
            arguments = _portable_arguments(statement)
            plain = [written(a, str) for a in arguments if not isinstance(a, numbered)]
            plain += [str([*a]) for a in statement.arguments if isinstance(a, dict)]
            rows.append(f"{target} {numbers(statement.reads)} {plain} {numbers(statement.makes)}")
        return hashlib.sha256("\n".join(rows).encode()).hexdigest()


def emitted(body: Body) -> Emitted:
    """Compile ``body`` to Python code, and return it, ready to run at the sizes of the capture."""
    code = render(body)
    file_name = f"<fxremat {next(_serial)}>"
    scope: dict[str, Any] = {"inf": float("inf"), "nan": float("nan"), "torch": torch}
    scope |= {"device": torch.device, **body.constants}
    for statement in body.statements:
        if callable(statement.target):
            scope[statement.target.__name__] = statement.target
            if statement.target is transfer.open_arena:
                scope[ARENA] = statement.arguments[0]
        if not statement.calls_stage:
            scope |= _names_at(statement.arguments)
    exec(compile(code, file_name, "exec"), scope)
    function: FunctionType = scope.pop("forward")
    # Tracebacks show emitted lines, for as long as the function exists.
    linecache.cache[file_name] = (len(code), None, code.splitlines(True), file_name)
    weakref.finalize(function.__code__, linecache.cache.pop, file_name, None).atexit = False
    return Emitted(body, code, function, {})


def _follows_sizes(stage: torch.nn.Module) -> bool:
    return isinstance(stage, fx.GraphModule) and FOLLOWS in stage.meta


def _sized(stage: torch.nn.Module, names: Mapping[str, int]) -> torch_compat.BoxedCallable:
    """Return the forward of ``stage``, bound to it, as a copy that reads the sizes ``names``."""
    function: Any = type(stage).forward
    scope = {**function.__globals__, **names}
    return MethodType(FunctionType(function.__code__, scope, function.__name__), stage)


def _names_at(arguments: object) -> dict[str, Any]:
    """Return the globals that expressions of sizes in ``arguments`` refer to, by name."""
    names = names_in(arguments)
    return {**MODULES, **names} if names else {}


def _portable_arguments(statement: Statement) -> Sequence[object]:
    """Return the arguments of ``statement``, without the number of an arena.

    That number differs between processes.
    """
    opens = statement.target is transfer.open_arena
    return statement.arguments[1:] if opens else statement.arguments


def render(body: Body) -> str:
    """Return the Python code of ``body``."""
    return _Renderer(body).source()


class _Renderer:
    def __init__(self, body: Body) -> None:
        self._body = body
        self._places: dict[Statement, dict[int, int]] = {}  # where each reader reads each value
        self._readers: dict[Variable, list[Statement]] = {}
        for statement in body.statements:
            for variable in dict.fromkeys(statement.reads):
                self._readers.setdefault(variable, []).append(statement)
        primals = (variable for variable in body.takes if variable.primal is not None)
        self._lists = {**dict.fromkeys(primals, PRIMALS), **self._find_lists()}
        self._parameters: dict[tuple[str, ...], str] = {}
        self._lines: list[str] = []

    def source(self) -> str:
        self._take(self._body.takes)
        body_start = len(self._lines)
        for statement in self._body.statements:
            if statement.target == RETURN:
                results = ", ".join(self._names(statement.arguments))
                self._lines.extend(_wrap("return [", results, "]"))
            elif statement.target == GIVE:
                self._give(statement)
            elif callable(statement.target):
                self._transfer(statement, statement.target.__name__)
            else:
                self._call(statement)
        parameters = [
            line for names, name in self._parameters.items() for line in _assign_list(name, names)
        ]
        self._lines[body_start:body_start] = parameters
        return f"def forward({ARGS}):\n" + "".join(f"    {line}\n" for line in self._lines)

    def _find_lists(self) -> dict[Variable, str]:
        """Return the name of a list for each variable that can be an item of one.

        The items of a list are made together, and are read together.
        """
        lists: dict[Variable, str] = {}
        taken: dict[str, object] = {}
        for made in (self._body.takes, *(statement.makes for statement in self._body.statements)):
            for key, run in groupby(made, key=self._list_key):
                members = list(run)
                if key is None or not all(self._adjoin(members, reader) for reader in key[1]):
                    continue
                if taken.setdefault(key[0], members[0]) is members[0]:
                    lists.update(dict.fromkeys(members, key[0]))
        return lists

    def _adjoin(self, members: Sequence[Variable], reader: Statement) -> bool:
        """Return whether ``reader`` reads ``members`` consecutively, in their order."""
        if reader not in self._places:
            enumerated = [*enumerate(reader.arguments)]
            self._places[reader] = {id(value): i for i, value in reversed(enumerated)}
        places = self._places[reader]
        begin = places.get(id(members[0]), 0)
        return all(places.get(id(value)) == begin + i for i, value in enumerate(members))

    def _list_key(self, value: Variable) -> tuple[str, tuple[Statement, ...]] | None:
        """Return the group and readers of ``value`` if it can be in a list, otherwise ``None``."""
        readers = self._readers.get(value, ())
        if value.group is None or any(r.target == GIVE or callable(r.target) for r in readers):
            return None
        return value.group, tuple(readers)

    def _take(self, takes: Sequence[Variable]) -> None:
        """Write lines that bind inputs: those of one list by a slice, others by one assignment."""
        start = 0
        for name, run in groupby(takes, key=self._lists.get):
            values = list(run)
            end = start + len(values)
            if name is not None:
                self._lines.append(f"{name} = {ARGS}[{start}:{end}]")
            else:
                names = ", ".join(value.name for value in values)
                self._lines.extend(_wrap("[", names, f"] = {ARGS}[{start}:{end}]"))
            start = end
        self._lines.append(f"{ARGS}.clear()")

    def _call(self, statement: Statement) -> None:
        comment = f"  # {statement.comment}" if statement.comment else ""
        arguments = list(statement.reads)
        given = [value for value in arguments if value.given]
        names = list(self._names(value for value in arguments if not value.given))
        if given:
            names.append(f"*{self._parameter_list(statement, given)}")
        self._lines.extend(_wrap(f"{ARGS} = [", ", ".join(names), "]"))
        self._drop(self._last_read_by(statement))
        results = ", ".join(self._names(statement.makes))
        call = f"{statement.target}({ARGS})"
        if results:
            self._lines.extend(_wrap("[", results, f"] = {call}{comment}"))
        else:
            self._lines.append(f"{call}{comment}")
        # Nobody reads a view whose memory travels, and which the backward makes again.
        self._drop(value for value in statement.makes if value not in self._readers)

    def _transfer(self, statement: Statement, name: str) -> None:
        """Write a line that calls a function of the runtime by its bare name."""
        comment = f"  # {statement.comment}" if statement.comment else ""
        result = "".join(f"{value.name} = " for value in statement.makes)
        opens = [ARENA] if statement.target is transfer.open_arena else []
        arguments = ", ".join([*opens, *map(self._write, _portable_arguments(statement))])
        self._lines.append(f"{result}{name}({arguments}){comment}")
        self._drop(self._last_read_by(statement))

    def _give(self, statement: Statement) -> None:
        _receiver, made = statement.arguments
        assert isinstance(made, dict)
        items = ", ".join(f"{primal}: {self._write(value)}" for primal, value in made.items())
        self._lines.extend(_wrap(f"{GIVE}({{", items, "})"))
        self._drop(self._last_read_by(statement))

    def _parameter_list(self, statement: Statement, given: Sequence[Variable]) -> str:
        names = tuple(self._given_runs(given))
        if names not in self._parameters:
            self._parameters[names] = self._body.named(statement.params, names)
        return self._parameters[names]

    def _given_runs(self, given: Sequence[Variable]) -> Iterator[str]:
        """Yield code for each of ``given``: ``*primals[3:7]`` for several, names of constants."""

        def place(pair: tuple[int, Variable]) -> int:
            index, value = pair
            return (-1 if value.primal is None else value.primal) - index

        for _, run in groupby(enumerate(given), key=place):
            values = [value for _, value in run]
            begin, end = values[0].primal, values[-1].primal
            if begin is None or end is None:
                yield from (value.name for value in values)
            elif len(values) == 1:
                yield f"{PRIMALS}[{begin}]"
            else:
                yield f"*{PRIMALS}[{begin}:{end + 1}]"

    def _names(self, values: Iterable[object]) -> Iterator[str]:
        """Yield the code of ``values`` as items of a list, with ``*name`` for a whole list."""
        for name, run in groupby(values, key=self._list_name):
            if name == PRIMALS:
                yield from self._given_runs(list(run))  # type: ignore[arg-type]
            elif name is not None:
                yield f"*{name}"
            else:
                yield from map(self._write, run)

    def _list_name(self, value: object) -> str | None:
        return self._lists.get(value) if isinstance(value, Variable) else None

    def _write(self, value: object) -> str:
        if not isinstance(value, Variable):
            return repr(value)
        return next(self._given_runs([value])) if value.given else value.name

    def _last_read_by(self, statement: Statement) -> Iterator[Variable]:
        """Yield the variables that ``statement`` reads and no later one does, except given ones."""
        read = dict.fromkeys(statement.reads)
        return (v for v in read if not v.given and self._readers[v][-1] is statement)

    def _drop(self, values: Iterable[Variable]) -> None:
        names = ", ".join(name.lstrip("*") for name in self._names(values))
        if names:
            line = f"del {names}"
            self._lines.extend([line] if len(line) <= WIDTH else _wrap("del (", names, ")"))


def _assign_list(name: str, items: tuple[str, ...]) -> list[str]:
    if len(items) == 1 and items[0].startswith("*"):
        return [f"{name} = {items[0][1:]}"]
    return _wrap(f"{name} = [", ", ".join(items), "]")


def _wrap(head: str, items: str, tail: str) -> list[str]:
    """Return the code ``head items tail`` as one line if it fits, otherwise as several."""
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


def _leave_out_round_trips(graph: fx.Graph) -> None:
    """Remove pairs of transposes that cancel out from ``graph``; the result keeps its layout.

    Autograd's derivatives of a matrix product are full of these. Calling one takes as long as a
    small kernel.
    """
    transpose = torch.ops.aten.t.default
    for node in graph.find_nodes(op="call_function", target=transpose):
        (inner,) = node.args
        if isinstance(inner, fx.Node) and inner.target is transpose:
            (source,) = inner.args
            assert isinstance(source, fx.Node)
            node.replace_all_uses_with(source)
            graph.erase_node(node)
            if not inner.users:
                graph.erase_node(inner)


def compile_graph(graph: fx.Graph) -> fx.GraphModule:
    """Return a module that runs ``graph`` on a list of inputs, and frees each after its last use.

    If its operations follow the sizes of the step, it runs at those of the capture. Transposes that
    cancel out are removed from ``graph``.
    """
    _leave_out_round_trips(graph)
    torch_compat.boxed_code(graph)
    module = fx.GraphModule(torch.nn.Module(), graph)
    names = {
        name: x for node in graph.nodes for name, x in _names_at((node.args, node.kwargs)).items()
    }
    if names:
        module.meta[FOLLOWS] = tuple(names)
    operations = {repr(x): x for node in graph.nodes for x in node.args if isinstance(x, Nested)}
    if names or operations:  # generated code has operations among arguments by their names only
        type(module).forward.__globals__.update(names, **operations)
    return module
