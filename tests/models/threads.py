"""Models of threads in torch's tracker, as those tell them."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn

from tests.models.branches import TwoTraversals
from tests.models.gpt import GPTConfig, tokens
from tests.models.images import images
from tests.models.zoo import Args, Kwargs, ZooModel, drawn_once, seeded


class SummedLlama(nn.Module):
    """The sum of a Llama's last hidden states."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        from transformers import LlamaConfig, LlamaModel

        self.model = LlamaModel(
            LlamaConfig(
                vocab_size=1000,
                hidden_size=256,
                intermediate_size=688,
                num_hidden_layers=layers,
                num_attention_heads=8,
                num_key_value_heads=8,
                use_cache=False,
            )
        )

    def forward(self, ids: Tensor) -> Tensor:
        return self.model(input_ids=ids).last_hidden_state.sum()


def summed_llama(scale: int) -> ZooModel:
    """The model of pytorch#197838: layers and tokens grow together."""

    def sample(seed: int) -> tuple[Args, Kwargs]:
        with seeded(seed):
            return (torch.randint(1000, (2, 128 * scale)),), {}

    return ZooModel(
        name=f"summed_llama{4 * scale}",
        build=drawn_once(lambda: SummedLlama(4 * scale)),
        sample=sample,
        loss=lambda loss: loss,
        loss_inside=True,
    )


TEXTS = GPTConfig(vocabulary=512, context=128, width=128, heads=4)


def text_and_caption(blocks: int, *, batch: int = 8) -> ZooModel:
    """The model of pytorch#193193: blocks that run for a text, and then attend to an image.

    That thread tells what the blocks do; sizes are ours.
    """

    def build() -> nn.Module:
        model = TwoTraversals(replace(TEXTS, blocks=blocks), cross=True)
        model.image_blocks = nn.ModuleList()  # what the blocks attend to takes no memory
        return model

    def sample(seed: int) -> tuple[Args, Kwargs]:
        sizes = {"vocabulary": TEXTS.vocabulary, "batch": batch, "length": TEXTS.context}
        texts = (tokens(seed + i, **sizes)[0] for i in range(2))
        return (*texts, images(seed, batch=batch, size=64)), {}

    return ZooModel(
        name=f"text_and_caption{blocks}",
        build=drawn_once(build),
        sample=sample,
        loss=lambda loss: loss,
        loss_inside=True,
    )
