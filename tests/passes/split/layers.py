"""Operators of layers with random arguments."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tests.passes.split.cases import Draws, aten, case, stand_in


def mask_of(d: Draws, weight: Tensor | None) -> list[bool]:
    """Which gradients are asked for: of the input, a weight and a bias; one is."""
    if weight is None:
        return [True, False, False]
    return d.one_of([True] * 3, [True, True, False], [False, True, True], [True, False, False])


@case("native_layer_norm native_layer_norm_backward")
def _(d: Draws, name: str) -> Any:
    shape, inner = d.shape(0, 3), d.shape(1, 2)
    x = d.real(*shape, *inner)
    weight, bias = d.one_of((d.real(*inner), d.real(*inner)), (None, None))
    forward = [x, list(inner), weight, bias, 1e-5]
    if "backward" not in name:
        return forward
    _, mean, rstd = aten.native_layer_norm.default(*forward)
    return [d.real(*x.shape), x, list(inner), mean, rstd, weight, bias, mask_of(d, weight)]


@case("_fused_rms_norm _fused_rms_norm_backward")
def _(d: Draws, name: str) -> Any:
    shape, inner = d.shape(0, 3), d.shape(1, 2)
    x, weight = d.real(*shape, *inner), d.one_of(None, d.real(*inner))
    forward = [x, list(inner), weight, 1e-5]
    if "backward" not in name:
        return forward
    rstd = aten._fused_rms_norm.default(*forward)[1]
    return [d.real(*x.shape), x, list(inner), rstd, weight, mask_of(d, weight)[:2]]


@case("native_group_norm native_group_norm_backward")
def _(d: Draws, name: str) -> Any:
    batch, group, each, height, width = (d.size(4) for _ in range(5))
    channels = group * each
    x = d.dense(batch, channels, height, width)
    weight, bias = d.one_of((d.real(channels), d.real(channels)), (None, None))
    sizes = [batch, channels, height * width, group]
    forward = [x, weight, bias, *sizes, 1e-5]
    if "backward" not in name:
        return forward
    _, mean, rstd = aten.native_group_norm.default(*forward)
    return [d.dense(*x.shape), x, mean, rstd, weight, *sizes, mask_of(d, weight)]


@case("embedding embedding_dense_backward")
def _(d: Draws, name: str) -> Any:
    words, width = d.size(), d.size()
    indices = d.index(words, *d.shape(0, 3))
    padding = d.one_of(-1, 0)
    if name == "embedding.default":
        return [d.real(words, width), indices, padding]
    by_count = d.one_of(False, False, True)
    return [d.real(*indices.shape, width), indices, words, padding, by_count]


@case("nll_loss_forward nll_loss_backward nll_loss2d_forward nll_loss2d_backward")
def _(d: Draws, name: str) -> Any:
    places = [d.size(), *([d.size(3), d.size(3)] if "2d" in name else [])]
    classes, reduction = d.size(), d.one_of(0, 1, 2)
    self = d.real(places[0], classes, *places[1:])
    target, weight = d.index(classes, *places), d.one_of(None, d.real(classes))
    more = [self, target, weight, reduction, d.one_of(-100, 0)]
    if "backward" not in name:
        return more
    grad = d.real(*places) if reduction == 0 else d.real()
    return [grad, *more, torch.tensor(3.0, dtype=d.dtype)]


@case("convolution convolution_backward")
def _(d: Draws, name: str) -> Any:
    rank, groups, transposed = d.size(2), d.one_of(1, 1, 2), d.one_of(False, False, True)
    ins, outs = groups * d.size(2), groups * d.size(2)
    x = d.real(d.size(4), ins, *(2 + d.size(4) for _ in range(rank)))
    pair = [ins, outs // groups] if transposed else [outs, ins // groups]
    weight, bias = d.real(*pair, *(d.size(3) for _ in range(rank))), d.one_of(None, d.real(outs))
    more = [[d.size(2)] * rank, [d.one_of(0, 1)] * rank, [1] * rank, transposed, [0] * rank, groups]
    forward = [x, weight, bias, *more]
    if "backward" not in name:
        return forward
    grad = d.real(*aten.convolution.default(*forward).shape)
    mask = [*mask_of(d, weight)[:2], bias is not None]
    return [grad, x, weight, None if bias is None else [outs], *more, mask]


@case("max_pool2d_with_indices max_pool2d_with_indices_backward avg_pool2d avg_pool2d_backward")
def _(d: Draws, name: str) -> Any:
    x = d.real(*d.shape(1, 2), 2 + d.size(5), 2 + d.size(5))
    window = [[d.size(3)] * 2, [d.size(2)] * 2, [0, 0]]
    more = [[1, 1], False] if name.startswith("max") else [False, True, None]
    if "backward" not in name:
        return [x, *window, *more]
    forward = aten.max_pool2d_with_indices if name.startswith("max") else aten.avg_pool2d
    out = forward.default(x, *window, *more)
    if name.startswith("max"):
        return [d.real(*out[0].shape), x, *window, *more, out[1]]
    return [d.real(*out.shape), x, *window, *more]


@case(
    "_adaptive_avg_pool2d _adaptive_avg_pool2d_backward",
    "adaptive_max_pool2d adaptive_max_pool2d_backward",
)
def _(d: Draws, name: str) -> Any:
    x, size = d.real(*d.shape(1, 2), 2 + d.size(4), 2 + d.size(4)), [d.size(3), d.size(3)]
    if "backward" not in name:
        return [x, size]
    if "avg" in name:
        return [d.real(*x.shape[:-2], *size), x]
    out, indices = aten.adaptive_max_pool2d.default(x, size)
    return [d.real(*out.shape), x, indices]


@case(
    "upsample_nearest2d upsample_nearest2d_backward upsample_bilinear2d",
    "upsample_bilinear2d_backward upsample_bicubic2d upsample_bicubic2d_backward",
    "_upsample_nearest_exact2d _upsample_nearest_exact2d_backward",
)
def _(d: Draws, name: str) -> Any:
    shape = [d.size(4), d.size(4), d.size(4), d.size(4)]
    size = [d.size(8), d.size(8)]
    corners = [] if "nearest" in name else [d.one_of(True, False)]
    if "backward" not in name:
        return [d.real(*shape), size, *corners]
    return [d.real(*shape[:2], *size), size, shape, *corners]


@case(
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_flash_attention_for_cpu_backward",
)
def _(d: Draws, name: str) -> Any:
    batch, group, ours, theirs, width = (
        d.size(3),
        d.one_of(1, 1, 2),
        d.size(),
        d.size(),
        2 * d.size(3),
    )
    heads = group * d.size(4)
    make = lambda length, of=heads: d.dense(batch, length, of, width).transpose(1, 2)
    query, key, value = make(ours), make(theirs, heads // group), make(theirs, heads // group)
    causal = d.one_of(False, False, True)
    sizes = [d.one_of(1, batch), d.one_of(1, heads), d.one_of(1, ours), theirs]
    mask = None if causal else d.one_of(None, d.dense(*sizes), d.dense(*sizes[2:]))
    forward = [query, key, value, 0.0, causal]
    if "backward" not in name:
        return forward, {"attn_mask": mask}
    out, lse = aten._scaled_dot_product_flash_attention_for_cpu.default(*forward, attn_mask=mask)
    return [make(ours), query, key, value, out, lse, 0.0, causal], {"attn_mask": mask}


@stand_in("_fused_rms_norm_backward")
def _(grad: Tensor, x: Tensor, inner: Any, rstd: Tensor, weight: Any, mask: Any) -> Any:
    # As kernels do, it takes it that statistics lie densely.
    rstd = rstd.as_strided(rstd.shape, torch.empty(rstd.shape).stride())
    dims = [*range(x.dim() - len(inner), x.dim())]
    scaled = grad * weight if weight is not None else grad
    normal = x * rstd
    own = (scaled - normal * (scaled * normal).mean(dims, keepdim=True)) * rstd
    outer = [*range(x.dim() - len(inner))]
    weights = (grad * normal).sum(outer) if outer else grad * normal
    return own if mask[0] else None, weights if mask[1] else None


EFFICIENT, FLASH, CUDNN = (
    f"_scaled_dot_product_{kind}_attention" for kind in ("efficient", "flash", "cudnn")
)


@case(*(name + end for name in (EFFICIENT, FLASH, CUDNN) for end in ("", "_backward")))
def _(d: Draws, name: str) -> Any:
    kind = name.partition(".")[0].removesuffix("_backward")
    batch, ours, theirs, width = d.size(3), d.size(), d.size(), d.size(4)
    group = 1 if kind == EFFICIENT else d.one_of(1, 2, 3)
    heads = group * d.size(3)
    make = lambda length, of=heads: d.dense(batch, of, length, width)
    causal = d.one_of(False, False, True)
    read = [make(ours), make(theirs, heads // group), make(theirs, heads // group)]
    bias = None
    if kind != FLASH and not causal:
        bias = d.one_of(None, d.dense(d.one_of(1, batch), d.one_of(1, heads), ours, theirs))
    more = [] if kind == FLASH else [bias, True]
    ends = [] if kind == EFFICIENT else [False]
    if "backward" not in name:
        return [*read, *more, 0.0, causal, *ends]
    out, lse, *_ = ATTENTION[kind](*read, *more, 0.0, causal)
    first = [make(ours), *read, *([bias] if kind == EFFICIENT else []), out, lse]
    seeds = [torch.zeros(2, dtype=torch.int64), torch.zeros((), dtype=torch.int64)]
    if kind == EFFICIENT:
        return [*first, *seeds, 0.0, [True, True, True, False], causal]
    if kind == FLASH:
        return [*first, None, None, ours, theirs, 0.0, causal, *seeds]
    return [*first, *seeds, bias, None, None, ours, theirs, 0.0, causal]


def attended(query: Tensor, key: Tensor, value: Tensor, bias: Any, causal: bool) -> Any:
    group = query.shape[1] // key.shape[1]
    key, value = (x.repeat_interleave(group, 1) for x in (key, value))
    scores = query @ key.transpose(2, 3) / query.shape[3] ** 0.5
    scores = scores if bias is None else scores + bias
    if causal:
        hidden = torch.ones(scores.shape[2:], dtype=torch.bool).triu(1)
        scores = scores.masked_fill(hidden, float("-inf"))
    return scores.softmax(3) @ value, scores.logsumexp(3)


def seeds() -> list[Tensor]:
    return [torch.randint(99, (2,)), torch.randint(99, ())]


@stand_in(EFFICIENT)
def efficient(q: Tensor, k: Tensor, v: Tensor, bias: Any, _: bool, p: float, causal: bool) -> Any:
    out, lse = attended(q, k, v, bias, causal)
    room = -lse.shape[2] % 32
    return out, torch.nn.functional.pad(lse, (0, room)), *seeds()


@stand_in(FLASH)
def flash(q: Tensor, k: Tensor, v: Tensor, p: float, causal: bool, *debug: bool) -> Any:
    unread = torch.empty(0)
    return *attended(q, k, v, None, causal), None, None, q.shape[2], k.shape[2], *seeds(), unread


@stand_in(CUDNN)
def cudnn(q: Tensor, k: Tensor, v: Tensor, bias: Any, _: bool, p: float, *more: bool) -> Any:
    out, lse = attended(q, k, v, bias, more[0])
    return out, lse.unsqueeze(3), None, None, q.shape[2], k.shape[2], *seeds(), None


ATTENTION = {EFFICIENT: efficient, FLASH: flash, CUDNN: cudnn}


def gradients(grad: Tensor, *read: Tensor, bias: Any, lse: Tensor, causal: bool) -> list[Tensor]:
    """Of attention, which read the statistic as kernels do."""
    query, key, value, out = read
    group = query.shape[1] // key.shape[1]
    key, value = (x.repeat_interleave(group, 1) for x in (key, value))
    scale = query.shape[3] ** -0.5
    scores = query @ key.transpose(2, 3) * scale
    scores = scores if bias is None else scores + bias
    weights = (scores - lse).exp()
    weights = weights.tril() if causal else weights
    inner = weights * (grad @ value.transpose(2, 3) - (grad * out).sum(3, keepdim=True)) * scale
    theirs = inner.transpose(2, 3) @ query, weights.transpose(2, 3) @ grad
    return [inner @ key, *(x.unflatten(1, (-1, group)).sum(2) for x in theirs)]


@stand_in(f"{EFFICIENT}_backward")
def _(grad: Tensor, *args: Any) -> Any:
    *read, bias, out, lse, _, _, _, _, causal = args
    lse = lse[:, :, : grad.shape[2], None]
    return *gradients(grad, *read, out, bias=bias, lse=lse, causal=causal), None


@stand_in(f"{FLASH}_backward")
def _(grad: Tensor, *args: Any) -> Any:
    *read, out, lse, _, _, longest, _, _, causal, _, _ = args
    assert longest == grad.shape[2]
    return tuple(gradients(grad, *read, out, bias=None, lse=lse[..., None], causal=causal))


@stand_in(f"{CUDNN}_backward")
def _(grad: Tensor, *args: Any) -> Any:
    *read, out, lse, _, _, bias, _, _, longest, _, _, causal = args
    assert longest == grad.shape[2]
    return tuple(gradients(grad, *read, out, bias=bias, lse=lse, causal=causal))
