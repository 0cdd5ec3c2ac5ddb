"""Losses written by hand, which ``benchmarks.split_peers`` compares with: all are eager's."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from benchmarks.split_by_hand import BLOCK_WORDS, CHUNK_TOKENS, PEERS, Decoder, Peer, liger_tokens

TOKENS, WORDS = 2 * CHUNK_TOKENS + 3, BLOCK_WORDS + 5
"""The last chunk and the last block are short."""


def results(peer: Peer, *, scale: float) -> list[Tensor]:
    torch.manual_seed(0)
    decoder = Decoder(WORDS, 16, 1).double()
    given = (torch.randint(0, WORDS, (1, TOKENS)) for _ in range(2))
    loss = peer(decoder, *given)
    (loss * scale).backward()
    return [loss.detach(), *(p.grad for p in decoder.parameters() if p.grad is not None)]


@pytest.mark.parametrize("name", PEERS)
@pytest.mark.parametrize("scale", [1.0, 0.3])
def test_loss_and_gradients_are_those_of_eager(name: str, scale: float):
    own, eager = (results(PEERS[n], scale=scale) for n in (name, "eager"))
    assert len(own) == len(eager) > 10
    for found, wanted in zip(own, eager, strict=True):
        torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize(
    ("tokens", "width", "words", "expected"),
    [(4096, 64, 32_000, 16), (8192, 4096, 128_256, 256), (7, 64, 64, 8), (7, 64, 65, 4)],
)
def test_a_chunk_is_as_liger_has_it(tokens: int, width: int, words: int, expected: int):
    assert liger_tokens(tokens, width, words) == expected
