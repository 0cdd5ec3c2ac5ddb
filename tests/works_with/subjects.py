"""Small models that other libraries change: blocks in plain torch, and a Llama of transformers."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
import transformers
from torch import Tensor, nn

from tests.models.zoo import seeded
from tests.works_with.training import Subject

WIDTH, ROWS, BLOCKS, RANK = 64, 512, 3, 4
VOCABULARY, LENGTH, SENTENCES = 97, 48, 12


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.drop = nn.LayerNorm(WIDTH), nn.Dropout(0.1)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.drop(self.down(nn.functional.gelu(self.up(self.norm(x)))))


def blocks() -> nn.Module:
    with seeded(0):
        return nn.Sequential(*(Block() for _ in range(BLOCKS)))


def rows(number: int) -> tuple[Tensor]:
    with seeded(number):
        return (torch.randn(ROWS, WIDTH),)


class Adapter(nn.Module):
    """A frozen layer, and a low-rank one that is trained on top of it."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        with seeded(1):
            self.low = nn.Linear(base.in_features, RANK, bias=False)
            self.high = nn.Linear(RANK, base.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.high(self.low(x))


def _linears(model: nn.Module) -> Iterator[tuple[nn.Module, str, nn.Linear]]:
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, nn.Linear) and not isinstance(module, Adapter):
                yield module, name, child


def adapted(change: Callable[[nn.Linear], nn.Module]) -> nn.Module:
    """Return blocks whose frozen layers were changed, each with an adapter."""
    model = blocks().requires_grad_(False)
    for module, name, linear in _linears(model):
        adapter = Adapter(linear)
        adapter.base = change(linear)
        setattr(module, name, adapter)
    return model


def replaced(model: nn.Module, change: Callable[[nn.Linear], nn.Module]) -> nn.Module:
    """Return ``model`` with all its linear layers but the head changed."""
    for module, name, linear in _linears(model):
        if name != "lm_head":
            setattr(module, name, change(linear))
    return model


def llama() -> nn.Module:
    transformers.set_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=2, max_position_embeddings=64,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)


class Loss(nn.Module):
    """A language model as a function of its tokens, whose output is its loss."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor) -> Tensor:
        return self.model(input_ids=tokens, labels=tokens).loss


def tokens(number: int) -> tuple[Tensor]:
    with seeded(number):
        return (torch.randint(0, VOCABULARY, (SENTENCES, LENGTH)),)


def language(build: Callable[[], nn.Module]) -> Subject:
    """Return a subject that is trained on the loss of a language model."""
    return Subject(lambda: Loss(build()), tokens, loss=None)
