"""Names of modules for display."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from itertools import takewhile

_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")

BETWEEN = " … "
"""The text between the first and the last of several names."""

MOST_NUMBERS = 4
"""The maximum number of numbers with gaps that a name lists."""


def common_module(modules: Iterable[str]) -> str:
    """Return the innermost module that contains all ``modules``.

    If they are in several blocks, return the first and the last of them as one text. Empty names
    are ignored.
    """
    found = list(dict.fromkeys(filter(None, modules)))
    if not found:
        return ""
    first, last = found[0], found[-1]
    columns = zip(*(name.split(".") for name in found), strict=False)
    parts = [names[0] for names in takewhile(lambda names: len(set(names)) == 1, columns)]
    if not parts or block_of(first) != block_of(last):
        return f"{first}{BETWEEN}{last}"
    return ".".join(parts)


def block_of(module: str) -> str:
    """Return the outermost numbered module in a path, such as ``blocks.3``, or its first part."""
    parts = module.split(BETWEEN, maxsplit=1)[0].split(".")
    numbers = [i for i, part in enumerate(parts) if part.isdigit()]
    return ".".join(parts[: numbers[0] + 1 if numbers else 1])


def blocks_of(modules: Iterable[str]) -> list[str]:
    """Return the block of each stage; an empty path belongs to the block before it.

    Args:
        modules: the path of the module of each stage.
    """
    blocks: list[str] = []
    for module in modules:
        blocks.append(block_of(module) or (blocks[-1] if blocks else ""))
    return blocks


def pattern_of(module: str, *, outermost: bool = False) -> str:
    """Return a module's path with ``*`` for numbers, which is equal for repeated blocks.

    Args:
        module: the path of the module.
        outermost: replace the first number only.
    """
    return _NUMBER.sub("*", module, count=1 if outermost else 0)


def joined(outer: str, module: str) -> str:
    """Return the path of ``module`` in the model, if it is a path in ``outer`` or in the model.

    A graph that reads a single submodule has its own path in both: ``layers.2.up`` and ``up`` are
    ``layers.2.up``.
    """
    if not outer or not module or f"{module}.".startswith(f"{outer}."):
        return module or outer
    outers, parts = outer.split("."), module.split(".")
    for count in range(min(len(outers), len(parts)), 0, -1):
        if outers[-count:] == parts[:count] and not parts[0].isdigit():
            return ".".join((*outers, *parts[count:]))
    return f"{outer}.{module}"


def repeated(modules: Sequence[str]) -> str:
    """Return one name for modules with the same pattern, such as ``blocks.0–4.mlp``.

    Numbers without gaps are a range. Of others, up to four are listed (``blocks.{0,2}.mlp``); of
    more, the first and the last (``blocks.{0,…,9}.mlp``).
    """
    columns = zip(*(module.split(".") for module in modules), strict=True)
    return ".".join(
        names[0] if len(set(names)) == 1 else _numbers(sorted(set(map(int, names))))
        for names in columns
    )


def _numbers(numbers: Sequence[int]) -> str:
    first, last = numbers[0], numbers[-1]
    if last - first == len(numbers) - 1:
        return span(first, last)
    listed = ",".join(map(str, numbers)) if len(numbers) <= MOST_NUMBERS else f"{first},…,{last}"
    return f"{{{listed}}}"


def named(modules: Sequence[str]) -> str:
    """Return one name for consecutive modules, such as ``blocks.0–4.mlp`` or ``norm … head``."""
    known = [module for module in modules if module]
    if not known or known[0] == known[-1]:
        return known[0] if known else ""
    first, last = known[0].split("."), known[-1].split(".")
    differ = [i for i, pair in enumerate(zip(first, last, strict=False)) if pair[0] != pair[1]]
    if len(first) == len(last) and len(differ) == 1:
        at = differ[0]
        if first[at].isdigit() and last[at].isdigit():
            return ".".join([*first[:at], f"{first[at]}–{last[at]}", *first[at + 1 :]])
    return f"{known[0].split(BETWEEN)[0]}{BETWEEN}{known[-1].split(BETWEEN)[-1]}"


def span(first: int, last: int) -> str:
    """Return a range of numbers as text, such as ``"3–14"``, or ``"3"`` for a single one."""
    return str(first) if first == last else f"{first}–{last}"
