"""Small models of each kind, with their data and losses, whose steps take milliseconds."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional


class MLP(nn.Sequential):
    """Three layers on 64 images of 784 numbers."""

    def __init__(self) -> None:
        super().__init__(
            nn.Linear(784, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10)
        )


class Attention(nn.Module):
    """Causal attention of several heads, as nanoGPT's."""

    def __init__(self, width: int, heads: int, *, causal: bool) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.heads, self.causal = heads, causal

    def forward(self, x: Tensor) -> Tensor:
        """Tokens in, tokens out."""
        batch, length, width = x.shape
        parts = self.qkv(x).split(width, dim=2)
        q, k, v = (p.view(batch, length, self.heads, -1).transpose(1, 2) for p in parts)
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        return self.out(y.transpose(1, 2).reshape(batch, length, width))


class Block(nn.Module):
    """A layer of a Transformer, norms first."""

    def __init__(self, width: int, heads: int, *, causal: bool) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.attention = Attention(width, heads, causal=causal)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        """Tokens in, tokens out."""
        x = x + self.attention(self.norms[0](x))
        y: Tensor = x + self.mlp(self.norms[1](x))
        return y


class GPT(nn.Module):
    """nanoGPT with 4 layers of width 128, on 8 × 64 tokens."""

    def __init__(self, words: int = 512, width: int = 128, layers: int = 4) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(words, width), nn.Embedding(64, width)
        self.blocks = nn.ModuleList(Block(width, 4, causal=True) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, words, bias=False)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """The loss."""
        places = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.words(tokens) + self.places(places)
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


class Encoder(nn.Module):
    """The Transformer of pytorch/examples' word_language_model, on 35 × 20 words."""

    def __init__(self, words: int = 1000, width: int = 200) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(width, 2, 200, 0.2)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.embedding, self.decoder = nn.Embedding(words, width), nn.Linear(width, words)
        self.width = width
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(35))

    def forward(self, x: Tensor) -> Tensor:
        """Logarithms of probabilities."""
        x = self.embedding(x) * math.sqrt(self.width)
        found: Tensor = functional.log_softmax(self.decoder(self.encoder(x, mask=self.mask)), -1)
        return found.flatten(0, 1)


class Convnet(nn.Module):
    """The network of pytorch/examples' mnist, on 16 images."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(1, 16, 3, 1), nn.Conv2d(16, 32, 3, 1)
        self.drop1, self.drop2 = nn.Dropout(0.25), nn.Dropout(0.5)
        self.fc1, self.fc2 = nn.Linear(4608, 64), nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Logarithms of probabilities."""
        x = functional.max_pool2d(functional.relu(self.conv2(functional.relu(self.conv1(x)))), 2)
        x = self.drop1(x).flatten(1)
        return functional.log_softmax(self.fc2(self.drop2(functional.relu(self.fc1(x)))), dim=1)


class BatchNormNet(nn.Module):
    """Six convolutions with BatchNorm and a residual each, on 8 images of 32²."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, width, 3, padding=1)
        self.convs = nn.ModuleList(nn.Conv2d(width, width, 3, padding=1) for _ in range(6))
        self.norms = nn.ModuleList(nn.BatchNorm2d(width) for _ in range(6))
        self.head = nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Logits."""
        x = self.stem(x)
        for conv, norm in zip(self.convs, self.norms, strict=True):
            x = x + functional.relu(norm(conv(x)))
        found: Tensor = self.head(x.mean((2, 3)))
        return found


