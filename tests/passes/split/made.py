"""Random calls of operators that have a rule."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from random import Random
from typing import Any

import torch

from tests.passes.split.parts import Case, case

aten = torch.ops.aten

FLOATS = (torch.float32, torch.float64, torch.bfloat16)


class Make:
    """Random tensors, all of one dtype.

    Attributes:
        rng: what is drawn with.
        dtype: of numbers that are not whole.
    """

    def __init__(self, rng: Random, dtypes: tuple[torch.dtype, ...] = FLOATS) -> None:
        self.rng, self.dtype = rng, rng.choice(dtypes)
        self.seeded = torch.Generator().manual_seed(rng.randrange(2**31))

    def shape(self, least: int = 1, most: int = 4) -> list[int]:
        return [self.rng.choice((1, 2, 3, 4, 5, 9)) for _ in range(self.rng.randint(least, most))]

    def dim(self, shape: Any) -> int:
        """A dimension, from either end."""
        return self.rng.randrange(-len(shape), len(shape))

    def dims(self, shape: Any) -> list[int]:
        return self.rng.sample(range(len(shape)), self.rng.randint(1, len(shape)))

    def coin(self) -> bool:
        return self.rng.random() < 0.5

    def tensor(self, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        numbers = torch.randn(shape, generator=self.seeded, dtype=torch.float64)
        return self.laid(numbers.to(dtype or self.dtype))

    def index(self, most: int, *shape: int) -> torch.Tensor:
        return self.laid(torch.randint(most, shape, generator=self.seeded))

    def laid(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor in other strides: dense, its dimensions in any order, or a part of another."""
        kind = self.rng.randrange(4)
        if kind == 1:
            order = self.rng.sample(range(tensor.dim()), tensor.dim())
            back = [order.index(i) for i in range(tensor.dim())]
            return tensor.permute(order).contiguous().permute(back)
        if kind == 2 and tensor.dim():
            dim = self.rng.randrange(tensor.dim())
            room = torch.cat([tensor, tensor, tensor], dim)
            return room.narrow(dim, tensor.shape[dim], tensor.shape[dim])
        if kind == 3 and tensor.dim() and tensor.dtype != torch.int64:
            dim = self.rng.randrange(tensor.dim())
            return tensor.narrow(dim, 0, 1).expand(tensor.shape)
        return tensor

    def broadcast(self, shape: Any) -> list[int]:
        """A shape that is broadcast to ``shape``."""
        some = [n if self.rng.random() < 0.75 else 1 for n in shape]
        return some[self.rng.choice((0, 0, 0, self.rng.randint(0, len(some)))) :]


Maker = Callable[[Make], Case]

MAKERS: dict[str, Maker] = {}


def made(maker: Maker) -> Maker:
    """A maker by its name."""
    MAKERS[maker.__name__] = maker
    return maker


UNARY = (
    "abs acos asin atan atanh ceil cos cosh erf exp exp2 expm1 floor log log10 log1p log2 neg"
    " reciprocal relu round rsqrt sigmoid sign silu sin sinh sqrt square tan tanh trunc gelu"
    " hardswish hardsigmoid mish softplus elu leaky_relu hardtanh clone detach isnan logical_not"
    " hardshrink softshrink selu celu lgamma digamma erfinv frac sgn"
)

BINARY = (
    "add.Tensor sub.Tensor mul.Tensor div.Tensor pow.Tensor_Tensor maximum.default minimum.default"
    " atan2.default eq.Tensor lt.Tensor ge.Tensor fmod.Tensor remainder.Tensor hypot.default"
    " gelu_backward.default silu_backward.default tanh_backward.default"
    " sigmoid_backward.default xlogy.Tensor logaddexp.default copysign.Tensor"
    " hardswish_backward.default mish_backward.default"
)


@made
def unary(m: Make) -> Case:
    op = getattr(aten, m.rng.choice(UNARY.split())).default
    return case(op, m.tensor(*m.shape()))


@made
def binary(m: Make) -> Case:
    name, _, overload = m.rng.choice(BINARY.split()).partition(".")
    shape = m.shape()
    x = m.tensor(*m.broadcast(shape))
    y = x if m.rng.random() < 0.1 else m.tensor(*m.broadcast(shape))
    if "backward" in name:
        x, y = m.tensor(*shape), m.tensor(*shape)
    return case(getattr(getattr(aten, name), overload), x, y)


