"""Chains of ResNet, DenseNet and Inception v3, derived from their published architectures.

Nothing is measured. Every layer of the network is written down with the shapes of the papers
(He et al. 2016, Huang et al. 2017, Szegedy et al. 2016; strides, paddings and the grouping
into blocks as in torchvision), and from the shapes follow

* sizes, in float32: a boundary is a block's output; the saved set also has what PyTorch's
  backward reads: the input of every convolution, batch normalization and linear layer, and
  the output of every ReLU, which works in place. Extras are the block's largest tensor
  that is not saved (forward), and two gradients of its largest tensor (backward).
* times: operations of convolutions and linear layers at ``FLOP_PER_S`` plus the bytes that
  all layers read and write at ``MEMORY_BYTES_PER_S``; a convolution's backward takes twice
  its operations, and every layer's backward twice its bytes. The two rates are round shares
  of what a V100 (PCIe, float32) has at most, 14 TFLOP/s and 900 GB/s. A step of ResNet-50 at
  224 x 224 then takes 3.3 ms an image.

The loss is not a stage. Weights and their gradients are ``fixed_bytes``.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

from fxremat.ir import Chain, Costs
from tests.paper_terms import chain_from_sizes, costs_from_paper

FLOP_PER_S = 12.5e12
MEMORY_BYTES_PER_S = 800e9
LINK_BYTES_PER_S = 12.2e9
"""From device to host memory as the offloading paper measured it."""

Shape = tuple[int, int, int]
"""Channels, height, width."""

Kernel = int | tuple[int, int]

Path = tuple[tuple[int, Kernel], ...]
"""Convolutions one after another: channels out, and kernel."""


@dataclass(frozen=True, slots=True)
class Network:
    """A chain with its costs.

    Attributes:
        name: e.g. ``"resnet50"``.
        image: height and width of the input.
        batch: images in a step.
        chain, costs: see the module.
    """

    name: str
    image: int
    batch: int
    chain: Chain
    costs: Costs


@dataclass(slots=True)
class _Block:
    """What the layers of one stage add up to, for one image; sizes in elements."""

    saved: int = 0
    largest_saved: int = 0
    largest_lost: int = 0
    flop: int = 0
    traffic: int = 0
    weights: int = 0

    def keep(self, shape: Shape) -> None:
        """A tensor that the backward reads."""
        self.saved += math.prod(shape)
        self.largest_saved = max(self.largest_saved, math.prod(shape))

    def lose(self, shape: Shape) -> None:
        """A tensor that it does not read."""
        self.largest_lost = max(self.largest_lost, math.prod(shape))

    def conv(self, shape: Shape, out: int, kernel: Kernel, stride: int = 1) -> Shape:
        """A convolution without bias; paddings keep the size but for the stride."""
        high, wide = (kernel, kernel) if isinstance(kernel, int) else kernel
        after = (out, -(-shape[1] // stride), -(-shape[2] // stride))
        self.weights += shape[0] * out * high * wide
        self.flop += 2 * math.prod(after) * shape[0] * high * wide
        self.traffic += math.prod(shape) + math.prod(after)
        return after

    def valid(self, shape: Shape, out: int, kernel: int, stride: int = 1) -> Shape:
        """A convolution without padding."""
        size = (shape[1] - kernel) // stride + 1
        self.weights += shape[0] * out * kernel**2
        self.flop += 2 * out * size**2 * shape[0] * kernel**2
        self.traffic += math.prod(shape) + out * size**2
        return (out, size, size)

    def norm(self, shape: Shape, *, relu: bool) -> Shape:
        """Batch normalization of a new tensor, which it saves; a ReLU saves its output."""
        self.keep(shape)
        self.weights += 2 * shape[0]
        self.traffic += 3 * math.prod(shape)
        if relu:
            self.traffic += 2 * math.prod(shape)
            self.keep(shape)
        else:
            self.lose(shape)
        return shape

    def pool(self, shape: Shape, size: int, *, saves: bool = False) -> Shape:
        """A pooling to ``size`` x ``size``; a maximum saves its indices, 8 bytes each."""
        after = (shape[0], size, size)
        self.traffic += math.prod(shape) + math.prod(after)
        if saves:
            self.keep((2 * shape[0], size, size))
        return after


Layers = Callable[[_Block, Shape], Shape]
"""What a stage computes."""


@dataclass(slots=True)
class _Builder:
    """Blocks one after another."""

    shape: Shape
    blocks: list[_Block] = field(default_factory=list)
    outputs: list[int] = field(default_factory=list)

    def stage(self, layers: Layers, *, output_saved: bool = True) -> None:
        """``layers`` run on the boundary; ``output_saved``: they count it as saved."""
        block = _Block()
        after = layers(block, self.shape)
        if not output_saved:
            block.keep(after)
        self.blocks.append(block)
        self.outputs.append(math.prod(after))
        self.shape = after

    def network(self, name: str, image: int, batch: int) -> Network:
        """The chain of all blocks, four bytes an element."""
        scale = 4 * batch
        sizes = [3 * image * image * scale, *(n * scale for n in self.outputs)]
        saved = [max(b.saved, n) * scale for b, n in zip(self.blocks, self.outputs, strict=True)]
        flop_s = [batch * b.flop / FLOP_PER_S for b in self.blocks]
        bytes_s = [(scale * b.traffic + 4 * b.weights) / MEMORY_BYTES_PER_S for b in self.blocks]
        costs = costs_from_paper(
            forward_s=[f + m for f, m in zip(flop_s, bytes_s, strict=True)],
            backward_s=[2 * f + 2 * m for f, m in zip(flop_s, bytes_s, strict=True)],
            gradient_bytes=[0, *sizes[1:]],
            saved_bytes=saved,
            forward_extra_bytes=[b.largest_lost * scale for b in self.blocks],
            backward_extra_bytes=[2 * b.largest_saved * scale for b in self.blocks],
            fixed_bytes=sum(8 * b.weights for b in self.blocks),
        )
        return Network(name, image, batch, chain_from_sizes(sizes, saved), costs)


def _conv_norm(out: int, kernel: Kernel, stride: int = 1, *, valid: bool = False) -> Layers:
    def layers(b: _Block, shape: Shape) -> Shape:
        if valid:
            assert isinstance(kernel, int)
            return b.norm(b.valid(shape, out, kernel, stride), relu=True)
        return b.norm(b.conv(shape, out, kernel, stride), relu=True)

    return layers


def _head(b: _Block, shape: Shape) -> Shape:
    pooled = b.pool(shape, 1)
    b.keep(pooled)
    return b.conv(pooled, 1000, 1)


def _stem(builder: _Builder, width: int) -> None:
    builder.stage(lambda b, x: b.conv(x, width, 7, 2), output_saved=False)
    builder.stage(_relu_norm)
    builder.stage(lambda b, x: b.pool(x, -(-x[1] // 2), saves=True), output_saved=False)


def _relu_norm(b: _Block, shape: Shape) -> Shape:
    """Batch normalization and ReLU of a tensor that something else has saved."""
    b.weights += 2 * shape[0]
    b.traffic += 5 * math.prod(shape)
    b.keep(shape)
    return shape


def resnet(depth: int, *, image: int, batch: int) -> Network:
    """ResNet of 18, 34, 50, 101 or 152 layers, a stage a residual block."""
    groups = {
        18: (2, 2, 2, 2),
        34: (3, 4, 6, 3),
        50: (3, 4, 6, 3),
        101: (3, 4, 23, 3),
        152: (3, 8, 36, 3),
    }[depth]
    wide = 4 if depth >= 50 else 1

    def block(width: int, stride: int) -> Layers:
        def layers(b: _Block, x: Shape) -> Shape:
            if wide == 4:
                inner = b.norm(b.conv(x, width, 1), relu=True)
                inner = b.norm(b.conv(inner, width, 3, stride), relu=True)
                after = b.norm(b.conv(inner, width * 4, 1), relu=False)
            else:
                inner = b.norm(b.conv(x, width, 3, stride), relu=True)
                after = b.norm(b.conv(inner, width, 3), relu=False)
            if x != after:
                b.norm(b.conv(x, after[0], 1, stride), relu=False)
            b.traffic += 5 * math.prod(after)  # the sum and its ReLU
            b.keep(after)
            return after

        return layers

    builder = _Builder((3, image, image))
    _stem(builder, 64)
    for group, count in enumerate(groups):
        for index in range(count):
            builder.stage(block(64 << group, 2 if group and not index else 1))
    builder.stage(_head, output_saved=False)
    return builder.network(f"resnet{depth}", image, batch)


def densenet(depth: int, *, image: int, batch: int) -> Network:
    """DenseNet of 121, 161, 169 or 201 layers, a stage a dense layer.

    A boundary is all features so far, concatenated, as a chain needs it.
    """
    groups = {
        121: (6, 12, 24, 16),
        161: (6, 12, 36, 24),
        169: (6, 12, 32, 32),
        201: (6, 12, 48, 32),
    }[depth]
    growth, width = (48, 96) if depth == 161 else (32, 64)

    def layer(b: _Block, x: Shape) -> Shape:
        inner = b.conv(_relu_norm(b, x), 4 * growth, 1)
        new = b.conv(b.norm(inner, relu=True), growth, 3)
        after = (x[0] + growth, *x[1:])
        b.lose(new)
        b.traffic += 2 * math.prod(after)
        b.keep(after)
        return after

    def transition(b: _Block, x: Shape) -> Shape:
        inner = b.conv(_relu_norm(b, x), x[0] // 2, 1)
        b.lose(inner)
        return b.pool(inner, x[1] // 2)

    builder = _Builder((3, image, image))
    _stem(builder, width)
    for group, count in enumerate(groups):
        for _ in range(count):
            builder.stage(layer)
        if group < 3:
            builder.stage(transition, output_saved=False)
    builder.stage(lambda b, x: _head(b, _relu_norm(b, x)), output_saved=False)
    return builder.network(f"densenet{depth}", image, batch)


def _branches(*paths: Path, pooled: int = 0, forks: bool = False) -> Layers:
    """Paths side by side, concatenated.

    ``pooled``: one more, a pooling and a convolution to that many channels. ``forks``: the last
    two convolutions of a path of three or more read the same tensor.
    """

    def layers(b: _Block, x: Shape) -> Shape:
        total = 0
        for path in paths:
            at = x
            fork = len(path) - 2 if forks and len(path) > 2 else None
            for index, (out, kernel) in enumerate(path):
                at = b.norm(b.conv(at, out, kernel), relu=True)
                total += at[0] if index == fork else 0
            total += at[0]
        if pooled:
            at = b.pool(x, x[1])
            b.keep(at)
            total += b.norm(b.conv(at, pooled, 1), relu=True)[0]
        after = (total, *x[1:])
        b.traffic += 2 * math.prod(after)
        b.keep(after)
        return after

    return layers


def _reduction(*paths: Path) -> Layers:
    """Paths that end with stride 2, beside a pooling."""

    def layers(b: _Block, x: Shape) -> Shape:
        total, size = x[0], (x[1] - 3) // 2 + 1
        for *inner, (out, kernel) in paths:
            at = x
            for width, k in inner:
                at = b.norm(b.conv(at, width, k), relu=True)
            assert isinstance(kernel, int)
            total += b.norm(b.valid(at, out, kernel, 2), relu=True)[0]
        b.pool(x, size, saves=True)
        after = (total, size, size)
        b.traffic += 2 * math.prod(after)
        b.keep(after)
        return after

    return layers


def inception_v3(*, image: int, batch: int) -> Network:
    """Inception v3, a stage a layer of the stem or an inception block."""

    def a(pool: int) -> Layers:
        return _branches(((64, 1),), ((48, 1), (64, 5)), ((64, 1), (96, 3), (96, 3)), pooled=pool)

    def c(w: int) -> Layers:
        row, column = (1, 7), (7, 1)
        long = ((w, 1), (w, column), (w, row), (w, column), (192, row))
        return _branches(((192, 1),), ((w, 1), (w, row), (192, column)), long, pooled=192)

    e = _branches(
        ((320, 1),),
        ((384, 1), (384, (1, 3)), (384, (3, 1))),
        ((448, 1), (384, 3), (384, (1, 3)), (384, (3, 1))),
        pooled=192,
        forks=True,
    )
    d_long: Path = ((192, 1), (192, (1, 7)), (192, (7, 1)), (192, 3))
    builder = _Builder((3, image, image))
    builder.stage(_conv_norm(32, 3, 2, valid=True))
    builder.stage(_conv_norm(32, 3, valid=True))
    builder.stage(_conv_norm(64, 3))
    builder.stage(lambda b, x: b.pool(x, (x[1] - 3) // 2 + 1, saves=True), output_saved=False)
    builder.stage(_conv_norm(80, 1))
    builder.stage(_conv_norm(192, 3, valid=True))
    builder.stage(lambda b, x: b.pool(x, (x[1] - 3) // 2 + 1, saves=True), output_saved=False)
    for pool in (32, 64, 64):
        builder.stage(a(pool))
    builder.stage(_reduction(((384, 3),), ((64, 1), (96, 3), (96, 3))))
    for width in (128, 160, 160, 192):
        builder.stage(c(width))
    builder.stage(_reduction(((192, 1), (320, 3)), d_long))
    for _ in range(2):
        builder.stage(e)
    builder.stage(_head, output_saved=False)
    return builder.network("inception_v3", image, batch)


def network(name: str, *, image: int = 224, batch: int = 32) -> Network:
    """One of ``NAMES``."""
    if name == "inception_v3":
        return inception_v3(image=image, batch=batch)
    family = densenet if name.startswith("densenet") else resnet
    return family(int(name.removeprefix(family.__name__)), image=image, batch=batch)


NAMES = (
    *(f"resnet{depth}" for depth in (18, 34, 50, 101, 152)),
    *(f"densenet{depth}" for depth in (121, 161, 169, 201)),
    "inception_v3",
)
