"""Networks of branches that meet: triplets, image and recipe, two traversals of shared blocks."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.models.gpt import Block, GPTConfig, tokens
from tests.models.images import images
from tests.models.resnet import ResNet
from tests.models.zoo import Args, Kwargs, ZooModel, drawn_once, seeded


class SiameseResNet(nn.Module):
    """Both passes move the statistics of the same BatchNorms, one after the other."""

    def __init__(self, encoder: nn.Module):
        super().__init__()
        self.encoder = encoder

    def forward(self, left: Tensor, right: Tensor, same: Tensor) -> Tensor:
        distance = functional.pairwise_distance(self.encoder(left), self.encoder(right))
        repel = (1 - same) * functional.relu(1 - distance).square()
        return (same * distance.square() + repel).mean()


class Triplet(nn.Module):
    """Three passes of one encoder; anchor and positive meet first, but hold no activation."""

    def __init__(self, encoder: nn.Module):
        super().__init__()
        self.encoder = encoder

    def forward(self, anchor: Tensor, positive: Tensor, negative: Tensor) -> Tensor:
        found = [self.encoder(x) for x in (anchor, positive, negative)]
        return functional.triplet_margin_loss(*found)


class TokenEncoder(nn.Module):
    """Transformer blocks on tokens, with dropout, to one vector each."""

    def __init__(self, config: GPTConfig, features: int):
        super().__init__()
        self.tokens = nn.Embedding(config.vocabulary, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.blocks))
        self.norm = nn.LayerNorm(config.width)
        self.head = nn.Linear(config.width, features)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x).mean(1))


def contrast(one: Tensor, other: Tensor) -> Tensor:
    """Each row of one belongs to the same row of the other."""
    logits = functional.normalize(one, dim=1) @ functional.normalize(other, dim=1).t()
    return functional.cross_entropy(10 * logits, torch.arange(len(one), device=one.device))


class ImageRecipe(nn.Module):
    """A deep convolutional branch and a transformer branch a fifth as long."""

    def __init__(self, image: nn.Module, recipe: nn.Module):
        super().__init__()
        self.image, self.recipe = image, recipe

    def forward(self, pictures: Tensor, ids: Tensor) -> Tensor:
        return contrast(self.image(pictures), self.recipe(ids))


class Composed(nn.Module):
    """A picture and a text that changes it are fused, and compared with the picture meant.

    Both pictures go through one encoder: two branches, one of which is two that meet.
    """

    def __init__(self, image: nn.Module, text: nn.Module, width: int, layers: int):
        super().__init__()
        self.image, self.text = image, text
        self.fuse = nn.ModuleList(
            nn.Sequential(
                nn.LayerNorm(width),
                nn.Linear(width, 4 * width),
                nn.GELU(),
                nn.Linear(4 * width, width),
            )
            for _ in range(layers)
        )

    def forward(self, pictures: Tensor, ids: Tensor, targets: Tensor) -> Tensor:
        x = self.image(pictures) * self.text(ids)
        for layer in self.fuse:
            x = x + layer(x)
        return contrast(x, self.image(targets))


class CrossBlock(nn.Module):
    """A transformer block that also attends to an image where there is one."""

    def __init__(self, config: GPTConfig):
        super().__init__()
        self.block = Block(config)
        self.norm = nn.LayerNorm(config.width)
        self.query = nn.Linear(config.width, config.width)
        self.key_value = nn.Linear(config.width, 2 * config.width)

    def forward(self, x: Tensor, image: Tensor | None) -> Tensor:
        if image is not None:
            key, value = self.key_value(image).chunk(2, -1)
            x = x + functional.scaled_dot_product_attention(self.query(self.norm(x)), key, value)
        return self.block(x)


class TwoTraversals(nn.Module):
    """Shared blocks run twice: for a text alone, and for a caption of an image (as in CoCa).

    Without cross-attention the second traversal reads another text, and no image.
    """

    def __init__(self, config: GPTConfig, *, cross: bool, patch: int = 8):
        super().__init__()
        self.cross = cross
        self.tokens = nn.Embedding(config.vocabulary, config.width)
        self.blocks = nn.ModuleList(CrossBlock(config) for _ in range(config.blocks))
        self.norm = nn.LayerNorm(config.width)
        if cross:
            self.head = nn.Linear(config.width, config.vocabulary, bias=False)
            self.patches = nn.Conv2d(3, config.width, patch, stride=patch)
            self.image_blocks = nn.ModuleList(Block(config) for _ in range(config.blocks // 2))
        else:
            for block in self.blocks:
                del block.norm, block.query, block.key_value

    def traverse(self, ids: Tensor, image: Tensor | None) -> Tensor:
        x = self.tokens(ids)
        for block in self.blocks:
            x = block(x, image)
        return self.norm(x)

    def forward(self, text: Tensor, caption: Tensor, pictures: Tensor | None = None) -> Tensor:
        alone = self.traverse(text, None)
        if not self.cross:
            return contrast(alone.mean(1), self.traverse(caption, None).mean(1))
        image = self.patches(pictures).flatten(2).transpose(1, 2)
        for block in self.image_blocks:
            image = block(image)
        logits = self.head(self.traverse(caption, image)[:, :-1])
        describes = functional.cross_entropy(logits.flatten(0, 1), caption[:, 1:].flatten())
        return describes + contrast(alone.mean(1), image.mean(1))


@dataclass(frozen=True)
class _Size:
    """Of the models of one list."""

    depths: tuple[int, ...]
    width: int
    batch: int
    pixels: int
    config: GPTConfig
    length: int
    recipe_blocks: int
    prefix: str = ""


def _entry(name: str, build, sample, *, draws: bool = False) -> ZooModel:
    return ZooModel(
        name=name,
        build=drawn_once(build),
        sample=sample,
        loss=lambda loss: loss,
        loss_inside=True,
        draws=draws,
    )


def _entries(size: _Size) -> list[ZooModel]:
    config, batch = size.config, size.batch

    def resnet() -> nn.Module:
        return ResNet(depths=size.depths, width=size.width, classes=config.width)

    def ids(seed: int) -> Tensor:
        return tokens(seed, vocabulary=config.vocabulary, batch=batch, length=size.length)[0]

    def pictures(seed: int) -> Tensor:
        return images(seed, batch=batch, size=size.pixels)

    def pairs(seed: int) -> tuple[Args, Kwargs]:
        with seeded(seed):
            same = torch.randint(2, (batch,)).float()
        return (pictures(seed), pictures(seed + 1), same), {}

    def triplets(seed: int) -> tuple[Args, Kwargs]:
        return tuple(ids(seed + i) for i in range(3)), {}

    def faces(seed: int) -> tuple[Args, Kwargs]:
        return tuple(pictures(seed + i) for i in range(3)), {}

    def recipes(seed: int) -> tuple[Args, Kwargs]:
        return (pictures(seed), ids(seed)), {}

    def changes(seed: int) -> tuple[Args, Kwargs]:
        return (pictures(seed), ids(seed), pictures(seed + 1)), {}

    def captions(seed: int) -> tuple[Args, Kwargs]:
        return (ids(seed), ids(seed + 1), pictures(seed)), {}

    def texts(seed: int) -> tuple[Args, Kwargs]:
        return (ids(seed), ids(seed + 1)), {}

    plain = replace(config, dropout=0.0)
    recipe = replace(plain, blocks=size.recipe_blocks)
    return [
        _entry(f"{size.prefix}siamese_resnet", lambda: SiameseResNet(resnet()), pairs),
        _entry(
            f"{size.prefix}triplet",
            lambda: Triplet(TokenEncoder(config, config.width)),
            triplets,
            draws=config.dropout > 0,
        ),
        _entry(f"{size.prefix}triplet_resnet", lambda: Triplet(resnet()), faces),
        _entry(
            f"{size.prefix}image_recipe",
            lambda: ImageRecipe(resnet(), TokenEncoder(recipe, config.width)),
            recipes,
        ),
        _entry(
            f"{size.prefix}composed",
            lambda: Composed(resnet(), TokenEncoder(recipe, config.width), config.width, 2),
            changes,
        ),
        _entry(f"{size.prefix}coca", lambda: TwoTraversals(plain, cross=True), captions),
        _entry(f"{size.prefix}two_texts", lambda: TwoTraversals(plain, cross=False), texts),
    ]


ZOO = _entries(
    _Size(
        depths=(2, 2, 2),
        width=8,
        batch=2,
        pixels=32,
        config=GPTConfig(vocabulary=96, context=32, width=32, heads=4, blocks=3, dropout=0.1),
        length=32,
        recipe_blocks=1,
    )
)
BENCH = _entries(
    _Size(
        depths=(3, 4, 6, 3),
        width=32,
        batch=8,
        pixels=128,
        config=GPTConfig(vocabulary=512, context=128, width=128, heads=4, blocks=8, dropout=0.0),
        length=128,
        recipe_blocks=3,
        prefix="bench_",
    )
)