@made
def scalars(m: Make) -> Case:
    x = m.tensor(*m.shape())
    op, *args = m.rng.choice(
        [
            (aten.add.Scalar, 2),
            (aten.add.Tensor, 0.3),
            (aten.mul.Tensor, 0.3),
            (aten.div.Tensor, 0.3),
            (aten.rsub.Scalar, 0.3),
            (aten.pow.Tensor_Scalar, m.rng.choice((2, 3, 0.5, -1, -2, 1.7))),
            (aten.clamp.default, -0.5, 0.5),
            (aten.threshold.default, 0.1, 0.0),
            (aten.masked_fill.Scalar, 2.0),
            (aten.gt.Scalar, 0.1),
            (aten.round.decimals,),
        ]
    )
    if op is aten.masked_fill.Scalar:
        args.insert(0, m.tensor(*m.broadcast(x.shape)) > 0)
    return case(op, x, *args, **({"decimals": 1} if op is aten.round.decimals else {}))


@made
def several(m: Make) -> Case:
    shape = m.shape()
    x, y, z = (m.tensor(*m.broadcast(shape)) for _ in "xyz")
    mask, zero = m.tensor(*m.broadcast(shape)) > 0, m.tensor()
    op, args, kwargs = m.rng.choice(
        [
            (aten.where.self, (mask, x, y), {}),
            (aten.where.ScalarOther, (mask, x, 1.0), {}),
            (aten.where.ScalarSelf, (mask, 1.0, x), {}),
            (aten.masked_fill.Tensor, (m.tensor(*shape), mask, zero), {}),
            (aten.masked_fill.Scalar, (m.tensor(*shape), mask, 0.5), {}),
            (aten.addcmul.default, (x, y, z), {"value": m.rng.choice((1, 0.3))}),
            (aten.addcdiv.default, (x, y, z), {"value": m.rng.choice((1, 0.3))}),
            (aten.lerp.Scalar, (x, y, 0.3), {}),
            (aten.lerp.Tensor, (x, y, z), {}),
            (aten.add.Tensor, (x, y), {"alpha": m.rng.choice((1, 0.3))}),
            (aten.sub.Tensor, (x, y), {"alpha": m.rng.choice((1, 0.3))}),
            (aten.clamp.Tensor, (x, y, z), {}),
            (aten.mul.Tensor, (x, zero), {}),
            (aten.threshold_backward.default, (m.tensor(*shape), m.tensor(*shape), 0), {}),
            (aten.hardtanh_backward.default, (m.tensor(*shape), m.tensor(*shape), -1, 1), {}),
            (
                aten.leaky_relu_backward.default,
                (m.tensor(*shape), m.tensor(*shape), 0.1, False),
                {},
            ),
            (aten.softplus_backward.default, (m.tensor(*shape), m.tensor(*shape), 1, 20), {}),
            (aten.elu_backward.default, (m.tensor(*shape), 1, 1, 1, False, m.tensor(*shape)), {}),
            (
                aten.div.Tensor_mode,
                (x, y),
                {"rounding_mode": m.rng.choice((None, "trunc", "floor"))},
            ),
            (aten._to_copy.default, (x,), {"dtype": m.rng.choice(FLOATS)}),
            (aten.clone.default, (x,), {"memory_format": torch.contiguous_format}),
        ]
    )
    return case(op, *args, **kwargs)


