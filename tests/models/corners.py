"""Small models with one rare thing each: layouts, aliases, odd operations, shared modules."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

from tests.models.zoo import ZooModel, drawn_once, seeded, sum_of_squares

WIDTH, ROWS = 16, 32


class Applied(nn.Module):
    """A function of layers and inputs."""

    def __init__(self, function: Callable[..., Any], *layers: nn.Module):
        super().__init__()
        self.function = function
        self.layers = nn.ModuleList(layers)

    def forward(self, *args: Tensor) -> Any:
        return self.function(self.layers, *args)


def _linears(count: int = 5) -> list[nn.Module]:
    return [nn.Linear(WIDTH, WIDTH) for _ in range(count)]


def _stack(make: Callable[[], list[nn.Module]], count: int = 5) -> nn.Sequential:
    return nn.Sequential(*(layer for _ in range(count) for layer in make()))


def _mlp(count: int = 5) -> nn.Sequential:
    return _stack(lambda: [nn.Linear(WIDTH, WIDTH), nn.GELU()], count)


def _convs(*tail: Callable[[], nn.Module]) -> nn.Sequential:
    return _stack(lambda: [nn.Conv2d(8, 8, 3, padding=1), *(make() for make in tail)])


def _x(*shape: int, dtype: torch.dtype = torch.float32) -> Callable[[], tuple[Tensor, ...]]:
    return lambda: (torch.randn(shape or (ROWS, WIDTH), dtype=dtype),)


_IMAGE = _x(2, 8, 10, 10)
_CASES: dict[str, tuple[Callable[[], nn.Module], Callable[[], tuple[Any, ...]]]] = {}


def _case(sample: Callable[[], tuple[Any, ...]] = _x()) -> Callable[..., Any]:  # noqa: B008
    def register(build: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
        _CASES[build.__name__] = (build, sample)
        return build

    return register


@_case(lambda: (torch.randn(ROWS, WIDTH), torch.randn(ROWS, WIDTH)))
def mutated_input() -> nn.Module:
    def forward(layers: nn.ModuleList, x: Tensor, y: Tensor) -> Tensor:
        y = y.detach()
        y.mul_(2)
        for layer in layers:
            x = layer(x + y).tanh()
        return x

    return Applied(forward, *_linears())


def _two_views() -> tuple[Tensor, ...]:
    base = torch.randn(ROWS, WIDTH)
    return base, base.view(-1)


@_case(_two_views)
def aliased_inputs() -> nn.Module:
    def forward(layers: nn.ModuleList, x: Tensor, y: Tensor) -> Tensor:
        for layer in layers:
            x = (layer(x) + y.sum()).tanh()
        return x

    return Applied(forward, *_linears())


@_case()
def one_operation() -> nn.Module:
    return nn.Linear(WIDTH, WIDTH)


@_case()
def returned_parameter() -> nn.Module:
    def forward(layers: nn.ModuleList, x: Tensor) -> tuple[Tensor, Tensor]:
        weight = layers[0].weight
        for layer in layers:
            x = layer(x).tanh()
        return weight, x

    return Applied(forward, *_linears())


@_case(_x(0, WIDTH))
def empty_batch() -> nn.Module:
    return _mlp()


@_case(_x(dtype=torch.float64))
def doubles() -> nn.Module:
    return _mlp().double()


@_case(_x(dtype=torch.bfloat16))
def halves() -> nn.Module:
    return _mlp().bfloat16()


@_case()
def spectra() -> nn.Module:
    """Complex numbers between the layers."""

    def forward(layers: nn.ModuleList, x: Tensor) -> Tensor:
        for layer in layers:
            x = torch.view_as_real(torch.fft.fft(layer(x)))[..., 0].tanh()
        return x

    return Applied(forward, *_linears())


@_case()
def checkpointed() -> nn.Module:
    def forward(layers: nn.ModuleList, x: Tensor) -> Tensor:
        for layer in layers:
            x = checkpoint(layer, x, use_reentrant=False)
        return x

    return Applied(
        forward,
        *(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.2), nn.GELU()) for _ in range(5)),
    )


@_case(_x(4, 8, WIDTH))
def transformer() -> nn.Module:
    layer = nn.TransformerEncoderLayer(WIDTH, 2, 32, dropout=0.1, batch_first=True)
    return nn.TransformerEncoder(layer, 3)


@_case()
def spectral_norm() -> nn.Module:
    """Each forward moves two buffers by a power iteration, and reads them."""
    return _stack(lambda: [parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH)), nn.GELU()])


@_case()
def weight_norm() -> nn.Module:
    return _stack(lambda: [parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH)), nn.GELU()])


@_case(lambda: (torch.randn(2, 8, 10, 10).to(memory_format=torch.channels_last),))
def channels_last() -> nn.Module:
    model = _convs(lambda: nn.BatchNorm2d(8), lambda: nn.ReLU(inplace=True))
    return model.to(memory_format=torch.channels_last)


@_case(_IMAGE)
def group_norm() -> nn.Module:
    return _convs(lambda: nn.GroupNorm(2, 8), nn.SiLU)


@_case(_IMAGE)
def instance_norm() -> nn.Module:
    return _convs(lambda: nn.InstanceNorm2d(8, affine=True, track_running_stats=True), nn.SiLU)


@_case(_IMAGE)
def dropped_channels() -> nn.Module:
    return _convs(lambda: nn.Dropout2d(0.3), nn.SiLU)


@_case()
def shared_batch_norm() -> nn.Module:
    """One norm after each layer: its statistics move five times a step."""
    norm = nn.BatchNorm1d(WIDTH)
    return _stack(lambda: [nn.Linear(WIDTH, WIDTH), norm, nn.ReLU()])


@_case()
def frozen_batch_norm() -> nn.Module:
    model = _stack(lambda: [nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.ReLU()])
    model[1].eval()
    model[4] = nn.BatchNorm1d(WIDTH, track_running_stats=False)
    return model


@_case()
def statistics_read() -> nn.Module:
    """The running mean that a norm just moved is part of the result."""

    def forward(layers: nn.ModuleList, x: Tensor) -> Tensor:
        for linear, norm in zip(layers[::2], layers[1::2], strict=True):
            x = (norm(linear(x)) - norm.running_mean).tanh()
        return x

    pairs = [layer for linear in _linears() for layer in (linear, nn.BatchNorm1d(WIDTH))]
    return Applied(forward, *pairs)


@_case()
def transposed_parameters() -> nn.Module:
    """Gradients have other strides than their parameters."""
    model = _mlp()
    for parameter in model.parameters():
        if parameter.dim() == 2:
            parameter.data = parameter.data.t()
    return model


@_case(lambda: (torch.randn(1, WIDTH).expand(ROWS, WIDTH),))
def expanded_input() -> nn.Module:
    return _mlp()


@_case(lambda: (torch.randn(2 * ROWS, 2 * WIDTH)[::2, ::2],))
def sliced_input() -> nn.Module:
    return _mlp()


@_case()
def noise() -> nn.Module:
    def forward(layers: nn.ModuleList, x: Tensor) -> Tensor:
        for layer in layers:
            x = layer(x)
            x = (x + 0.1 * torch.empty_like(x).normal_()).tanh()
        return x

    return Applied(forward, *_linears())


class HalfGradient(torch.autograd.Function):
    """The exponential, half of whose gradient is lost."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        y = x.exp()
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (y,) = ctx.saved_tensors
        return gradient * y * 0.5


