"""Names of modules for display."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from itertools import takewhile

_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")

BETWEEN = " … "
"""The text between the first and the last of several names."""


def common_module(modules: Iterable[str]) -> str:
    """Return the innermost module that contains several; of two blocks, both ends."""
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
    """Return the outermost numbered module that contains one, else the outermost."""
    parts = module.split(BETWEEN, maxsplit=1)[0].split(".")
    numbers = [i for i, part in enumerate(parts) if part.isdigit()]
    return ".".join(parts[: numbers[0] + 1 if numbers else 1])


def blocks_of(modules: Iterable[str]) -> list[str]:
    """Return the block of each stage; a stage of no module belongs to the block before it."""
    blocks: list[str] = []
    for module in modules:
        blocks.append(block_of(module) or (blocks[-1] if blocks else ""))
    return blocks


def pattern_of(module: str) -> str:
    """Return the name with stars in place of numbers, which repeated blocks share."""
    return _NUMBER.sub("*", module)


def named(modules: Sequence[str]) -> str:
    """Return one name for successive modules: ``blocks.0–4.mlp``, or the first and the last."""
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
    """Return the text for the numbers from ``first`` to ``last``."""
    return str(first) if first == last else f"{first}–{last}"
