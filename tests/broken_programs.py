"""Random models that break Dynamo's graph, as code that can be read.

    python -m tests.broken_programs SEED [BUDGET]    print a program and check it
    python -m tests.broken_programs --range A B      a line for each seed and budget
    python -m tests.broken_programs --reference A B  programs alone: aot_eager beside eager

A budget is a share of eager's peak, a number of bytes above 1, or ``min``.
"""

from __future__ import annotations

import linecache
import random
import sys
import types
from typing import Any

import torch
from torch import Tensor, nn

from tests.broken_parts import (
    BREAKS,
    HEADS,
    NAMES,
    WORK,
    Item,
    Sink,
    Writer,
    edited_input,
)
from tests.models.zoo import seeded


class Program(nn.Module):
    """A model whose forward was made up.

    Attributes:
        source: of the forward.
        file: that it seems to come from; tracebacks show its lines.
        kinds: of the items that it consists of.
        calls, log, sink, generator, seen: what items change.
    """

    source = ""
    file = ""
    kinds: frozenset[str] = frozenset()
    seen: Tensor

    def __init__(self, modules: dict[str, nn.Module]) -> None:
        super().__init__()
        self.calls, self.log, self.sink = 0, list[float](), Sink()
        self.generator = torch.Generator().manual_seed(1)
        self.register_buffer("seen", torch.zeros(()))
        for name, module in modules.items():
            self.add_module(name, module)

    def forget(self) -> None:
        """Let the lines of its forward go."""
        linecache.cache.pop(self.file, None)
        sys.modules.pop(self.forward.__module__, None)


def program(seed: int) -> tuple[Program, tuple[Tensor]]:
    """Model and arguments of one call: the same for the same seed, to the last bit."""
    draw = random.Random(seed)
    with seeded(seed):
        writer = Writer(draw, width=draw.choice((32, 48, 64)))
        lines = [writer.write(item, indent=4) for item in _items(draw)]
        sample = torch.randn(draw.choice((128, 256, 512)), writer.width)
    source = "\n".join(["def forward(self, x):", *lines, ""])
    file = f"<program {seed}>"
    linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)
    module = types.ModuleType(f"tests.broken_program_{seed}")
    sys.modules[module.__name__] = module  # Dynamo looks names up in there
    vars(module).update(NAMES)
    exec(compile(source, file, "exec"), vars(module))
    own = {
        "forward": vars(module)["forward"],
        "source": source,
        "file": file,
        "kinds": frozenset(writer.kinds),
    }
    return type("Made", (Program,), own)(writer.modules), (sample,)


def _items(draw: random.Random) -> list[Item]:
    """Of a program: some compute, one breaks at least."""
    count = draw.randint(5, 13)
    breaks = draw.randint(2, (count + 1) // 2)
    items = [draw.choice(BREAKS) for _ in range(breaks)]
    items += [draw.choice(WORK) for _ in range(count - breaks)]
    draw.shuffle(items)
    first = [edited_input] if draw.random() < 0.15 else []
    return [*first, *items, draw.choice(HEADS)]


def loss_of(outputs: Any) -> Tensor:
    """A scalar of all that a program returns."""
    leaves = torch.utils._pytree.tree_leaves(outputs)
    terms = [leaf.square().mean() for leaf in leaves if isinstance(leaf, Tensor)]
    return torch.stack(terms).sum()


if __name__ == "__main__":
    import os
    import sys

    os.environ["FXREMAT_CACHE"] = "0"
    from tests.broken_command import main

    main(sys.argv[1:])