class VAE(nn.Module):
    """The network of pytorch/examples' vae, on 32 images."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc21, self.fc22 = (nn.Linear(784, 128), *(nn.Linear(128, 20) for _ in "ab"))
        self.fc3, self.fc4 = nn.Linear(20, 128), nn.Linear(128, 784)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """What is made of it, and the mean and variance of what it stands for."""
        h = functional.relu(self.fc1(x.flatten(1)))
        mean, log_var = self.fc21(h), self.fc22(h)
        z = mean + torch.randn_like(mean) * torch.exp(0.5 * log_var)
        return torch.sigmoid(self.fc4(functional.relu(self.fc3(z)))), mean, log_var


class Siamese(nn.Module):
    """Two pictures through one convolutional network, 16 pairs of 28²."""

    def __init__(self) -> None:
        super().__init__()
        self.tower = nn.Sequential(
            nn.Conv2d(1, 8, 3, 2), nn.ReLU(), nn.Conv2d(8, 16, 3, 2), nn.ReLU(), nn.Flatten(),
            nn.Linear(576, 64),
        )  # fmt: skip
        self.head = nn.Sequential(nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 1))

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        """How alike they are."""
        found: Tensor = self.head(torch.cat([self.tower(a), self.tower(b)], 1))
        return torch.sigmoid(found).squeeze(1)


class ViT(nn.Module):
    """Two layers of width 64 on 8 images of 32², patches of 4²."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, 4, 4)
        self.places = nn.Parameter(torch.randn(1, 64, width) * 0.02)
        self.blocks = nn.ModuleList(Block(width, 2, causal=False) for _ in range(2))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Logits."""
        x = self.patches(x).flatten(2).transpose(1, 2) + self.places
        for block in self.blocks:
            x = block(x)
        found: Tensor = self.head(self.norm(x).mean(1))
        return found


class LSTM(nn.Module):
    """pytorch/examples' mnist_rnn, on 64 images: Dynamo captures nothing of an ``nn.LSTM``."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.norm = nn.LSTM(28, 64, batch_first=True), nn.BatchNorm1d(64)
        self.fc1, self.fc2 = nn.Linear(64, 32), nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Logarithms of probabilities."""
        y, _ = self.rnn(x.reshape(-1, 28, 28))
        return functional.log_softmax(
            self.fc2(functional.relu(self.fc1(self.norm(y[:, -1, :])))), 1
        )


class Pieces(nn.Module):
    """A graph break between each two of four layers of width 128, on 128 rows."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(128, 256), nn.GELU(), nn.Linear(256, 128), nn.LayerNorm(128))
            for _ in range(4)
        )
        self.head = nn.Linear(128, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Logits."""
        for layer in self.layers:
            x = x + layer(x)
            torch._dynamo.graph_break()
        found: Tensor = self.head(x)
        return found


class Cell(nn.Module):
    """A GRUCell unrolled 12 times: operations of a few microseconds."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.head = nn.GRUCell(16, 32), nn.Linear(32, 4)

    def forward(self, x: Tensor) -> Tensor:
        """Logits."""
        state = x.new_zeros(x.shape[0], 32)
        for moment in x.unbind(1):
            state = self.cell(moment, state)
        found: Tensor = self.head(state)
        return found


Loss = Callable[..., Tensor]


def _own(loss: Tensor, *_targets: Tensor) -> Tensor:
    return loss


def _vae_loss(outputs: tuple[Tensor, Tensor, Tensor], x: Tensor) -> Tensor:
    made, mean, log_var = outputs
    apart = -0.5 * torch.sum(1 + log_var - mean.pow(2) - log_var.exp())
    return functional.binary_cross_entropy(made, x.flatten(1), reduction="sum") + apart


@dataclass(frozen=True, slots=True)
class Case:
    """A small model and its training.

    Attributes:
        build: makes it.
        inputs: of the call.
        loss: of what it returns and the targets.
        targets: of the loss.
    """

    build: Callable[[], nn.Module]
    inputs: tuple[Tensor, ...]
    loss: Loss
    targets: tuple[Tensor, ...] = ()


def _cases() -> dict[str, Callable[[], Case]]:
    def classes(count: int, most: int) -> tuple[Tensor, ...]:
        return (torch.randint(0, most, (count,)),)

    def gpt() -> Case:
        tokens = torch.randint(0, 512, (8, 65))
        return Case(GPT, (tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()), _own)

    def vae() -> Case:
        x = torch.rand(32, 1, 28, 28)
        return Case(VAE, (x,), _vae_loss, (x,))

    def siamese() -> Case:
        pair = torch.rand(16, 1, 28, 28), torch.rand(16, 1, 28, 28)
        return Case(Siamese, pair, functional.binary_cross_entropy, (torch.ones(16),))

    ce, nll = functional.cross_entropy, functional.nll_loss
    return {
        "MLP": lambda: Case(MLP, (torch.rand(64, 784),), ce, classes(64, 10)),
        "GPT": gpt,
        "Transformer": lambda: Case(
            Encoder, (torch.randint(0, 1000, (35, 20)),), nll, classes(700, 1000)
        ),
        "convnet": lambda: Case(Convnet, (torch.rand(16, 1, 28, 28),), nll, classes(16, 10)),
        "BatchNorm": lambda: Case(BatchNormNet, (torch.rand(8, 3, 32, 32),), ce, classes(8, 10)),
        "VAE": vae,
        "siamese": siamese,
        "ViT": lambda: Case(ViT, (torch.rand(8, 3, 32, 32),), ce, classes(8, 10)),
        "GRUCell": lambda: Case(Cell, (torch.rand(16, 12, 16),), ce, classes(16, 4)),
        "LSTM": lambda: Case(LSTM, (torch.rand(64, 1, 28, 28),), nll, classes(64, 10)),
        "pieces": lambda: Case(Pieces, (torch.rand(128, 128),), ce, classes(128, 10)),
    }


CASES = _cases()
