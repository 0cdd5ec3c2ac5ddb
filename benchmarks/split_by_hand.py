"""A small Llama, and how people write its loss and its MLP so that they never exist whole.

Each peer computes the mean loss of a decoder on the decoder's own weights. Of the algorithms only
what is published was used; all of it is written anew, in plain torch:

* Liger: gradients of a chunk's logits are computed beside them, in the forward (Hsu et al. 2024,
  "Liger Kernel: Efficient Triton Kernels for LLM Training", fused linear cross entropy).
* TRL: chunks of tokens whose logits are computed again in the backward (its SFT trainer's
  ``loss_type="chunked_nll"``).
* CCE: blocks of tokens by blocks of words (Wijmans et al. 2024, "Cut Your Losses in
  Large-Vocabulary Language Models"), without its filter, which leaves out small gradients: others
  would come out.
* ALST: the MLP in tiles of the sequence (Bekman et al. 2025, "Arctic Long Sequence Training").
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

HEADS = 4

CHUNK_TOKENS = 256
"""Tokens of a chunk, of a block and of a tile."""

BLOCK_WORDS = 4096
"""Words of a block."""


class Block(nn.Module):
    """Causal attention and a SwiGLU, each behind an RMSNorm and added to its input."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.attention_norm, self.norm = nn.RMSNorm(width), nn.RMSNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.gate, self.up = (nn.Linear(width, 4 * width, bias=False) for _ in range(2))
        self.down = nn.Linear(4 * width, width, bias=False)

    def attend(self, x: Tensor) -> Tensor:
        """``x``, of batch × tokens × width, and its attention."""
        q, k, v = self.qkv(self.attention_norm(x)).unflatten(-1, (3, HEADS, -1)).unbind(2)
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        added: Tensor = self.out(mixed.transpose(1, 2).flatten(2))
        return x + added

    def feed(self, x: Tensor) -> Tensor:
        """``x`` and its MLP, each token by itself."""
        y = self.norm(x)
        added: Tensor = self.down(functional.silu(self.gate(y)) * self.up(y))
        return x + added

    def forward(self, x: Tensor) -> Tensor:
        """The same shape as ``x``: batch × tokens × width."""
        return self.feed(self.attend(x))


class Decoder(nn.Module):
    """Blocks between an embedding and a head of its own; no biases and no positions."""

    def __init__(self, words: int, width: int, layers: int) -> None:
        super().__init__()
        self.words = nn.Embedding(words, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(layers))
        self.norm = nn.RMSNorm(width)
        self.head = nn.Linear(width, words, bias=False)

    def hidden(self, ids: Tensor, run: Callable[[Block, Tensor], Tensor]) -> Tensor:
        """What the head is given, a row a token; ``run`` computes a block."""
        x = self.words(ids)
        for block in self.blocks:
            assert isinstance(block, Block)
            x = run(block, x)
        rows: Tensor = self.norm(x).flatten(0, 1)
        return rows

    def forward(self, ids: Tensor, target: Tensor) -> Tensor:
        """The mean loss of all tokens."""
        hidden = self.hidden(ids, Block.__call__)
        return functional.cross_entropy(self.head(hidden), target.flatten())


Peer = Callable[[Decoder, Tensor, Tensor], Tensor]
"""The mean loss of a decoder, ids and targets."""


# Losses


def parts(count: int, size: int) -> Iterator[slice]:
    """``count`` places, ``size`` at a time."""
    return (slice(begin, min(begin + size, count)) for begin in range(0, count, size))


