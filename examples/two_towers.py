"""Train an image tower and a text tower against each other with Accelerate, within a byte budget.

    python -m examples.two_towers

``prepare`` stands for ``accelerator.prepare``; it is all that differs from the training without a
budget. The towers share nothing until their loss, so the plan may run their forwards and backwards
in any order that pays. Images are squares of some colour at some place, texts say which: the loss
(as in CLIP) is small once each image finds its text.
"""

from __future__ import annotations

import math

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.nn import functional

from examples.compare import Run, main, measure
from fxremat.integrations.accelerate import prepare

BATCH, SIZE, WIDTH, LAYERS = 32, 32, 96, 4
PLACES = SIZE // 8
WORDS = 3 + 2 * PLACES


def draw(seed: int) -> tuple[Tensor, Tensor]:
    """Images ``(BATCH, 3, SIZE, SIZE)``, and texts ``(BATCH, 3)``: colour, row, column."""
    generator = torch.Generator().manual_seed(seed)
    images = 0.1 * torch.randn(BATCH, 3, SIZE, SIZE, generator=generator)
    colour = torch.randint(3, (BATCH,), generator=generator)
    row, column = torch.randint(PLACES, (2, BATCH), generator=generator)
    for i in range(BATCH):
        y, x = 8 * int(row[i]), 8 * int(column[i])
        images[i, colour[i], y : y + 8, x : x + 8] += 1
    return images, torch.stack([colour, 3 + row, 3 + PLACES + column], 1)


def transformer() -> nn.Module:
    """Layers of attention and of a two-layer network."""
    layer = nn.TransformerEncoderLayer(
        WIDTH, 4, 4 * WIDTH, dropout=0.1, activation="gelu", batch_first=True, norm_first=True
    )
    return nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False)


class Towers(nn.Module):
    """An image tower and a text tower; returns their contrastive loss."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, WIDTH, 4, stride=4)
        self.places = nn.Parameter(0.02 * torch.randn((SIZE // 4) ** 2, WIDTH))
        self.words = nn.Embedding(WORDS, WIDTH)
        self.image, self.text = transformer(), transformer()
        self.scale = nn.Parameter(torch.tensor(math.log(10.0)))

    def forward(self, images: Tensor, texts: Tensor) -> Tensor:
        """The mean cross entropy of images to texts and of texts to images."""
        seen = self.image(self.patches(images).flatten(2).transpose(1, 2) + self.places)
        read = self.text(self.words(texts))
        seen, read = (functional.normalize(x.mean(1), dim=-1) for x in (seen, read))
        scores = self.scale.exp() * seen @ read.T
        pairs = torch.arange(len(scores), device=scores.device)
        there = functional.cross_entropy(scores, pairs)
        return (there + functional.cross_entropy(scores.T, pairs)) / 2


def train(name: str, steps: int, budget: str | None) -> Run:
    """Train the model, within a budget if there is one."""
    accelerator = Accelerator(cpu=True)
    torch.manual_seed(0)
    model: nn.Module = Towers()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    if budget is None:
        model, optimizer = accelerator.prepare(model, optimizer)
    else:
        model, optimizer = prepare(accelerator, model, optimizer, budget=budget)
    losses = []
    for seed in range(steps):
        images, texts = (x.to(accelerator.device) for x in draw(seed))
        loss = model(images, texts)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))

    def step() -> None:
        accelerator.backward(model(images, texts))
        optimizer.zero_grad()

    return measure(name, losses, model, step)


def run(steps: int, budget: str) -> tuple[Run, Run]:
    """The same training without a budget and within one."""
    return train("plain", steps, None), train("within a budget", steps, budget)


if __name__ == "__main__":
    main(run, __doc__, steps=40, budget="64 MiB")
