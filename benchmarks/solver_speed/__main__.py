"""How long the solvers take, warm, and how that grows.

Run: python -m benchmarks.solver_speed [section ...] [--repeats 3]

Each section prints a table and writes ``benchmarks/results/solver_speed_<section>.json``.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

from benchmarks.solver_speed import joins, offload, pofo, rotor

SECTIONS: dict[str, Callable[[int], None]] = {
    "rotor": rotor.section,
    "offload": offload.section,
    "joins": joins.section,
    "pofo": pofo.section,
}
"""Sections by name; each is given how often to repeat a measurement."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("sections", nargs="*", help=f"of {', '.join(SECTIONS)}; all if none")
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    unknown = set(options.sections) - set(SECTIONS)
    if unknown:
        parser.error(f"no such section: {', '.join(sorted(unknown))}")
    for name in options.sections or SECTIONS:
        SECTIONS[name](options.repeats)


if __name__ == "__main__":
    main()
