"""Post-accumulate hooks of parameters: whether one takes the gradient away, as its source says.

An optimizer that steps in the backward registers a hook that uses the gradient of a parameter and
sets it to ``None``. The source of the hook shows that before it has run, so the first plan need not
leave room for all gradients at once. Nothing is run. A hook whose source does not decide it is
taken to keep the gradient, until a backward shows otherwise.
"""

from __future__ import annotations

import ast
import builtins
import functools
import inspect
import textwrap
import types
import weakref
from collections import ChainMap
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

MOST_CALLS = 3
"""How many functions deep calls are followed that pass the parameter on."""

_answers: weakref.WeakKeyDictionary[Callable[..., Any], bool] = weakref.WeakKeyDictionary()

_UNKNOWN = object()


def takes_gradient(hook: Callable[..., Any]) -> bool:
    """Return whether the source of ``hook`` says that it sets the gradient to ``None``.

    Args:
        hook: called with a parameter whose gradient exists.
    """
    try:
        if hook not in _answers:
            _answers[hook] = _takes(hook, MOST_CALLS)
        return _answers[hook]
    except TypeError:  # it cannot be hashed, or weakly referred to
        return _takes(hook, MOST_CALLS)


def _takes(hook: Callable[..., Any], calls: int) -> bool:
    """Return whether ``hook`` takes the gradient of its first argument; see `takes_gradient`."""
    bound: list[Any] = []
    while isinstance(hook, (functools.partial, types.MethodType)):
        if isinstance(hook, functools.partial):
            bound, hook = [*hook.args, *bound], hook.func
        else:
            bound, hook = [hook.__self__, *bound], hook.__func__
    if not isinstance(hook, types.FunctionType):
        call = getattr(type(hook), "__call__", None)  # noqa: B004
        if not isinstance(call, types.FunctionType):
            return False
        bound, hook = [hook, *bound], call
    parsed = _source_of(hook.__code__)
    if parsed is None:
        return False
    names = [own.arg for own in (*parsed.args.posonlyargs, *parsed.args.args)]
    if len(names) <= len(bound):
        return False
    given = dict(zip(names, bound, strict=False))
    values = ChainMap(given, _cells_of(hook), hook.__globals__, vars(builtins))
    return _Reader(names[len(bound)], values, calls).takes(parsed.body)


@functools.lru_cache(maxsize=256)
def _source_of(code: types.CodeType) -> ast.FunctionDef | None:
    """Return the definition of a function; ``None``: its source is not available, or a lambda's."""
    try:
        parsed = ast.parse(textwrap.dedent(inspect.getsource(code)))
    except (OSError, TypeError, SyntaxError, ValueError):
        return None
    first = parsed.body[0] if parsed.body else None
    return first if isinstance(first, ast.FunctionDef) else None


def _cells_of(function: types.FunctionType) -> dict[str, Any]:
    """Return what the names of enclosing functions that a function uses stand for."""
    values = {}
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            values[name] = cell.cell_contents
        except ValueError:  # it is not assigned yet
            values[name] = _UNKNOWN
    return values


@dataclass(slots=True)
class _Reader:
    """Reads statements in order, up to the one that takes the gradient of a parameter.

    Attributes:
        parameter: the name of the parameter.
        names: what free names stand for.
        calls: how many functions deep calls are followed.
    """

    parameter: str
    names: Mapping[str, Any]
    calls: int

    def takes(self, body: Iterable[ast.stmt]) -> bool:
        """Return whether statements take the gradient however they run."""
        for statement in body:
            if self._takes(statement):
                return True
            if any(isinstance(own, (ast.Return, ast.Raise)) for own in self._reached(statement)):
                return False
        return False

    def _takes(self, statement: ast.stmt) -> bool:
        match statement:
            case ast.Assign(targets=targets, value=ast.Constant(value=None)):
                return any(map(self._is_gradient, targets))
            case ast.Delete(targets=targets):
                return any(map(self._is_gradient, targets))
            case ast.Expr(value=ast.Call() as call):
                return self._call_takes(call)
            case ast.If(test=test, body=body, orelse=orelse):
                answer = self._answer(test)
                if answer is None:
                    return self.takes(body) and self.takes(orelse)
                return self.takes(body if answer else orelse)
            case ast.With(body=body):
                return self.takes(body)
            case ast.Try(body=body, finalbody=final):
                return self.takes(body) or self.takes(final)
            case _:
                return False

    def _reached(self, statement: ast.stmt) -> Iterable[ast.AST]:
        """Return the nodes of a statement that may run; branches that are never taken are left out.

        The source of a function that is defined in it is included, which errs on the safe side.
        """
        if isinstance(statement, ast.If) and self._answer(statement.test) is not None:
            branch = statement.body if self._answer(statement.test) else statement.orelse
            return [node for own in branch for node in self._reached(own)]
        return ast.walk(statement)

    def _is_gradient(self, node: ast.expr) -> bool:
        match node:
            case ast.Attribute(value=ast.Name(id=name), attr="grad"):
                return name == self.parameter
            case _:
                return False

    def _call_takes(self, call: ast.Call) -> bool:
        """Return whether a call clears gradients, or passes the parameter on to what takes it."""
        function = call.func
        if isinstance(function, ast.Attribute) and function.attr == "zero_grad":
            given = [*call.args, *(own.value for own in call.keywords)]
            return all(isinstance(own, ast.Constant) and own.value for own in given)
        match call.args:
            case [ast.Name(id=name)] if name == self.parameter and self.calls and not call.keywords:
                called = self._value(function)
                return callable(called) and _takes(called, self.calls - 1)
            case _:
                return False

    def _answer(self, test: ast.expr) -> bool | None:
        """Return whether a condition holds for a parameter whose gradient exists; ``None``: ask."""
        match test:
            case ast.UnaryOp(op=ast.Not(), operand=operand):
                answer = self._answer(operand)
                return None if answer is None else not answer
            case ast.Compare(left=left, ops=[op], comparators=[ast.Constant(value=None)]):
                if self._is_gradient(left) and isinstance(op, (ast.Is, ast.IsNot)):
                    return isinstance(op, ast.IsNot)
                return None
            case _:
                value = self._value(test)
                return value if isinstance(value, bool) else None

    def _value(self, node: ast.expr) -> Any:
        """Return what a name, or an attribute of one, stands for; no code of the user's is run."""
        match node:
            case ast.Name(id=name):
                return self.names.get(name, _UNKNOWN)
            case ast.Attribute(value=of, attr=name):
                owner = self._value(of)
                value = inspect.getattr_static(owner, name, _UNKNOWN)
                if isinstance(value, types.FunctionType) and not isinstance(
                    owner, types.ModuleType
                ):
                    return types.MethodType(value, owner)
                return value
            case _:
                return _UNKNOWN
