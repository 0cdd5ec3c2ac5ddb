"""Networks that other libraries' parts are put together to, and that break the graph."""

# ruff: noqa: D102

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.wild_models.registry import Case, itself, square, wild


class Blocks(nn.Module):
    """Residual blocks that forwards below call one after the other."""

    def __init__(self, count: int = 8, width: int = 64) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(),
                          nn.Dropout(0.1), nn.Linear(4 * width, width))
            for _ in range(count)
        )  # fmt: skip


class CRNN(nn.Module):
    """Text in images: convolutions, an LSTM, CTC."""

    def __init__(self) -> None:
        super().__init__()
        self.convolutions = nn.Sequential(
            nn.Conv2d(1, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(32, 64, 3, padding=1), nn.BatchNorm2d(64), nn.ReLU(), nn.MaxPool2d((2, 1)),
        )  # fmt: skip
        self.rnn = nn.LSTM(64 * 8, 64, bidirectional=True, num_layers=2)
        self.head = nn.Linear(128, 40)

    def forward(self, images: Tensor) -> Tensor:
        found = self.convolutions(images)
        batch, channels, height, width = found.shape
        columns = found.permute(3, 0, 1, 2).reshape(width, batch, channels * height)
        return self.head(self.rnn(columns)[0]).log_softmax(-1)


@wild("torch")
def crnn_ctc() -> Case:
    targets = torch.randint(1, 40, (4, 10))
    sizes = torch.full((4,), 10)

    def loss(outputs: Tensor) -> Tensor:
        return functional.ctc_loss(outputs, targets, torch.full((4,), outputs.shape[0]), sizes)

    return Case(CRNN(), (torch.randn(4, 1, 32, 128),), {}, loss)


class Packed(nn.Module):
    """A GRU over sequences of several lengths."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(100, 64)
        self.before = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))
        self.rnn = nn.GRU(64, 128, batch_first=True)
        self.head = nn.Linear(128, 100)

    def forward(self, ids: Tensor, lengths: Tensor) -> Tensor:
        rnn = nn.utils.rnn
        x = self.before(self.tokens(ids))
        packed = rnn.pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        return self.head(rnn.pad_packed_sequence(self.rnn(packed)[0], batch_first=True)[0])


@wild("torch")
def packed_gru() -> Case:
    ids, lengths = torch.randint(0, 100, (32, 64)), torch.randint(10, 65, (32,))
    return Case(Packed(), (ids, lengths), {}, square)


class Logged(Blocks):
    """Keeps a log of norms, as numbers, of each block."""

    def forward(self, x: Tensor) -> tuple[Tensor, dict[str, float]]:
        log = {}
        for place, block in enumerate(self.blocks):
            x = x + block(x)
            log[f"norm {place}"] = x.detach().norm().item()
        return x.square().mean(), log


@wild("torch")
def logged_norms() -> Case:
    return Case(Logged(), (torch.randn(1024, 64),), {}, lambda outputs: outputs[0])


class Printed(Blocks):
    """Prints within the loop over its layers."""

    def forward(self, x: Tensor) -> Tensor:
        for place, block in enumerate(self.blocks):
            x = x + block(x)
            if place % 3 == 0:
                print(f"block {place}: {float(x.detach().abs().max()):.3f}")
        return x.square().mean()


@wild("torch")
def printed_loop() -> Case:
    return Case(Printed(), (torch.randn(1024, 64),), {}, itself)


class LayerDrop(Blocks):
    """Leaves layers out, by a number drawn of torch."""

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            if self.training and torch.rand(()).item() < 0.3:
                continue
            x = x + block(x)
        return x.square().mean()


@wild("torch")
def layer_drop() -> Case:
    return Case(LayerDrop(12), (torch.randn(1024, 64),), {}, itself)


class Clipped(Blocks):
    """Stops early where activations are not finite, and scales by what it has seen."""

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            y = block(x)
            if not torch.isfinite(y).all():
                raise FloatingPointError("not finite")
            x = x + y
        return x.square().mean()


@wild("torch")
def checked_finite() -> Case:
    return Case(Clipped(), (torch.randn(1024, 64),), {}, itself)


class Chosen(Blocks):
    """Only positions that are chosen go through the second half."""

    def forward(self, x: Tensor) -> Tensor:
        half = len(self.blocks) // 2
        for block in self.blocks[:half]:
            x = x + block(x)
        chosen = (x[:, 0] > 0).nonzero()[:, 0]
        y = x[chosen]
        for block in self.blocks[half:]:
            y = y + block(y)
        return x.index_add(0, chosen, y).square().mean()


@wild("torch")
def chosen_positions() -> Case:
    return Case(Chosen(), (torch.randn(1024, 64),), {}, itself)


class TiledLoss(torch.autograd.Function):
    """A loss over tiles that makes its gradients in the forward, as fused losses do."""

    @staticmethod
    @torch.compiler.disable
    def forward(ctx: Any, x: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        gx, gw, loss = torch.empty_like(x), torch.zeros_like(weight), x.new_zeros(())
        for begin in range(0, len(x), 128):
            part, wanted = x[begin : begin + 128], targets[begin : begin + 128, None]
            shares = (part @ weight.t()).softmax(-1)
            loss -= shares.gather(1, wanted).log().sum()
            shares.scatter_add_(1, wanted, -torch.ones(len(part), 1))
            gx[begin : begin + 128] = shares @ weight
            gw += shares.t() @ part
        ctx.save_for_backward(gx / len(x), gw / len(x))
        return loss / len(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        gx, gw = ctx.saved_tensors
        return gx * grad, gw * grad, None


class TiledHead(Blocks):
    """Blocks with such a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(64, 2000, bias=False)

    def forward(self, x: Tensor, targets: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return TiledLoss.apply(x, self.head.weight, targets)


@wild("torch")
def tiled_loss() -> Case:
    return Case(TiledHead(), (torch.randn(1024, 64), torch.randint(0, 2000, (1024,))), {}, itself)


class Detector(nn.Module):
    """A small DETR: the loss matches with scipy."""

    def __init__(self) -> None:
        super().__init__()
        self.back = nn.Sequential(
            nn.Conv2d(3, 32, 3, 2, 1), nn.ReLU(), nn.Conv2d(32, 64, 3, 2, 1), nn.ReLU()
        )
        self.attention = nn.Transformer(64, 4, 2, 2, 128, dropout=0.1, batch_first=True)
        self.queries = nn.Parameter(torch.randn(20, 64))
        self.classes, self.boxes = nn.Linear(64, 11), nn.Linear(64, 4)

    def forward(self, images: Tensor, targets: list[dict[str, Tensor]]) -> Tensor:
        from scipy.optimize import linear_sum_assignment

        found = self.back(images).flatten(2).transpose(1, 2)
        seen = self.attention(found, self.queries.expand(len(images), -1, -1))
        classes, boxes = self.classes(seen), self.boxes(seen).sigmoid()
        loss = images.new_zeros(())
        for c, b, target in zip(classes, boxes, targets, strict=True):
            with torch.no_grad():
                cost = torch.cdist(b, target["boxes"], p=1) - c.softmax(-1)[:, target["labels"]]
            rows, columns = map(torch.as_tensor, linear_sum_assignment(cost.numpy()))
            labels = torch.full((20,), 10)
            labels[rows] = target["labels"][columns]
            loss = loss + functional.cross_entropy(c, labels)
            loss = loss + functional.l1_loss(b[rows], target["boxes"][columns])
        return loss


def boxes(count: int, classes: int = 10) -> dict[str, Tensor]:
    """A target of detection."""
    return {
        "boxes": torch.rand(count, 4) * 0.5 + 0.2,
        "labels": torch.randint(0, classes, (count,)),
    }


@wild("scipy")
def hungarian_detector() -> Case:
    return Case(Detector(), (torch.randn(2, 3, 96, 96), [boxes(5), boxes(3)]), {}, itself)


@wild("x_transformers")
def x_layer_dropout() -> Case:
    from x_transformers import Decoder, TransformerWrapper

    layers = Decoder(dim=64, depth=8, heads=4, layer_dropout=0.2, attn_dropout=0.1)
    model = TransformerWrapper(num_tokens=200, max_seq_len=128, attn_layers=layers)
    return Case(model, (torch.randint(0, 200, (4, 128)),), {}, square)


class Field(nn.Module):
    """What an ODE follows."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(32, 128), nn.Tanh(), nn.Linear(128, 32))

    def forward(self, t: Tensor, y: Tensor) -> Tensor:
        return self.net(y) * (1 + t)


class Flow(nn.Module):
    """An ODE between two layers."""

    def __init__(self, method: str, adjoint: bool) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(32, 32), nn.Linear(32, 10)
        self.field, self.method, self.adjoint = Field(), method, adjoint

    def forward(self, x: Tensor) -> Tensor:
        import torchdiffeq

        solve = torchdiffeq.odeint_adjoint if self.adjoint else torchdiffeq.odeint
        times = torch.linspace(0.0, 1.0, 2)
        path = solve(self.field, self.first(x), times, method=self.method, rtol=1e-3, atol=1e-4)
        return self.last(path[-1])


@wild("torchdiffeq")
def ode_dopri5() -> Case:
    return Case(Flow("dopri5", adjoint=False), (torch.randn(512, 32),), {}, square)


@wild("torchdiffeq")
def ode_adjoint() -> Case:
    return Case(Flow("dopri5", adjoint=True), (torch.randn(2048, 32),), {}, square)


@wild("neuralop")
def tfno() -> Case:
    from neuralop.models import TFNO

    model = TFNO(n_modes=(8, 8), in_channels=3, out_channels=1, hidden_channels=24, n_layers=3,
                 factorization="tucker", implementation="factorized", rank=0.2)  # fmt: skip
    return Case(model, (torch.randn(4, 3, 48, 48),), {}, square)


@wild("neuralop")
def fno() -> Case:
    from neuralop.models import FNO

    model = FNO(n_modes=(8, 8), in_channels=3, out_channels=1, hidden_channels=24, n_layers=3)
    return Case(model, (torch.randn(4, 3, 48, 48),), {}, square)


@wild("diffusers")
def unet_with_snr() -> Case:
    """A diffusion step whose weight of the loss is read as a number."""
    from diffusers import DDPMScheduler, UNet2DModel

    class Diffusion(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.unet = UNet2DModel(
                sample_size=32,
                block_out_channels=(32, 64),
                layers_per_block=1,
                norm_num_groups=8,
                down_block_types=("DownBlock2D", "AttnDownBlock2D"),
                up_block_types=("AttnUpBlock2D", "UpBlock2D"),
            )
            self.scheduler = DDPMScheduler(num_train_timesteps=100)

        def forward(self, images: Tensor) -> Tensor:
            noise, steps = torch.randn_like(images), torch.randint(0, 100, (len(images),))
            noisy = self.scheduler.add_noise(images, noise, steps)
            found = self.unet(noisy, steps).sample
            weight = 1 / (1 + steps.float().mean().item())
            return weight * functional.mse_loss(found, noise)

    return Case(Diffusion(), (torch.randn(4, 3, 32, 32),), {}, itself)
