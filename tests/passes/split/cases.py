"""Operators with random arguments."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from hypothesis import assume
from hypothesis import strategies as st
from torch import Tensor

from tests.passes.split.parts import Alone, alone

aten = torch.ops.aten

FLOATS = (torch.float32, torch.float64, torch.bfloat16)


@dataclass
class Draws:
    """Random arguments."""

    draw: st.DrawFn
    dtype: torch.dtype
    generator: torch.Generator
    largest: int = 5

    @staticmethod
    def of(data: st.DataObject) -> Draws:
        generator = torch.Generator().manual_seed(data.draw(st.integers(0, 2**31)))
        return Draws(data.draw, data.draw(st.sampled_from(FLOATS)), generator)

    def size(self, most: int = 6) -> int:
        return self.draw(st.integers(1, most))

    def shape(self, least: int = 1, most: int = 4) -> tuple[int, ...]:
        rank = self.draw(st.integers(least, most))
        return tuple(self.size(self.largest) for _ in range(rank))

    def one_of(self, *choices: Any) -> Any:
        return choices[self.draw(st.integers(0, len(choices) - 1))]

    def dim(self, rank: int) -> int:
        return self.draw(st.integers(-rank, rank - 1))

    def dims(self, rank: int) -> list[int]:
        dims = self.draw(st.lists(st.integers(0, rank - 1), min_size=1, unique=True))
        return [d - rank * self.one_of(0, 1) for d in dims]

    def laid(self, make: Callable[..., Tensor], shape: tuple[int, ...]) -> Tensor:
        """A tensor that lies in memory in one of several ways."""
        how = self.one_of("dense", "dense", "permuted", "sliced", "expanded")
        if how == "permuted":
            order = self.draw(st.permutations(range(len(shape))))
            made = make([shape[i] for i in order])
            return made.permute([order.index(i) for i in range(len(shape))])
        if how == "sliced":
            return make([2 * n + 1 for n in shape])[tuple(slice(1, None, 2) for _ in shape)]
        if how == "expanded" and shape:
            dim = self.dim(len(shape)) % len(shape)
            made = make([1 if i == dim else n for i, n in enumerate(shape)])
            return made.expand(shape)
        return make(list(shape))

    def real(self, *shape: int) -> Tensor:
        return self.laid(lambda s: torch.randn(s, generator=self.generator).to(self.dtype), shape)

    def dense(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.generator).to(self.dtype)

    def index(self, most: int, *shape: int) -> Tensor:
        return self.laid(lambda s: torch.randint(most, s, generator=self.generator), shape)

    def mask(self, *shape: int) -> Tensor:
        return self.index(2, *shape) == 1

    def broadcast(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """A shape that is broadcast to ``shape``."""
        kept = shape[self.draw(st.integers(0, len(shape))) :]
        return tuple(n if self.one_of(True, True, False) else 1 for n in kept)

    def parts(self, count: int) -> list[int]:
        """``count`` rows in parts."""
        sizes = []
        while count:
            sizes.append(self.draw(st.integers(1, count)))
            count -= sizes[-1]
        return sizes


Arguments = Callable[[Draws, str], Any]

CASES: dict[str, Arguments] = {}
"""Arguments of operators, by name: a list, or a list and keywords."""


def case(*names: str) -> Callable[[Arguments], None]:
    """Let a function give the arguments of the operators of ``names``."""

    def register(arguments: Arguments) -> None:
        for name in names:
            for own in name.split():
                assert own not in CASES
                CASES[own if "." in own else f"{own}.default"] = arguments

    return register


def operator_of(name: str) -> Any:
    """An operator by name, such as ``mm.default``; ``None``: this torch lacks it."""
    packet, _, overload = name.partition(".")
    return getattr(getattr(aten, packet, None), overload, None)


STAND_INS: dict[str, Callable[..., Any]] = {}
"""What computes an operator that no CPU has, by name."""


def stand_in(name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def register(run: Callable[..., Any]) -> Callable[..., Any]:
        STAND_INS[f"{name}.default"] = run
        return run

    return register


def drawn(name: str, d: Draws) -> Alone:
    """The operator of ``name`` with random arguments, if it can take them."""
    args = CASES[name](d, name)
    args, kwargs = args if isinstance(args, tuple) else (args, {})
    try:
        return alone(operator_of(name), *args, run=STAND_INS.get(name), **kwargs)
    except RuntimeError as error:
        assume("not implemented for" not in str(error))
        assume("grad_input must be contiguous" not in str(error))
        raise


@case(
    "neg abs relu exp tanh sqrt rsqrt sigmoid silu gelu erf log1p sin reciprocal square floor",
    "logical_not sign softplus elu hardswish isnan clone detach alias zeros_like ones_like",
    "ceil round trunc sgn isfinite isinf log cos lift_fresh_copy mish erfinv exp2 expm1",
)
def _(d: Draws, name: str) -> Any:
    return [d.real(*d.shape(0))]


@case(
    "mul.Tensor div.Tensor add.Tensor sub.Tensor maximum minimum gt.Tensor eq.Tensor atan2",
    "ge.Tensor le.Tensor lt.Tensor ne.Tensor remainder.Tensor logical_and logical_or logical_xor",
    "pow.Tensor_Tensor hypot logaddexp",
)
def _(d: Draws, name: str) -> Any:
    shape = d.shape()
    pair = [d.real(*shape), d.real(*d.broadcast(shape))]
    more = {"alpha": d.one_of(1, 0.3)} if name in ("add.Tensor", "sub.Tensor") else {}
    return (pair if d.one_of(True, False) else pair[::-1]), more


@case(
    "sigmoid_backward tanh_backward silu_backward gelu_backward hardswish_backward mish_backward",
    "hardsigmoid_backward _prelu_kernel",
)
def _(d: Draws, name: str) -> Any:
    shape = d.shape()
    return [d.real(*shape), d.real(*shape)]


@case("threshold_backward hardtanh_backward leaky_relu_backward")
def _(d: Draws, name: str) -> Any:
    shape = d.shape()
    more = {"t": [0], "h": [-0.5, 0.5], "l": [0.1, False]}[name[0]]
    return [d.real(*shape), d.real(*shape), *more]


@case("elu_backward softplus_backward")
def _(d: Draws, name: str) -> Any:
    shape = d.shape()
    if name == "elu_backward.default":
        return [d.real(*shape), 0.5, 1.0, 1.0, False, d.real(*shape)]
    return [d.real(*shape), d.real(*shape), 1.0, 20.0]


@case("div.Tensor_mode div.Scalar_mode")
def _(d: Draws, name: str) -> Any:
    shape = d.shape()
    other = 0.3 if name == "div.Scalar_mode" else d.real(*d.broadcast(shape))
    return [d.real(*shape), other], {"rounding_mode": d.one_of("floor", "trunc", None)}


@case("clamp.Tensor clamp_min.Tensor clamp_max.Tensor")
def _(d: Draws, name: str) -> Any:
    shape = d.shape()
    bound = d.real(*d.one_of((), d.broadcast(shape)))
    more = [d.one_of(None, d.real(*shape))] if name == "clamp.Tensor" else []
    return [d.real(*shape), bound, *more]


@case("round.decimals")
def _(d: Draws, name: str) -> Any:
    return [d.real(*d.shape())], {"decimals": d.one_of(0, 2, -1)}


@case(
    "mul.Scalar add.Scalar sub.Scalar pow.Tensor_Scalar div.Scalar gt.Scalar rsub.Scalar",
    "eq.Scalar ne.Scalar ge.Scalar le.Scalar lt.Scalar",
)
def _(d: Draws, name: str) -> Any:
    return [d.real(*d.shape()), d.one_of(2, 0.3, 0.0)]


@case(
    "bitwise_and.Tensor bitwise_or.Tensor bitwise_xor.Tensor bitwise_left_shift.Tensor",
    "bitwise_right_shift.Tensor",
)
def _(d: Draws, name: str) -> Any:
    shape = d.shape()
    return [d.index(9, *shape), d.index(9, *d.broadcast(shape))]


@case("hardshrink_backward softshrink_backward")
def _(d: Draws, name: str) -> Any:
    shape = d.shape()
    return [d.real(*shape), d.real(*shape), 0.5]


@case("_prelu_kernel_backward")
def _(d: Draws, name: str) -> Any:
    shape = d.shape()
    return [d.real(*shape) for _ in range(3)]


@case("fill.Scalar fill.Tensor")
def _(d: Draws, name: str) -> Any:
    number = torch.tensor(2.0, dtype=d.dtype) if name.endswith("Tensor") else 2.0
    return [d.real(*d.shape()), number]


@case("glu glu_backward")
def _(d: Draws, name: str) -> Any:
    shape = list(d.shape())
    dim = d.dim(len(shape))
    half = d.real(*shape)
    shape[dim] *= 2
    return [half, d.real(*shape), dim] if "backward" in name else [d.real(*shape), dim]


@case("tril triu")
def _(d: Draws, name: str) -> Any:
    return [d.real(*d.shape(2)), d.one_of(-1, 0, 1)]


LOSSES = "mse_loss smooth_l1_loss huber_loss"


@case(*(name + end for name in LOSSES.split() for end in ("", "_backward")))
def _(d: Draws, name: str) -> Any:
    shape, reduction = d.shape(), d.one_of(0, 1, 2)
    args = [d.real(*shape), d.real(*shape), reduction, *([] if "mse" in name else [0.7])]
    return [d.real(*(() if reduction else shape)), *args] if "backward" in name else args


@case("binary_cross_entropy binary_cross_entropy_backward binary_cross_entropy_with_logits")
def _(d: Draws, name: str) -> Any:
    shape, reduction = d.shape(), d.one_of(0, 1, 2)
    likely = [d.real(*shape).sigmoid(), d.real(*shape).sigmoid()]
    weight = d.one_of(None, d.real(*shape))
    if "logits" in name:
        return [*likely, weight, d.one_of(None, d.real(shape[-1])), reduction]
    args = [*likely, weight, reduction]
    return [d.real(*(() if reduction else shape)), *args] if "backward" in name else args


@case("bitwise_and.Scalar bitwise_or.Scalar bitwise_xor.Scalar")
def _(d: Draws, name: str) -> Any:
    return [d.index(9, *d.shape()), d.one_of(0, 1, 6)]


@case("bitwise_not")
def _(d: Draws, name: str) -> Any:
    return [d.index(9, *d.shape())]


@case("full_like clamp clamp_min clamp_max leaky_relu threshold hardtanh")
def _(d: Draws, name: str) -> Any:
    number = d.one_of(0.1, 0.0, -0.0)
    more = {"threshold.default": [number, 0.2], "clamp.default": [number, 0.5]}
    return [d.real(*d.shape()), *more.get(name, [] if name == "hardtanh.default" else [number])]


@case("addcmul addcdiv lerp.Tensor")
def _(d: Draws, name: str) -> Any:
    shape = d.shape()
    return [d.real(*d.broadcast(shape)), d.real(*shape), d.real(*d.broadcast(shape))]


@case("where.self")
def _(d: Draws, name: str) -> Any:
    shape = d.shape()
    return [d.mask(*d.broadcast(shape)), d.real(*shape), d.real(*d.broadcast(shape))]


@case("masked_fill.Scalar masked_fill.Tensor native_dropout_backward")
def _(d: Draws, name: str) -> Any:
    shape = d.shape()
    number = torch.tensor(2.0, dtype=d.dtype) if name.endswith("Tensor") else 2.0
    return [d.real(*shape), d.mask(*shape), number]


@case("where.ScalarOther where.ScalarSelf where.Scalar")
def _(d: Draws, name: str) -> Any:
    shape = d.shape()
    one = 0.5 if name != "where.ScalarOther" else d.real(*d.broadcast(shape))
    other = 1.5 if name != "where.ScalarSelf" else d.real(*d.broadcast(shape))
    return [d.mask(*shape), one, other]


@case("_to_copy copy")
def _(d: Draws, name: str) -> Any:
    shape = d.shape()
    if name == "copy.default":
        return [torch.zeros(shape), d.real(*d.broadcast(shape))]
    return [d.real(*shape)], {"dtype": d.one_of(*FLOATS, torch.int64)}


@case("view _unsafe_view reshape")
def _(d: Draws, name: str) -> Any:
    factors = [d.one_of(1, 2, 3) for _ in range(d.size(5))]

    def grouped() -> list[int]:
        cuts = sorted(d.draw(st.lists(st.integers(0, len(factors)), max_size=4)))
        ends = [0, *cuts, len(factors)]
        return [torch.Size(factors[a:b]).numel() for a, b in pairwise(ends)]

    return [d.dense(*grouped()), grouped()]


@case("permute")
def _(d: Draws, name: str) -> Any:
    shape = d.shape()
    return [d.real(*shape), d.draw(st.permutations(range(len(shape))))]


@case("transpose.int")
def _(d: Draws, name: str) -> Any:
    shape = d.shape()
    return [d.real(*shape), d.dim(len(shape)), d.dim(len(shape))]


@case("t")
def _(d: Draws, name: str) -> Any:
    return [d.real(*d.shape(0, 2))]


@case("unsqueeze stack squeeze.dim unbind.int")
def _(d: Draws, name: str) -> Any:
    shape = d.shape()
    self = [d.real(*shape) for _ in range(d.size(3))] if name[:2] == "st" else d.real(*shape)
    return [self, d.dim(len(shape) + (name in ("unsqueeze.default", "stack.default")))]


@case("squeeze.dims flip")
def _(d: Draws, name: str) -> Any:
    shape = d.shape()
    return [d.real(*shape), d.dims(len(shape))]


@case("expand")
def _(d: Draws, name: str) -> Any:
    shape = d.shape()
    return [d.real(*d.broadcast(shape)), list(shape)]


@case("repeat")
def _(d: Draws, name: str) -> Any:
    shape = d.shape(1, 3)
    return [d.real(*shape), [d.one_of(1, 1, 2) for _ in range(len(shape) + d.one_of(0, 1))]]


@case("_safe_softmax")
def _(d: Draws, name: str) -> Any:
    shape = d.shape()
    return [d.real(*shape), d.dim(len(shape))]


@case("_softmax _log_softmax")
def _(d: Draws, name: str) -> Any:
    shape = d.shape()
    return [d.real(*shape), d.dim(len(shape)), False]


@case("_softmax_backward_data _log_softmax_backward_data")
def _(d: Draws, name: str) -> Any:
    shape = d.shape()
    return [d.real(*shape), d.real(*shape), d.dim(len(shape)), d.dtype]


@case("cumsum cumprod logcumsumexp sort sort.stable topk")
def _(d: Draws, name: str) -> Any:
    shape = d.shape()
    dim = d.dim(len(shape))
    if name == "sort.stable":
        return [d.real(*shape)], {"stable": True, "dim": dim}
    k = [d.draw(st.integers(1, shape[dim]))] if name == "topk.default" else []
    # Which of two equal numbers comes first is not said.
    self = d.dense(*shape).double() if name in ("sort.default", "topk.default") else d.real(*shape)
    return [self, *k, dim]


@case("split.Tensor split_with_sizes")
def _(d: Draws, name: str) -> Any:
    shape = d.shape()
    dim = d.dim(len(shape))
    return [d.real(*shape), d.size() if name == "split.Tensor" else d.parts(shape[dim]), dim]


@case("slice.Tensor")
def _(d: Draws, name: str) -> Any:
    shape = d.shape()
    start, end = d.one_of(0, 0, 1, -2, -5), d.one_of(2, 2**63 - 1, 2**63 - 1, 5, -1)
    return [d.real(*shape), d.dim(len(shape)), start, end, d.one_of(1, 1, 2)]


@case("slice_scatter slice_backward")
def _(d: Draws, name: str) -> Any:
    shape = list(d.shape())
    dim = d.dim(len(shape))
    start = d.one_of(0, d.draw(st.integers(0, shape[dim] - 1)))
    part = list(shape)
    part[dim] -= start
    first = [d.real(*shape), d.real(*part)] if "scatter" in name else [d.real(*part), shape]
    return [*first, dim, start, d.one_of(shape[dim], 2**63 - 1), 1]


@case("select.int")
def _(d: Draws, name: str) -> Any:
    shape = d.shape()
    dim = d.dim(len(shape))
    return [d.real(*shape), dim, d.draw(st.integers(-shape[dim], shape[dim] - 1))]


@case("select_backward select_scatter")
def _(d: Draws, name: str) -> Any:
    shape = list(d.shape())
    dim = d.dim(len(shape)) % len(shape)
    part = d.real(*shape[:dim], *shape[dim + 1 :])
    first = [d.real(*shape), part] if "scatter" in name else [part, shape]
    return [*first, dim, d.draw(st.integers(0, shape[dim] - 1))]


@case("cat")
def _(d: Draws, name: str) -> Any:
    shape = d.shape()
    dim = d.dim(len(shape))
    shapes = [[*shape] for _ in range(d.size(3))]
    for own in shapes:
        own[dim] = d.size()
    return [[d.real(*own) for own in shapes], dim]


@case("constant_pad_nd")
def _(d: Draws, name: str) -> Any:
    shape = d.shape()
    pad = [d.one_of(0, 0, 1, 2) for _ in range(2 * d.draw(st.integers(0, len(shape))))]
    return [d.real(*shape), pad, d.one_of(0.0, 1.5)]


@case("gather scatter.value scatter.src scatter_add")
def _(d: Draws, name: str) -> Any:
    shape = d.shape()
    dim = d.dim(len(shape))
    own = [d.one_of(n, n, max(1, n - 1)) for n in shape]
    own[dim] = shape[dim] if "scatter" in name else d.size()
    if name.startswith("scatter."):  # which of two numbers is kept is not said
        index = torch.rand(shape, generator=d.generator).argsort(dim)[tuple(map(slice, own))]
    else:
        index = d.index(shape[dim], *own)
    more = {"gather.default": [], "scatter.value": [1.5]}.get(name, [d.real(*own)])
    return [d.real(*shape), dim, index, *more]


@case("index_select")
def _(d: Draws, name: str) -> Any:
    shape = d.shape()
    dim = d.dim(len(shape))
    return [d.real(*shape), dim, d.index(shape[dim], d.size())]


@case("sum.dim_IntList mean.dim amax amin any.dims all.dims logsumexp")
def _(d: Draws, name: str) -> Any:
    shape = d.shape()
    some = d.one_of(d.dims(len(shape)), d.dims(len(shape)), [])
    assume(some or name != "logsumexp.default")
    if name in ("sum.dim_IntList", "mean.dim") and d.one_of(False, True):
        integers = d.index(1 << 20, *shape)
        return [integers, some, d.one_of(True, False)], {"dtype": torch.float32}
    return [d.real(*shape), some, d.one_of(True, False)]


@case("any.dim all.dim argmax argmin prod.dim_int max.dim min.dim")
def _(d: Draws, name: str) -> Any:
    shape = d.shape()
    return [d.real(*shape), d.dim(len(shape)), d.one_of(True, False)]


@case("sum")
def _(d: Draws, name: str) -> Any:
    return [d.real(*d.shape())]


@case("var.correction var_mean.correction")
def _(d: Draws, name: str) -> Any:
    shape = d.shape()
    more = {"correction": d.one_of(0, 1), "keepdim": d.one_of(True, False)}
    return [d.real(*shape), d.one_of(d.dims(len(shape)), None)], more


@case("norm.ScalarOpt_dim")
def _(d: Draws, name: str) -> Any:
    shape = d.shape()
    return [d.real(*shape), d.one_of(1, 2), d.dims(len(shape)), d.one_of(True, False)]


@case("linalg_vector_norm")
def _(d: Draws, name: str) -> Any:
    shape = d.shape()
    return [d.real(*shape), d.one_of(2, 1), d.dims(len(shape)), d.one_of(True, False)]


@case("mm addmm mv bmm baddbmm")
def _(d: Draws, name: str) -> Any:
    batch = [d.size(4)] if "bmm" in name else []
    n, k, m = d.size(), d.size(), d.size()
    factors = [d.real(*batch, n, k), d.real(*batch, k, *([] if name[:2] == "mv" else [m]))]
    if name[:2] == "mm" and n == k == m and d.one_of(True, False):
        factors[1] = factors[0]
    bias = [d.real(*d.broadcast((*batch, n, m)))] if "add" in name else []
    return [*bias, *factors]
