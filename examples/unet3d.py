"""Segment volumes by a 3D U-Net with Lightning, within a byte budget.

    python -m examples.unet3d

The callback is all that differs from the training without a budget. A U-Net is hard on memory:
what each resolution found waits for the way back up. The volumes are balls in noise.
"""

from __future__ import annotations

import itertools
import logging

import lightning
import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader

from examples.compare import Run, main, measure
from fxremat.integrations.lightning import FxrematCallback

SIZE, BATCH, WIDTHS = 48, 2, (8, 16, 32, 64)


def draw(seed: int) -> tuple[Tensor, Tensor]:
    """A ball in noise, ``(1, SIZE, SIZE, SIZE)``, and the mask of the ball."""
    generator = torch.Generator().manual_seed(seed)
    center = torch.rand(3, generator=generator) * SIZE / 2 + SIZE / 4
    radius = 3 + 5 * torch.rand(1, generator=generator)
    axes = (torch.arange(SIZE).float(),) * 3
    places = torch.stack(torch.meshgrid(*axes, indexing="ij"), -1)
    mask = ((places - center).norm(dim=-1) < radius).float()[None]
    return mask + torch.randn(mask.shape, generator=generator), mask


def convolutions(inputs: int, outputs: int) -> nn.Sequential:
    """Two convolutions, each normalized."""
    layers: list[nn.Module] = []
    for width in (inputs, outputs):
        layers += [nn.Conv3d(width, outputs, 3, padding=1, bias=False)]
        layers += [nn.InstanceNorm3d(outputs, affine=True), nn.LeakyReLU(0.01)]
    return nn.Sequential(*layers)


class UNet(lightning.LightningModule):
    """Scores of each voxel."""

    def __init__(self) -> None:
        super().__init__()
        pairs = list(itertools.pairwise(WIDTHS))
        self.first = convolutions(1, WIDTHS[0])
        self.down = nn.ModuleList(convolutions(narrow, wide) for narrow, wide in pairs)
        self.up = nn.ModuleList(
            nn.ConvTranspose3d(wide, narrow, 2, stride=2) for narrow, wide in reversed(pairs)
        )
        self.merge = nn.ModuleList(
            convolutions(2 * narrow, narrow) for narrow, _ in reversed(pairs)
        )
        self.head = nn.Conv3d(WIDTHS[0], 1, 1)
        self.losses: list[float] = []

    def forward(self, x: Tensor) -> Tensor:
        """Volumes ``(batch, 1, depth, height, width)`` to scores of the same shape."""
        skips = [self.first(x)]
        for down in self.down:
            skips.append(down(functional.max_pool3d(skips[-1], 2)))
        x = skips.pop()
        for up, merge in zip(self.up, self.merge, strict=True):
            x = merge(torch.cat([skips.pop(), up(x)], 1))
        return self.head(x)

    def training_step(self, batch: tuple[Tensor, Tensor], _index: int) -> Tensor:
        """The loss of a batch."""
        loss = loss_of(self(batch[0]), batch[1])
        self.losses.append(float(loss.detach()))
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Adam."""
        return torch.optim.Adam(self.parameters(), lr=3e-3)


def loss_of(scores: Tensor, mask: Tensor) -> Tensor:
    """Cross entropy, and one minus the Dice coefficient."""
    dice = 2 * (scores.sigmoid() * mask).sum() / (scores.sigmoid().sum() + mask.sum())
    return functional.binary_cross_entropy_with_logits(scores, mask) + 1 - dice


def train(name: str, steps: int, callbacks: list[Callback]) -> Run:
    """Train the model; with the callback, within its budget."""
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    lightning.seed_everything(0, verbose=False)
    model = UNet()
    trainer = lightning.Trainer(
        max_steps=steps, accelerator="cpu", devices=1, callbacks=callbacks, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    loader = DataLoader([draw(i) for i in range(steps * BATCH)], batch_size=BATCH)
    trainer.fit(model, loader)
    # One more step, to measure it: after the fit the module runs without a plan again.
    planned = callbacks[0].model if callbacks else model
    (volumes, masks), optimizer = next(iter(loader)), trainer.optimizers[0]

    def step() -> None:
        loss_of(planned(volumes), masks).backward()
        optimizer.zero_grad()

    return measure(name, model.losses, planned, step)


def run(steps: int, budget: str) -> tuple[Run, Run]:
    """The same training without a budget and within one."""
    plain = train("plain", steps, [])
    return plain, train("within a budget", steps, [FxrematCallback(budget)])


if __name__ == "__main__":
    main(run, __doc__, steps=20, budget="96 MiB")
