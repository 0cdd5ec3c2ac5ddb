"""Names of modules for display."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from itertools import takewhile

_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")

BETWEEN = " … "
"""The text between the first and the last of several names."""


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


def pattern_of(module: str) -> str:
    """Return a module's path with ``*`` for each number, which is equal for repeated blocks."""
    return _NUMBER.sub("*", module)


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