@_case()
def custom_gradient() -> nn.Module:
    def forward(layers: nn.ModuleList, x: Tensor) -> Tensor:
        for layer in layers:
            x = HalfGradient.apply(layer(x).tanh())
        return x

    return Applied(forward, *_linears())


@_case(lambda: (torch.randn(ROWS, WIDTH), torch.tensor([1, 3, 5])))
def written_rows() -> nn.Module:
    def forward(layers: nn.ModuleList, x: Tensor, rows: Tensor) -> Tensor:
        for layer in layers:
            y = layer(x).clone()
            y[rows] = 0.5
            x = y.tanh()
        return x

    return Applied(forward, *_linears())


@_case()
def sorted_columns() -> nn.Module:
    def forward(layers: nn.ModuleList, x: Tensor) -> Tensor:
        for layer in layers:
            values, places = layer(x).topk(WIDTH, dim=1)
            x = values.cumsum(1).tanh() + x.gather(1, places)
        return x

    return Applied(forward, *_linears())


@_case(_x(4, 3, 16, 16))
def pools() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.ConvTranspose2d(8, 8, 2),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
        nn.Linear(32, 4),
    )


@_case(lambda: (torch.randn(ROWS, WIDTH).requires_grad_(),))
def only_the_input_trains() -> nn.Module:
    return _mlp().requires_grad_(False)


@_case()
def glu() -> nn.Module:
    def forward(layers: nn.ModuleList, x: Tensor) -> Tensor:
        for layer in layers:
            x = x + functional.glu(torch.cat([layer(x), x], 1), dim=1)
        return x

    return Applied(forward, *_linears())


def _entry(name: str) -> ZooModel:
    build, make = _CASES[name]

    def sample(seed: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
        with seeded(seed):
            return make(), {}

    return ZooModel(name=name, build=drawn_once(build), sample=sample, loss=sum_of_squares)


CORNERS: dict[str, ZooModel] = {name: _entry(name) for name in _CASES}
