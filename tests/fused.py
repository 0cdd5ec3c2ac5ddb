"""Joint graphs with units in place of operations, what they compute without a compiler, models."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn import functional

from fxremat.effort import USUAL
from fxremat.passes.fuse.again import computed_twice
from fxremat.passes.fuse.rewrite import fuse
from fxremat.passes.fuse.unit import Unit, Units
from fxremat.passes.joint.build import rebuilt
from fxremat.passes.stages.linearize import linearize
from tests.harness import SEED, Captured, Ran, capture, flatten


def taken_apart(model: nn.Module, *args: Any, **options: Any) -> Captured:
    """The step of ``model``, with operations taken apart as for units."""
    return capture(model, args, apart=True, **options)


def fused(step: Captured, units: Units | None = None) -> fx.GraphModule:
    """The graph of ``step`` with units."""
    return fuse(step.line, Units() if units is None else units)


def with_units(step: Captured) -> Captured:
    """``step``, taken apart, with units from now on, as whoever compiles has it."""
    for how in (computed_twice, lambda line: fuse(line, Units())):
        module = how(linearize(step.joint, USUAL))
        step.joint = rebuilt(step.joint, module)
    return step


def units_in(module: fx.GraphModule) -> list[fx.Node]:
    """Calls of units, in order."""
    return [n for n in module.graph.nodes if isinstance(n.target, Unit)]


class ByOperations(fx.Interpreter):
    """Runs each unit operation by operation: nothing is compiled."""

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not isinstance(target, Unit):
            return super().call_function(target, args, kwargs)
        results = run_operations(target, args[: len(target.inputs)])
        return results[0] if len(results) == 1 else results


def run_operations(unit: Unit, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """What the operations of a unit return."""
    return fx.Interpreter(fx.GraphModule(nn.Module(), unit.graph)).run(*args)


def run_fused(step: Captured, module: fx.GraphModule, *, seed: int = SEED) -> Ran:
    """A graph of ``step`` with units, run without a compiler."""
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(seed)
        run = ByOperations(module).run
        flat = flatten(run(*step.primals, *step.tangents, enable_io_processing=False))
        return Ran(flat[: step.output_count], flat[step.output_count :], torch.get_rng_state())


WIDTH = 32


class Attention(nn.Module):
    """A block of a GPT."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)])
        self.ins, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            t.unflatten(-1, (4, -1)).transpose(1, 2)
            for t in self.ins(self.norms[0](x)).split(WIDTH, dim=-1)
        )
        scores = functional.dropout((q @ k.transpose(-1, -2) / 3).softmax(-1), 0.1)
        x = x + functional.dropout(self.out((scores @ v).transpose(1, 2).flatten(2)), 0.1)
        return x + functional.dropout(self.down(functional.gelu(self.up(self.norms[1](x)))), 0.1)


class Language(nn.Module):
    """A GPT with a loss; its output weight is its input's."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, WIDTH)
        self.blocks = nn.Sequential(*(Attention() for _ in range(layers)))

    def forward(self, ids: Tensor) -> Tensor:
        logits = self.blocks(self.embed(ids)) @ self.embed.weight.t()
        return functional.cross_entropy(logits.flatten(0, 1), ids.flatten())


class Images(nn.Module):
    """Convolutions and norms with running statistics; it returns two results."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1)
        self.norms = nn.ModuleList([nn.BatchNorm2d(8), nn.BatchNorm2d(8)])

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = self.norms[0](self.one(x)).relu()
        y = (self.norms[1](self.two(x)) + x).relu()
        return functional.max_pool2d(y, 2), x.mean(dim=(2, 3))


class Buffers(nn.Module):
    """Buffers that are read, then updated in place, then read; it returns what it read first."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH))
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.register_buffer("count", torch.ones(()))

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        x = (x - (self.mean + 1)) @ self.weight
        wave = x.sin()
        told = (self.mean * 3 + wave).exp()
        other = (told * wave).tanh() @ self.weight
        self.mean.lerp_(x.detach().mean(0), 0.1)
        self.count.add_(1)
        x = (wave * self.mean / self.count) @ self.weight
        return x, told, other


class MeanAlone(nn.Module):
    """One of two results leads to a buffer alone."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        variance, mean = torch.var_mean(x.sin())
        self.seen.copy_(variance + 1)
        return x.sin() * mean


class Draws(nn.Module):
    """A draw that waits for what runs with an operation after the next draw."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = x @ x
        a = functional.dropout(x.sin(), 0.5)
        b = functional.dropout(y, 0.5)
        return (a @ b) @ (x.cos() @ x)


def square() -> Tensor:
    return torch.randn(WIDTH, WIDTH, requires_grad=True)


STEPS: dict[str, Callable[[], tuple[nn.Module, tuple[Any, ...]]]] = {
    "language": lambda: (Language(2), (torch.randint(50, (2, 16)),)),
    "images": lambda: (Images(), (torch.randn(2, 3, 8, 8),)),
    "buffers": lambda: (Buffers(), (torch.randn(16, WIDTH),)),
    "draws": lambda: (Draws(), (square(), square())),
}
