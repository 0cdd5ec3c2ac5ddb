"""The chains that solvers are timed on."""

from __future__ import annotations

import random

from fxremat.ir import Chain, Costs
from tests.paper_terms import chain_from_sizes, costs_from_paper

MIB = 1 << 20


def heterogeneous(count: int) -> tuple[Chain, Costs]:
    """Boundaries of 1 to 64 MiB, saved sets up to 200 MiB more, forwards of 0.1 to 5 ms.

    Times are multiples of 2**-20 s, so that sums of them are exact in any order.
    """
    draw = random.Random(0)
    sizes = [draw.randint(MIB, 64 * MIB) for _ in range(count + 1)]
    saved = [size + draw.randint(MIB, 200 * MIB) for size in sizes[1:]]
    forward_s = [draw.randint(100, 5000) / 2**20 for _ in range(count)]
    costs = costs_from_paper(
        forward_s=forward_s,
        backward_s=[seconds * draw.choice([1.5, 2.0, 2.5]) for seconds in forward_s],
        gradient_bytes=sizes,
        saved_bytes=saved,
        forward_extra_bytes=[draw.randint(0, 32 * MIB) for _ in range(count)],
        backward_extra_bytes=[draw.randint(0, 32 * MIB) for _ in range(count)],
    )
    return chain_from_sizes(sizes, saved), costs