@made
def view(m: Make) -> Case:
    x = m.tensor(*m.shape(1, 4))
    flat = [x.numel()] if m.coin() else [x.shape[0], -1]
    sizes = list(x.shape)
    for _ in range(m.rng.randint(1, 3)):
        at = m.rng.randrange(len(sizes))
        if m.coin():
            sizes.insert(at, 1)
        elif sizes[at] % 3 == 0:
            sizes[at : at + 1] = m.rng.choice(([3, sizes[at] // 3], [sizes[at] // 3, 3]))
        elif at + 1 < len(sizes):
            sizes[at : at + 2] = [sizes[at] * sizes[at + 1]]
    sizes = m.rng.choice((sizes, sizes, sizes, flat))
    op = m.rng.choice((aten.view.default, aten._unsafe_view.default, aten.reshape.default))
    return case(op, x.contiguous() if "view" in str(op) else x, sizes)


@made
def moved(m: Make) -> Case:
    x = m.tensor(*m.shape())
    order = m.rng.sample(range(x.dim()), x.dim())
    op, *args = m.rng.choice(
        [
            (aten.permute.default, order),
            (aten.transpose.int, m.dim(x.shape), m.dim(x.shape)),
            (aten.unsqueeze.default, m.rng.randrange(-x.dim() - 1, x.dim() + 1)),
            (aten.squeeze.dim, m.dim(x.shape)),
            (aten.squeeze.dims, m.dims(x.shape)),
            (aten.alias.default,),
            (aten.detach.default,),
        ]
    )
    if x.dim() <= 2 and m.rng.random() < 0.2:
        op, args = aten.t.default, []
    return case(op, x, *args)


@made
def expand(m: Make) -> Case:
    shape = m.shape()
    own = m.broadcast(shape)
    sizes = [-1 if i >= len(shape) - len(own) and own[i - len(shape)] == n and m.coin() else n
             for i, n in enumerate(shape)]  # fmt: skip
    return case(aten.expand.default, m.tensor(*own), sizes)


@made
def sliced(m: Make) -> Case:
    x = m.tensor(*m.shape())
    dim = m.dim(x.shape)
    n = x.shape[dim]
    start = m.rng.randrange(n)
    end = m.rng.randint(start + 1, n)
    if m.rng.random() < 0.3:
        start, end = 0, m.rng.choice((n, 2**63 - 1))
    step = m.rng.choice((1, 1, 2))
    piece = x.narrow(dim, 0, 1).expand(
        x.narrow(dim, 0, len(range(*slice(start, end, step).indices(n)))).shape
    )
    sizes = m.rng.choice(([n], [start, n - start], [1] * n))
    op, *args = m.rng.choice(
        [
            (aten.slice.Tensor, x, dim, start, end, step),
            (aten.slice_scatter.default, x, piece.clone(), dim, start, end, step),
            (aten.slice_backward.default, piece.clone(), list(x.shape), dim, start, end, step),
            (aten.select.int, x, dim, start),
            (aten.select_backward.default, x.select(dim, 0).clone(), list(x.shape), dim, start),
            (aten.select_scatter.default, x, x.select(dim, 0).clone(), dim, start),
            (aten.unbind.int, x, dim),
            (aten.split.Tensor, x, m.rng.randint(1, n), dim),
            (aten.split_with_sizes.default, x, sizes, dim),
            (aten.flip.default, x, [dim]),
        ]
    )
    return case(op, *args)


@made
def joined(m: Make) -> Case:
    shape = m.shape()
    dim = m.dim(shape)
    tensors = []
    for _ in range(m.rng.randint(1, 3)):
        shape[dim] = m.rng.randint(1, 4)
        tensors.append(m.tensor(*shape))
    if m.coin():
        tensors.append(tensors[0])
    if m.coin():
        return case(aten.cat.default, tensors, dim)
    return case(
        aten.stack.default,
        [tensors[0] * 2, tensors[0]],
        m.rng.randrange(-len(shape) - 1, len(shape) + 1),
    )


@made
def padded(m: Make) -> Case:
    x = m.tensor(*m.shape())
    pad = [m.rng.choice((0, 0, 1, 2)) for _ in range(2 * m.rng.randint(1, x.dim()))]
    return case(aten.constant_pad_nd.default, x, pad, 0.5)


@made
def picked(m: Make) -> Case:
    x = m.tensor(*m.shape())
    dim = m.dim(x.shape)
    shape = [m.rng.randint(1, n) if m.rng.random() < 0.4 else n for n in x.shape]
    index = m.index(x.shape[dim], *shape)
    flat = m.index(x.shape[dim], m.rng.randint(1, 5))
    op, *args = m.rng.choice(
        [
            (aten.gather.default, x, dim, index),
            (aten.scatter.value, x, dim, index, 0.5),
            (
                aten.scatter.src,
                x,
                dim,
                index.clamp(max=0) if shape[dim] == 1 else _apart(index, dim),
                m.tensor(*x.shape),
            ),
            (aten.scatter_add.default, x, dim, index, m.tensor(*x.shape)),
            (aten.index_select.default, x, dim, flat),
        ]
    )
    return case(op, *args)


def _apart(index: torch.Tensor, dim: int) -> torch.Tensor:
    """Places along a dimension of which no two are one."""
    places = torch.arange(index.shape[dim]).flip(0)
    return (
        places.reshape([-1 if i == dim % index.dim() else 1 for i in range(index.dim())])
        .expand(index.shape)
        .clone()
    )


@made
def product(m: Make) -> Case:
    b, n, k, c = (m.rng.choice((1, 2, 3, 8, 17)) for _ in range(4))
    kind = m.rng.randrange(5)
    if kind < 2:
        x, y = m.tensor(n, k), m.tensor(k, c)
        bias = m.tensor(*m.broadcast([n, c]))
        if m.rng.random() < 0.2:
            x = y = bias = m.tensor(k, k)
        if kind == 0:
            return case(aten.mm.default, x, y)
        return case(aten.addmm.default, bias, x, y, beta=0.5, alpha=2)
    if kind == 2:
        return case(aten.bmm.default, m.tensor(b, n, k), m.tensor(b, k, c))
    if kind == 3:
        return case(aten.mv.default, m.tensor(n, k), m.tensor(k))
    bias = m.tensor(*m.broadcast([b, n, c]))
    return case(aten.baddbmm.default, bias, m.tensor(b, n, k), m.tensor(b, k, c))


@made
def reduced(m: Make) -> Case:
    x = m.tensor(*m.shape())
    if m.rng.random() < 0.2:
        x = m.index(5, *x.shape)
    real = x if x.is_floating_point() else m.tensor(*x.shape)
    dim, dims, keep = m.dim(x.shape), m.dims(x.shape), m.coin()
    op, *args = m.rng.choice(
        [
            (aten.sum.default, x),
            (aten.sum.dim_IntList, x, m.rng.choice((dims, dims, [])), keep),
            (aten.mean.dim, real, dims, keep),
            (aten.amax.default, x, dims, keep),
            (aten.amin.default, x, dims, keep),
            (aten.any.dim, x > 0, dim, keep),
            (aten.all.dim, x > 0, dim, keep),
            (aten.argmax.default, real, m.rng.choice((dim, None)), keep),
            (aten.argmin.default, real, dim, keep),
            (aten.prod.dim_int, x, dim, keep),
            (aten.logsumexp.default, real, dims, keep),
            (aten.max.dim, real, dim, keep),
            (aten.min.dim, real, dim, keep),
            (aten.linalg_vector_norm.default, real, 2, dims, keep),
            (aten.var.correction, real, dims),
            (aten.var_mean.correction, real, dims),
        ]
    )
    kwargs = (
        {"correction": 0, "keepdim": keep} if op.overloadpacket in (aten.var, aten.var_mean) else {}
    )
    return case(op, *args, **kwargs)


@made
def along(m: Make) -> Case:
    x = m.tensor(*m.shape())
    dim = m.dim(x.shape)
    soft = aten._softmax.default(x, dim, False)
    log = aten._log_softmax.default(x, dim, False)
    grad = m.tensor(*x.shape)
    op, *args = m.rng.choice(
        [
            (aten._softmax.default, x, dim, False),
            (aten._log_softmax.default, x, dim, False),
            (aten._softmax_backward_data.default, grad, soft, dim, m.dtype),
            (aten._log_softmax_backward_data.default, grad, log, dim, m.dtype),
            (aten.cumsum.default, x, dim),
            (aten.cumprod.default, x, dim),
            (aten.logcumsumexp.default, x, dim),
            (aten.sort.default, m.tensor(*x.shape).clone(), dim),
            (aten.topk.default, x, m.rng.randint(1, x.shape[dim]), dim),
        ]
    )
    return case(op, *args)


@made
def like(m: Make) -> Case:
    x = m.tensor(*m.shape())
    if m.coin():
        return case(aten.full_like.default, x, 0.5)
    return case(m.rng.choice((aten.zeros_like.default, aten.ones_like.default)), x)


@made
def layer_norm(m: Make) -> Case:
    x = m.tensor(*m.shape())
    inner = list(x.shape[m.rng.randrange(x.dim()) :])
    weight, bias = (m.tensor(*inner) if m.coin() else None for _ in range(2))
    _out, mean, rstd = aten.native_layer_norm.default(x, inner, weight, bias, 1e-2)
    if m.coin():
        return case(aten.native_layer_norm.default, x, inner, weight, bias, 1e-2)
    mask = [m.coin() or i == 0 for i in range(3)]
    grad = m.tensor(*x.shape)
    return case(
        aten.native_layer_norm_backward.default, grad, x, inner, mean, rstd, weight, bias, mask
    )


@made
def group_norm(m: Make) -> Case:
    n, groups, each = (m.rng.randint(1, 4) for _ in range(3))
    c, space = groups * each, m.shape(1, 2)
    size = 1
    for k in space:
        size *= k
    x, weight = m.tensor(n, c, *space).contiguous(), m.tensor(c).contiguous()
    rest = (n, c, size, groups)
    if m.coin():
        bias = m.rng.choice((None, m.tensor(c).contiguous()))
        return case(aten.native_group_norm.default, x, weight, bias, *rest, 1e-2)
    _, mean, rstd = aten.native_group_norm.default(x, weight, None, *rest, 1e-2)
    grad = m.tensor(*x.shape).contiguous()
    mask = [True, m.coin(), m.coin()]
    return case(aten.native_group_norm_backward.default, grad, x, mean, rstd, weight, *rest, mask)


@made
def embedding(m: Make) -> Case:
    places = m.shape(1, 3)
    most, width = m.rng.randint(2, 6), m.rng.randint(1, 9)
    index = m.index(most, *places)
    if m.coin():
        return case(aten.embedding.default, m.tensor(most, width), index, m.rng.choice((-1, 0)))
    rest = (most, m.rng.choice((-1, 0)), m.rng.random() < 0.2)
    return case(aten.embedding_dense_backward.default, m.tensor(*places, width), index, *rest)


@made
def loss(m: Make) -> Case:
    n, classes = m.rng.randint(1, 5), m.rng.randint(1, 5)
    x, target = m.tensor(n, classes), m.index(classes, n).clone()
    name = "nll_loss"
    if m.coin():
        space = m.rng.randint(1, 3), m.rng.randint(1, 3)
        x, target, name = (
            m.tensor(n, classes, *space),
            m.index(classes, n, *space).clone(),
            "nll_loss2d",
        )
    if m.coin():
        target.view(-1)[0] = -100
    weight = m.tensor(classes).contiguous() if m.coin() else None
    reduction = m.rng.randrange(3)
    forward = getattr(aten, f"{name}_forward").default
    if m.coin():
        return case(forward, x, target, weight, reduction, -100)
    out, total = forward(x, target, weight, reduction, -100)
    grad = m.tensor(*out.shape)
    return case(
        getattr(aten, f"{name}_backward").default, grad, x, target, weight, reduction, -100, total
    )


@made
def convolution(m: Make) -> Case:
    n, groups, c, d = (m.rng.randint(1, 3) for _ in range(4))
    space = [m.rng.randint(3, 5) for _ in range(m.rng.randint(1, 2))]
    turned = m.rng.random() < 0.3
    x = m.tensor(n, c * groups, *space)
    ends = (c * groups, d) if turned else (d * groups, c)
    weight = m.tensor(*ends, *(2 for _ in space))
    one = [1] * len(space)
    rest = ([m.rng.randint(1, 2)] * len(space), one, one, turned, [0] * len(space), groups)
    bias = m.tensor(d * groups) if m.coin() else None
    if m.coin():
        return case(aten.convolution.default, x, weight, bias, *rest)
    grad = m.tensor(*aten.convolution.default(x, weight, bias, *rest).shape)
    mask = [m.coin(), True, m.coin()]
    return case(aten.convolution_backward.default, grad, x, weight, [d * groups], *rest, mask)


NAMES: Mapping[str, Maker] = MAKERS
