"""The runtime's own source, with one of its waits left out."""

from __future__ import annotations

import ast
import contextlib
import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from types import CodeType, FunctionType, ModuleType
from typing import Any

import pytest

from fxremat.runtime import lease, streams

ORDERING = frozenset({"wait_event", "wait_stream", "synchronize", "record_stream"})
"""How torch is told of an order."""
HELPERS = frozenset(
    {"wait_for_compute", "hold_back", "wait_until_copied", "wait_for", "abandon", "_abandon"}
)
"""What in the runtime does no more than that."""
_NO_WAIT = "_no_wait"


@dataclass(frozen=True, slots=True)
class Wait:
    """A place in the source where something is told to wait.

    Attributes:
        module: of the runtime.
        function: the class and the method it is in.
        call: the source of what is called.
        number: which of the same text in that function.
    """

    module: ModuleType
    function: tuple[str, str]
    call: str
    number: int

    def __str__(self) -> str:
        return f"{'.'.join(self.function)}-{self.call}-{self.number}"


def waits() -> tuple[Wait, ...]:
    """Every wait of the runtime's streams, and every record that one needs."""
    found: list[Wait] = []
    for module in (streams, lease):
        for function, node in _ordering(_parsed(module)):
            call = ast.unparse(node)
            same = [w for w in found if (w.function, w.call) == (function, call)]
            found.append(Wait(module, function, call, len(same)))
    return tuple(found)


@contextlib.contextmanager
def left_out(wait: Wait) -> Iterator[None]:
    """The runtime does all but this."""
    tree = _parsed(wait.module)
    matching = [
        node
        for function, node in _ordering(tree)
        if function == wait.function and ast.unparse(node) == wait.call
    ]
    # In the place of the function that is called, so that any use of it is left out.
    target: Any = matching[wait.number]
    _Replace(target).visit(tree)
    ast.fix_missing_locations(tree)
    names: dict[str, Any] = {"__name__": wait.module.__name__}
    exec(compile(tree, inspect.getsourcefile(wait.module) or "", "exec"), names)
    function = _method(getattr(wait.module, wait.function[0]), wait.function[1])
    code: CodeType = _method(names[wait.function[0]], wait.function[1]).__code__
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(wait.module, _NO_WAIT, lambda *args: None, raising=False)
        patch.setattr(function, "__code__", code)
        yield


class _Replace(ast.NodeTransformer):
    def __init__(self, target: ast.Attribute) -> None:
        self._target = target

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        if node is self._target:
            return ast.copy_location(ast.Name(_NO_WAIT, ast.Load()), node)
        return self.generic_visit(node)


def _method(of: type, name: str) -> FunctionType:
    function = inspect.unwrap(inspect.getattr_static(of, name))
    function = getattr(function, "__func__", function)
    assert isinstance(function, FunctionType)
    return function


def _parsed(module: ModuleType) -> ast.Module:
    return ast.parse(inspect.getsource(module))


def _ordering(tree: ast.Module) -> Iterator[tuple[tuple[str, str], ast.Attribute]]:
    """What orders something in the methods of a module."""
    for outer in tree.body:
        for inner in getattr(outer, "body", []):
            if isinstance(outer, ast.ClassDef) and isinstance(inner, ast.FunctionDef):
                for node in _ordering_within(inner):
                    yield (outer.name, inner.name), node


def _ordering_within(tree: ast.AST) -> Iterator[ast.Attribute]:
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(attr=name) if name in ORDERING | HELPERS:
                yield node
            # An event's. What a method of that name here returns is what is waited for.
            case ast.Expr(ast.Call(ast.Attribute(attr="record") as called)):
                yield called


def ordering_calls(module: ModuleType) -> int:
    """How many waits and records a module has, wherever they are."""
    return sum(1 for _ in _ordering_within(_parsed(module)))
