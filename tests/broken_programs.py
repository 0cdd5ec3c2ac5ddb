"""Random models that break Dynamo's graph, as code that can be read: :mod:`tests.broken_check`.

An item is a function that draws how it looks and gives lines in which ``x`` goes from rows of
numbers to such rows: of the same number or, where data say so, of fewer.
"""

from __future__ import annotations

import linecache
import random
import sys
import textwrap
import types
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from tests.models.zoo import seeded

Item = Callable[["Writer"], str]


class Sink:
    """Takes what is printed."""

    def __init__(self) -> None:
        self.texts: list[str] = []

    def write(self, text: str) -> None:
        self.texts.append(text)


class Mlp(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.dropout(self.down(nn.functional.gelu(self.up(self.norm(x)))))


class Chatty(nn.Module):
    """Breaks the graph in its own forward, and remembers."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.register_buffer("most", torch.zeros(()))
        self.told: list[float] = []

    def forward(self, x: Tensor) -> Tensor:
        inner = torch.tanh(self.up(x))
        self.most.copy_(torch.maximum(self.most, inner.detach().max()))
        self.told.append(inner.detach().mean().item())
        return x + self.down(inner)


class Breaking(torch.autograd.Function):
    """Has a number of its input in its forward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.scale = 1 / (1 + x.abs().mean().item())
        return x * ctx.scale

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * ctx.scale


class Ahead(torch.autograd.Function):
    """Has its gradient in its forward already."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        with torch.enable_grad():
            own = x.detach().requires_grad_()
            made = own + torch.sin(own) * torch.sigmoid(own)
            (gradient,) = torch.autograd.grad(made.sum(), own)
        ctx.save_for_backward(gradient)
        return made.detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (own,) = ctx.saved_tensors
        return gradient * own


class Ranked(torch.autograd.Function):
    """Returns indices beside its output, which have no gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(x)
        places = x.argmax(dim=1)
        ctx.mark_non_differentiable(places)
        return x * torch.sigmoid(x), places

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, _: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        share = torch.sigmoid(x)
        return gradient * (share + x * share * (1 - share))


NAMES = {
    "torch": torch,
    "nn": nn,
    "random": random,
    "Breaking": Breaking,
    "Ahead": Ahead,
    "Ranked": Ranked,
}
"""What the lines of a forward use beside ``self`` and ``x``."""


@dataclass
class Writer:
    """What is known where an item begins.

    Attributes:
        draw: decides.
        width: of a row.
        modules: made so far, by their names on the model.
        fewer: the number of rows depends on data.
        kinds: of the items so far.
    """

    draw: random.Random
    width: int
    modules: dict[str, nn.Module] = field(default_factory=dict)
    fewer: bool = False
    kinds: list[str] = field(default_factory=list)

    def module(self, made: nn.Module) -> str:
        """A new attribute, as lines name it."""
        name = f"{type(made).__name__.lower()}{len(self.modules)}"
        self.modules[name] = made
        return f"self.{name}"

    def mlps(self, most: int = 4) -> str:
        count = self.draw.randint(2, most)
        return self.module(nn.ModuleList(Mlp(self.width) for _ in range(count)))

    def write(self, item: Item, indent: int = 0) -> str:
        """Lines of an item."""
        self.kinds.append(item.__name__)
        return textwrap.indent(textwrap.dedent(item(self)).strip("\n"), " " * indent)


def mlp(w: Writer) -> str:
    return f"x = {w.module(Mlp(w.width))}(x)"


def sequential(w: Writer) -> str:
    wide = w.draw.choice((2, 4)) * w.width
    act = w.draw.choice((nn.GELU, nn.ReLU, nn.SiLU))()
    made = nn.Sequential(nn.Linear(w.width, wide), act, nn.Linear(wide, w.width))
    return f"x = x + {w.module(made)}(x)"


def several(w: Writer) -> str:
    return f"for block in {w.mlps()}:\n    x = block(x)"


def encoder(w: Writer) -> str:
    first = w.draw.random() < 0.5
    made = nn.TransformerEncoderLayer(
        w.width, 2, 2 * w.width, dropout=0.1, batch_first=True, norm_first=first
    )
    return f"x = {w.module(made)}({batched(w, 32)}).reshape(-1, {w.width})"


def recurrent(w: Writer) -> str:
    made = w.draw.choice((nn.LSTM, nn.GRU))(w.width, w.width, batch_first=True)
    return f"x = {w.module(made)}({batched(w, 4)})[0].reshape(-1, {w.width})"


def batched(w: Writer, length: int) -> str:
    """Rows as sequences; those that make up none are left out."""
    rows = f"x[: len(x) // {length} * {length}]" if w.fewer else "x"
    return f"{rows}.reshape(-1, {length}, {w.width})"


def norm(w: Writer) -> str:
    return f"x = {w.module(nn.LayerNorm(w.width))}(x)"


def dropout(w: Writer) -> str:
    return f"x = {w.module(nn.Dropout(0.1))}(x)"


def batchnorm(w: Writer) -> str:
    return f"x = torch.relu({w.module(nn.BatchNorm1d(w.width))}(x)) + x"


def no_grad_part(w: Writer) -> str:
    inner = w.draw.choice(("torch._dynamo.graph_break()", "self.log.append(x.mean().item())", ""))
    return f"""
with torch.no_grad():
    size = {w.module(Mlp(w.width))}(x).abs().mean()
    {inner or "size = size + 1"}
x = x / (1 + size)
"""


WORK = (
    *(mlp, mlp, sequential, sequential, several, encoder, encoder, recurrent),
    *(norm, dropout, batchnorm, no_grad_part),
)
"""Items that break nothing, or not much."""


def buffer(w: Writer) -> str:
    return "self.seen.add_(x.detach().mean())"


def item_detached(w: Writer) -> str:
    return "size = x.detach().abs().mean().item()\nx = x * (2 / (1 + size))"


def item_differentiable(w: Writer) -> str:
    made = w.draw.choice(("size.item()", "(size / size.item())"))
    return f"size = 1 + x.square().mean()\nx = x * {made}"


def printed(w: Writer) -> str:
    text = w.draw.choice(('""', f'"{len(w.kinds)} "'))
    return f'print({text}, end="", file=self.sink)'


def graph_break(w: Writer) -> str:
    return "torch._dynamo.graph_break()"


def selected(w: Writer) -> str:
    w.fewer = True
    rows = w.draw.choice(
        ("x[large]", "x[large.nonzero().squeeze(1)]", "x.index_select(0, large.nonzero()[:, 0])")
    )
    place = w.draw.randrange(w.width)
    return f"""
some = x.detach()[:, {place}]
large = some > some.mean() - some.std()
x = {rows}
"""


def logged_loop(w: Writer) -> str:
    made = w.draw.choice(("float(x.detach().mean())", "x.detach().mean().item()"))
    return f"for block in {w.mlps()}:\n    x = block(x)\n    self.log.append({made})"


def broken_loop(w: Writer) -> str:
    lines = ["torch._dynamo.graph_break()", "x = block(x)"]
    w.draw.shuffle(lines)
    return f"for block in {w.mlps()}:\n    {lines[0]}\n    {lines[1]}"


def inner_break(w: Writer) -> str:
    return f"x = {w.module(Chatty(w.width))}(x)"


def function_breaking(w: Writer) -> str:
    return "x = x + Breaking.apply(x)"


def function_ahead(w: Writer) -> str:
    return "x = Ahead.apply(x)"


def function_ranked(w: Writer) -> str:
    made, use = w.draw.choice(
        (
            ("y, places", "x = x + y + 0.01 * places.to(x.dtype).unsqueeze(1)"),
            ("x, places", "self.log.append(float(places.sum()))"),
        )
    )
    return f"{made} = Ranked.apply(x)\n{use}"


def layer_dropout(w: Writer) -> str:
    drawn = w.draw.choice(("random.random()", "torch.rand(()).item()"))
    block = w.module(Mlp(w.width))
    if w.draw.random() < 0.5:
        return f"if {drawn} < 0.7:\n    x = {block}(x)"
    return f"for block in {w.mlps()}:\n    if {drawn} < 0.7:\n        x = block(x)\nx = {block}(x)"


def noise(w: Writer) -> str:
    return "x = x + 0.1 * torch.randn(x.shape, generator=self.generator)"


def of_numpy(w: Writer) -> str:
    return "size = float(x.detach().numpy().std())\nx = x * (2 / (1 + size))"


def count(w: Writer) -> str:
    return "self.calls += 1"


def log(w: Writer) -> str:
    return "self.log.append(float(x.detach().abs().max()))"


def loop_of_data(w: Writer) -> str:
    if w.draw.random() < 0.5:
        block = w.module(Mlp(w.width))
        return f"""
times = 0
while times < 3 and x.detach().abs().mean().item() < 1 + 0.05 * times:
    x = {block}(x)
    times += 1
"""
    block = w.mlps()
    return f"""
times = 1 + int(x.detach().abs().mean().item() * 100) % len({block})
for block in {block}[:times]:
    x = block(x)
"""


def tried(w: Writer) -> str:
    inner = w.draw.choice(
        (
            'if x.detach().mean().item() > -1e3:\n        raise ValueError("large")',
            'if x.detach().mean().item() > 1e3:\n        raise ValueError("large")',
            'raise ValueError("always")',
            "torch._dynamo.graph_break()",
        )
    )
    return f"""
try:
    x = {w.module(Mlp(w.width))}(x)
    {inner}
    x = {w.module(Mlp(w.width))}(x)
except ValueError:
    x = x * 0.5
"""


BREAKS = (
    *(buffer, item_detached, item_differentiable, printed, graph_break, selected, logged_loop),
    *(broken_loop, inner_break, function_breaking, function_ahead, function_ranked),
    *(layer_dropout, noise, of_numpy, count, log, loop_of_data, tried),
)
"""Items that break the graph, or leave something behind."""


def edited_input(w: Writer) -> str:
    return "x.mul_(0.5)\n" + w.draw.choice(
        ("torch._dynamo.graph_break()", "self.log.append(x.sum().item())")
    )


def scalar(w: Writer) -> str:
    return f"return {w.module(nn.Linear(w.width, 8))}(x).square().mean()"


def rows(w: Writer) -> str:
    return f"return {w.module(nn.Linear(w.width, 8))}(x)"


def two_heads(w: Writer) -> str:
    first, second = (w.module(nn.Linear(w.width, size)) for size in (8, 4))
    return f"""
aux = {second}(x)
return {first}(x), {{"aux": {{"mean": aux.mean(0), "size": x.square().mean()}}, "rows": len(x)}}
"""


HEADS = (scalar, rows, two_heads)
"""How a forward ends."""

KINDS = frozenset(item.__name__ for item in (*WORK, *BREAKS, *HEADS, edited_input))
"""Of items."""


class Program(nn.Module):
    """A model whose forward was made up.

    Attributes:
        source: of the forward.
        file: that it seems to come from; tracebacks show its lines.
        kinds: of the items that it consists of.
        calls, log, sink, generator, seen: what items change.
    """

    source = ""
    file = ""
    kinds: frozenset[str] = frozenset()
    seen: Tensor

    def __init__(self, modules: dict[str, nn.Module]) -> None:
        super().__init__()
        self.calls, self.log, self.sink = 0, list[float](), Sink()
        self.generator = torch.Generator().manual_seed(1)
        self.register_buffer("seen", torch.zeros(()))
        for name, module in modules.items():
            self.add_module(name, module)

    def forget(self) -> None:
        """Let the lines of its forward go."""
        linecache.cache.pop(self.file, None)
        sys.modules.pop(self.forward.__module__, None)


def program(seed: int) -> tuple[Program, tuple[Tensor]]:
    """Model and arguments of one call: the same for the same seed, to the last bit."""
    draw = random.Random(seed)
    with seeded(seed):
        writer = Writer(draw, width=draw.choice((32, 48, 64)))
        lines = [writer.write(item, indent=4) for item in _items(draw)]
        sample = torch.randn(draw.choice((128, 256, 512)), writer.width)
    source = "\n".join(["def forward(self, x):", *lines, ""])
    file = f"<program {seed}>"
    linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)
    module = types.ModuleType(f"tests.broken_program_{seed}")
    sys.modules[module.__name__] = module  # Dynamo looks names up in there
    vars(module).update(NAMES)
    exec(compile(source, file, "exec"), vars(module))
    own = {
        "forward": vars(module)["forward"],
        "source": source,
        "file": file,
        "kinds": frozenset(writer.kinds),
    }
    return type("Made", (Program,), own)(writer.modules), (sample,)


def _items(draw: random.Random) -> list[Item]:
    """Of a program: some compute, one breaks at least."""
    count = draw.randint(5, 13)
    breaks = draw.randint(2, (count + 1) // 2)
    items = [draw.choice(BREAKS) for _ in range(breaks)]
    items += [draw.choice(WORK) for _ in range(count - breaks)]
    draw.shuffle(items)
    first = [edited_input] if draw.random() < 0.15 else []
    return [*first, *items, draw.choice(HEADS)]


def loss_of(outputs: Any) -> Tensor:
    """A scalar of all that a program returns."""
    leaves = torch.utils._pytree.tree_leaves(outputs)
    terms = [leaf.square().mean() for leaf in leaves if isinstance(leaf, Tensor)]
    return torch.stack(terms).sum()
