"""Symbolic sizes: their expressions, values at the capture, and limits."""

from __future__ import annotations

from typing import Any

import torch


def has_symbols(tensor: torch.Tensor) -> bool:
    """Return whether any size, stride or offset of ``tensor`` is symbolic."""
    return bool(getattr(tensor, "_has_symbolic_sizes_strides", False))


def is_nested_size(number: torch.SymInt) -> bool:
    """Return whether ``number`` stands for varying lengths, such as of a nested tensor's rows."""
    return bool(number.node.is_nested_int())


def expression_of(number: torch.SymInt) -> tuple[Any, int | None]:
    """Return the sympy expression of a symbolic size, and its value at the capture.

    The value is ``None`` if it depends on data.
    """
    from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols  # noqa: PLC0415

    expression = number.node.expr
    if free_unbacked_symbols(expression):
        return expression, None
    hint = number.node.hint
    if hint is None:  # it depended on data, and was found to equal what does not
        hints = {s: symbol_hint(number, s) for s in expression.free_symbols}
        if None in hints.values():
            return expression, None
        hint = expression.xreplace(hints)
    return expression, int(hint)


def hint_of(size: int | torch.SymInt) -> int:
    """Return a size, or the value of a symbolic size at the capture; 0 if it depends on data."""
    if isinstance(size, int):
        return size
    _expression, hint = expression_of(size)
    return hint or 0


def symbol_hint(number: torch.SymInt, symbol: Any) -> int | None:
    """Return the value at the capture of a symbol in the expression of ``number``.

    Returns ``None`` if it depends on data.
    """
    environment: Any = number.node.shape_env
    hints = getattr(environment, "backed_var_to_val", None) or environment.var_to_val
    hint = hints.get(symbol)
    return None if hint is None else int(hint)


def symbol_most(number: torch.SymInt, symbol: Any) -> int | None:
    """Return the largest value of a symbol for which the capture is valid; ``None``: no limit.

    ``symbol`` is in the expression of ``number``.
    """
    upper = number.node.shape_env.var_to_range[symbol].upper
    return int(upper) if upper.is_Integer else None


def equalities_of(number: torch.SymInt) -> list[Any]:
    """Return expressions that are 0 wherever the capture with symbols of ``number`` is valid."""
    import sympy  # noqa: PLC0415

    guards = (guard.expr for guard in number.node.shape_env.guards)
    return list(dict.fromkeys(g.lhs - g.rhs for g in guards if isinstance(g, sympy.Eq)))


def divisors_in(expression: Any) -> set[int]:
    """Return the integers by which a sympy expression divides, for a quotient or a remainder."""
    from torch.utils._sympy.functions import FloorDiv, Mod, PythonMod  # noqa: PLC0415

    divisors = (atom.args[1] for atom in expression.atoms(FloorDiv, Mod, PythonMod))
    return {abs(int(divisor)) for divisor in divisors if divisor.is_Integer}


def python_text(expression: Any) -> str:
    """Return a sympy expression of sizes as Python code."""
    from torch.utils._sympy.printers import PythonPrinter  # noqa: PLC0415

    text: str = PythonPrinter().doprint(expression)
    return text
