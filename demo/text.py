"""English text that every Python brings along: the chapters behind ``help("topics")``."""

from __future__ import annotations

from collections.abc import Iterator
from pydoc_data.topics import topics

import torch
from torch import Tensor

ORIGIN = "the Python Language Reference (pydoc_data)"


def read_text() -> Tensor:
    """All chapters as ASCII codes, ``(characters,)``; other characters become ``?``."""
    text = "\n\n".join(topics[name] for name in sorted(topics))
    return torch.tensor(list(text.encode("ascii", "replace")))


def draw_batches(
    text: Tensor, *, count: int, batch: int, context: int, seed: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """Random passages and the same moved on by one, each ``(batch, context)``."""
    generator = torch.Generator().manual_seed(seed)
    for _ in range(count):
        starts = torch.randint(len(text) - context, (batch, 1), generator=generator)
        passages = text[starts + torch.arange(context + 1)]
        yield passages[:, :-1].contiguous(), passages[:, 1:].contiguous()