def liger_tokens(tokens: int, width: int, words: int) -> int:
    """Tokens of a chunk whose logits take about what all hidden values take: a power of two."""
    chunks = -(-words // width)
    return 1 << (-(-tokens // chunks) - 1).bit_length()


class GradientsInForward(torch.autograd.Function):
    """The mean loss, some tokens at a time; its gradients are computed with it."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, target: Tensor, size: int) -> Tensor:
        """A scalar; ``hidden`` has a row a token, ``weight`` a row a word."""
        tokens = len(hidden)
        loss = hidden.new_zeros(())
        by_hidden, by_weight = torch.empty_like(hidden), torch.zeros_like(weight)
        for part in parts(tokens, size):
            scores, wanted = (hidden[part] @ weight.T).log_softmax(1), target[part].unsqueeze(1)
            loss -= scores.gather(1, wanted).sum()
            by_logits = scores.exp_()
            by_logits.scatter_add_(1, wanted, by_logits.new_full(wanted.shape, -1.0))
            torch.mm(by_logits, weight, out=by_hidden[part])
            by_weight.addmm_(by_logits.T, hidden[part])
            del scores, by_logits  # before there are those of the next
        ctx.save_for_backward(by_hidden.div_(tokens), by_weight.div_(tokens))
        return loss / tokens

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None, None]:
        """Gradients of the first two."""
        by_hidden, by_weight = ctx.saved_tensors
        if grads[0] != 1:
            by_hidden, by_weight = by_hidden.mul_(grads[0]), by_weight.mul_(grads[0])
        return by_hidden, by_weight, None, None


class Blockwise(torch.autograd.Function):
    """The mean loss by blocks of tokens and of words; its backward computes logits again."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
        """A scalar; ``hidden`` has a row a token, ``weight`` a row a word."""
        totals = hidden.new_full((len(hidden),), -torch.inf)
        wanted = torch.empty_like(totals)
        for part in parts(len(hidden), CHUNK_TOKENS):
            own = hidden[part]
            wanted[part] = (own * weight[target[part]]).sum(1)
            for block in parts(len(weight), BLOCK_WORDS):
                total = (own @ weight[block].T).logsumexp(1)
                torch.logaddexp(totals[part], total, out=totals[part])
        ctx.save_for_backward(hidden, weight, target, totals)
        return (totals - wanted).mean()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        """Gradients of the first two."""
        hidden, weight, target, totals = ctx.saved_tensors
        by_hidden, by_weight = torch.zeros_like(hidden), torch.zeros_like(weight)
        for part in parts(len(hidden), CHUNK_TOKENS):
            own, total = hidden[part], totals[part].unsqueeze(1)
            rows = torch.arange(len(own), device=own.device)
            for block in parts(len(weight), BLOCK_WORDS):
                by_logits = (own @ weight[block].T).sub_(total).exp_()
                places = target[part] - block.start
                here = (places >= 0) & (places < block.stop - block.start)
                by_logits[rows[here], places[here]] -= 1
                by_hidden[part].addmm_(by_logits, weight[block])
                by_weight[block].addmm_(by_logits.T, own)
                del by_logits  # before there are those of the next
        scale = grads[0] / len(hidden)
        return by_hidden.mul_(scale), by_weight.mul_(scale), None


def recomputed_loss(decoder: Decoder, hidden: Tensor, target: Tensor) -> Tensor:
    """The mean loss, by chunks of tokens whose logits are computed again in the backward."""

    def loss_of(own: Tensor, wanted: Tensor) -> Tensor:
        return functional.cross_entropy(decoder.head(own), wanted, reduction="sum")

    sums = [
        checkpoint(loss_of, hidden[part], target[part], use_reentrant=False)
        for part in parts(len(hidden), CHUNK_TOKENS)
    ]
    return torch.stack(sums).sum() / len(hidden)


# Peers


def eager(decoder: Decoder, ids: Tensor, target: Tensor) -> Tensor:
    """The model as it is."""
    loss: Tensor = decoder(ids, target)
    return loss


def checkpointed(decoder: Decoder, ids: Tensor, target: Tensor) -> Tensor:
    """``torch.utils.checkpoint`` around each block, and a loss of all logits."""
    hidden = decoder.hidden(ids, lambda block, x: checkpoint(block, x, use_reentrant=False))
    return functional.cross_entropy(decoder.head(hidden), target.flatten())


def liger(size: int | None = None) -> Peer:
    """A loss with its gradients in the forward, ``size`` tokens at a time; by default Liger's."""

    def peer(decoder: Decoder, ids: Tensor, target: Tensor) -> Tensor:
        hidden, weight = decoder.hidden(ids, Block.__call__), decoder.head.weight
        own = size or liger_tokens(len(hidden), *reversed(weight.shape))
        apply: Any = GradientsInForward.apply
        loss: Tensor = apply(hidden, weight, target.flatten(), own)
        return loss

    return peer


def trl(decoder: Decoder, ids: Tensor, target: Tensor) -> Tensor:
    """A loss in chunks that are computed again."""
    return recomputed_loss(decoder, decoder.hidden(ids, Block.__call__), target.flatten())


def cce(decoder: Decoder, ids: Tensor, target: Tensor) -> Tensor:
    """A loss by blocks of tokens and of words."""
    hidden = decoder.hidden(ids, Block.__call__)
    apply: Any = Blockwise.apply
    loss: Tensor = apply(hidden, decoder.head.weight, target.flatten())
    return loss


def alst(decoder: Decoder, ids: Tensor, target: Tensor) -> Tensor:
    """MLPs in tiles, norm and residual included, and a loss in chunks: both computed again."""

    def run(block: Block, x: Tensor) -> Tensor:
        y = block.attend(x)
        tiles = (y[:, part] for part in parts(y.shape[1], CHUNK_TOKENS))
        return torch.cat([checkpoint(block.feed, tile, use_reentrant=False) for tile in tiles], 1)

    return recomputed_loss(decoder, decoder.hidden(ids, run), target.flatten())


PEERS: dict[str, Peer] = {
    "eager": eager,
    "Liger": liger(),
    f"Liger, {CHUNK_TOKENS} tokens": liger(CHUNK_TOKENS),
    "TRL": trl,
    "CCE": cce,
    "ALST": alst,
    "checkpoint per block": checkpointed,
}
