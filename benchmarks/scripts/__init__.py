"""Small training scripts of the kinds that people publish, each a module with one ``train``.

``train(wrap, meter, steps)`` is a generator: it trains ``steps`` iterations of a script's loop and
yields the loss of each. What a real script holds between iterations (the last output, the loss,
gradients) its frame holds as well.

* ``wrap(model, sample, **keywords)`` returns what is trained in the model's place. The keywords are
  what a user of that script would give ``fxremat.compile`` beside the budget: often nothing.
* ``meter.begin()`` stands right before a step's first forward, ``meter.end()`` right after its last
  backward. Optimizers' steps and evaluation lie outside. An iteration may hold several such pairs.

Models are small, data is made up, all is seeded. ``python -m benchmarks.scripts`` runs them all.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor, nn


class Wrap(Protocol):
    """Makes of a model what is trained in its place."""

    def __call__(self, model: nn.Module, sample: object, **keywords: object) -> nn.Module:
        """The model, compiled or not."""


class Meter(Protocol):
    """Takes the peak and the time of steps."""

    def begin(self) -> None:
        """A step begins: call it right before the first forward."""

    def end(self) -> None:
        """A step ends: call it right after the last backward."""


NAMES = (
    "quickstart",
    "clear_first",
    "zeros_kept",
    "mnist_convnet",
    "gan",
    "vae",
    "lstm_language_model",
    "gru_classifier",
    "lstm_cell_loop",
    "siamese",
    "maml",
    "reinforce",
    "lbfgs",
    "gaussian_process",
    "moco",
    "accumulation",
    "autocast",
    "averaged",
    "evaluation",
    "resume",
    "scheduled",
    "transformer_lm",
    "seq2seq",
    "super_resolution",
    "style_transfer",
    "vit",
    "experts",
    "two_optimizers",
    "unfreezing",
    "adafactor",
)


def images(batch: int, channels: int, side: int, classes: int) -> tuple[Tensor, Tensor]:
    """A batch of made-up images and their labels."""
    return torch.randn(batch, channels, side, side), torch.randint(0, classes, (batch,))
