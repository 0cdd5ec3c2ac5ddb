"""Operators of aten: which dimensions of their tensors run together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from fxremat.passes.split.dims import (
    Call,
    Dims,
    Labels,
    Rule,
    axes,
    broadcast_labels,
    dims_of,
    whole,
)

EVEN = (
    "_to_copy abs add.Scalar add.Tensor addcdiv addcmul alias bitwise_and.Scalar bitwise_and.Tensor"
    " bitwise_left_shift.Tensor bitwise_not bitwise_or.Scalar bitwise_or.Tensor"
    " bitwise_right_shift.Tensor bitwise_xor.Scalar bitwise_xor.Tensor ceil clamp clamp_max"
    " clamp_min clone copy cos detach div.Scalar div.Scalar_mode div.Tensor"
    " eq.Scalar eq.Tensor erf exp floor ge.Scalar ge.Tensor gt.Scalar gt.Tensor hardswish hardtanh"
    " isfinite isinf isnan le.Scalar le.Tensor leaky_relu leaky_relu_backward lift_fresh_copy log"
    " log1p logical_and logical_not logical_or logical_xor lt.Scalar lt.Tensor masked_fill.Scalar"
    " masked_fill.Tensor mul.Scalar mul.Tensor native_dropout_backward ne.Scalar ne.Tensor neg"
    " reciprocal relu round round.decimals sgn sigmoid_backward sign sin sqrt square sub.Scalar"
    " sub.Tensor tanh threshold threshold_backward trunc where.Scalar"
    " where.ScalarOther where.ScalarSelf where.self"
)
"""Pointwise operators whose kernels compute a number in the same way wherever it is.

On a CPU, others compute numbers that do not fill a vector by another formula, such as
``clamp.Tensor``, whose bounds are tensors, or divisions by a single number, such as
``div.Tensor_mode`` in half precision."""


def pointwise(call: Call) -> Dims | None:
    """Return the dimensions to split a pointwise operator along: all.

    The result is ``None`` if it changes the memory format.
    """
    formats = (None, torch.preserve_format, torch.contiguous_format)
    if call.values.get("memory_format") not in formats:
        return None
    out = axes(call.out)
    inputs = {name: broadcast_labels(shape, out) for name, shape in call.tensors.items()}
    rounds_twice = call.values.get("alpha", 1) != 1  # but only once in a vector
    exact = call.name in EXACT and not rounds_twice
    return Dims(inputs, [out] * len(call.returns), exact=exact)


def alike(call: Call) -> Dims:
    """Return the dimensions to split an operator such as ``zeros_like`` along: all."""
    out = axes(call.out)
    return Dims({"self": out}, [out], exact=True)


def moved(call: Call) -> Dims:
    """Return the dimensions along which an operator such as ``permute`` or ``squeeze`` is split.

    These are all that both its input and its result have.
    """
    self, values = call.tensors["self"], call.values
    labels, rank = list(axes(self)), len(self)
    out = labels[:]
    if call.name == "permute.default":
        out = [labels[d] for d in values["dims"]]
    elif call.name == "unsqueeze.default":
        out.insert(values["dim"] % (rank + 1), None)
    elif call.name.startswith("squeeze."):
        gone = dims_of(values["dim"], self)
        labels = [None if d in gone else d for d in labels]  # a part may have size 1 there
        out = [labels[d] for d in range(rank) if d not in gone or self[d] != 1]
    elif rank > 1:
        one, other = values.get("dim0", 0), values.get("dim1", 1)
        out[one], out[other] = out[other], out[one]
    return Dims({"self": tuple(labels)}, [tuple(out)], exact=True)


def expanded(call: Call) -> Dims:
    """Return the dimensions to split ``expand`` or ``repeat`` along: those that keep their size."""
    self, out = call.tensors["self"], call.out
    new = len(out) - len(self)
    keeps = [i >= new and self[i - new] == size for i, size in enumerate(out)]
    if "repeats" in call.values:
        keeps = [i >= new and n == 1 for i, n in enumerate(call.values["repeats"])]
    labels = tuple(i if kept else None for i, kept in enumerate(keeps))
    return Dims({"self": labels[new:]}, [labels], exact=True)


def along(call: Call) -> Dims:
    """Return the dimensions to split an operator such as ``cumsum`` along: all but its ``dim``."""
    named = "dims" if "dims" in call.values else "dim"
    self = next(iter(call.tensors.values()))
    labels = axes(self, without=dims_of(call.values[named], self))
    outputs = [labels] * len(call.returns)
    exact = call.on_cpu or call.name.startswith(("split", "flip"))
    return Dims(dict.fromkeys(call.tensors, labels), outputs, exact=exact)


def gated(call: Call) -> Dims:
    """Return the dimensions to split ``glu`` or its gradient along: all but the one it halves."""
    dims = along(call)
    return Dims(dims.inputs, dims.outputs)


def banded(call: Call) -> Dims:
    """Return the dimensions to split ``tril`` or ``triu`` along: all but the last two."""
    labels = axes(call.out, without={len(call.out) - 1, len(call.out) - 2})
    return Dims({"self": labels}, [labels], exact=True)


def normalized(call: Call) -> Dims:
    """Return the dimensions along which softmax, its logarithm, or a gradient of these is split.

    These are all but the one along which a softmax adds up to 1.
    """
    dims, rank = along(call), len(call.out)
    # Along other dimensions a vector holds several rows, and incomplete vectors are computed by
    # another formula.
    is_last = call.values["dim"] % max(rank, 1) == rank - 1
    return Dims(dims.inputs, dims.outputs, exact=call.on_cpu and is_last)


def is_all(call: Call) -> bool:
    """Return whether a slice, read or written, covers the whole tensor."""
    dim = call.values["dim"]
    sizes = [shape[dim] == call.out[dim] for shape in call.tensors.values()]
    return all(sizes) and not call.values["start"] and call.values["step"] == 1


def sliced(call: Call) -> Dims:
    """Return the dimensions along which an operator that reads or writes a slice is split.

    These are all but the sliced one, and that as well if the slice covers it.
    """
    labels = axes(
        call.out, without=set() if is_all(call) else dims_of(call.values["dim"], call.out)
    )
    return Dims(dict.fromkeys(call.tensors, labels), [labels], exact=True)


def picked(call: Call) -> Dims:
    """Return the dimensions along which ``select``, ``select_scatter`` or ``unbind`` is split.

    These are all but the one of which they read or write an index.
    """
    writes = call.name != "unbind.int" and not call.name.startswith("select.")
    large = call.out if writes else call.tensors["self"]
    dim = call.values["dim"] % len(large)
    labels = axes(large, without={dim})
    small = labels[:dim] + labels[dim + 1 :]
    if writes:
        return Dims({"self": labels, "src": small, "grad_output": small}, [labels], exact=True)
    return Dims({"self": labels}, [small] * len(call.returns), exact=True)


def joined(call: Call) -> Dims:
    """Return the dimensions to split ``cat`` or ``stack`` along: all but the one they join."""
    dim = call.values["dim"] % len(call.out)
    labels = axes(call.out, without={dim})
    inner = labels[:dim] + labels[dim + 1 :] if call.name == "stack.default" else labels
    return Dims({"tensors": [inner] * len(call.values["tensors"])}, [labels], exact=True)


def padded(call: Call) -> Dims:
    """Return the dimensions to split ``constant_pad_nd`` along: those that it does not pad."""
    last = len(call.out) - 1
    labels = axes(
        call.out, without={last - i // 2 for i, n in enumerate(call.values["pad"]) if n != 0}
    )
    return Dims({"self": labels}, [labels], exact=True)


def indexed(call: Call) -> Dims:
    """Return the dimensions to split ``gather`` or a ``scatter`` along.

    These are all but ``dim`` and those whose size differs between its tensors.
    """
    every = [*call.tensors.values(), call.out]
    # Dimensions of different sizes get no label: an index need not cover all of them, and is not
    # broadcast.
    differ = {i for i, sizes in enumerate(zip(*every, strict=True)) if len({*sizes}) > 1}
    labels = axes(call.out, without=dims_of(call.values["dim"], call.out) | differ)
    adds = call.name == "scatter_add.default" and not call.on_cpu
    return Dims(dict.fromkeys(call.tensors, labels), [labels], exact=not adds)


def selected(call: Call) -> Dims:
    """Return the dimensions to split ``index_select`` along: all of its result and of the index."""
    self, index = call.tensors["self"], call.tensors["index"]
    dim = call.values["dim"] % max(len(self), 1)
    labels = axes(self, without={dim})
    places = ("index",) * len(index)
    out = (*labels[:dim], *(places or (None,)), *labels[dim + 1 :]) if self else ()
    return Dims({"self": labels, "index": places}, [out], exact=True)


ORDERLESS = ("max", "min", "argmax", "argmin", "any", "all")


def reduced(call: Call) -> Dims:
    """Return the dimensions to split a reduction along: those that remain, or all for ``sum``."""
    self = call.tensors["self"]
    gone = dims_of(call.values.get("dim"), self)
    out = axes(self, without=gone)
    if not call.values.get("keepdim"):
        out = tuple(label for i, label in enumerate(out) if i not in gone)
    # The number of results determines in which order a kernel, or its threads, add up, and which
    # zero an amax returns if there are zeros of both signs.
    exact = call.name.split(".")[0] in ORDERLESS or not call.has_floats
    if call.name.startswith("sum."):
        return Dims({"self": axes(self)}, [out], frozenset(gone), exact)
    return Dims({"self": axes(self, without=gone)}, [out] * len(call.returns), exact=exact)


def product(*terms: str) -> Rule:
    """Return a function that says along which dimensions a matrix product is split.

    ``terms`` have a letter for each dimension: one string for each factor, then one for the result.
    ``product("nk", "km", "nm")`` is for ``mm`` and for ``addmm``, which adds a tensor.
    """
    *letters, out = terms
    inner = {*"".join(letters)} - {*out}

    def rule(call: Call) -> Dims:
        has_bias = len(call.values) > 2
        bias, factors = list(call.values)[: int(has_bias)], list(call.values)[int(has_bias) :]
        inputs: dict[str, Labels] = {}
        for name, dims in zip(factors, letters, strict=False):
            # Otherwise each part would add the bias.
            inputs[name] = tuple(None if has_bias and n in inner else n for n in dims)
        inputs |= {name: broadcast_labels(call.tensors[name], tuple(out)) for name in bias}
        return Dims(inputs, [tuple(out)], inner)

    return rule


def normed(call: Call) -> Dims:
    """Return the dimensions along which a layer norm, an RMS norm, or a gradient of these is split.

    These are the dimensions that are not normalized; gradients of weights are sums over them.
    """
    self, inner = call.tensors["input"], len(call.values["normalized_shape"])
    labels = axes(self, without={*range(len(self) - inner, len(self))})
    inputs = dict.fromkeys(("input", "grad_out", "mean", "rstd"), labels)
    exact = call.on_cpu and call.name == "native_layer_norm.default"
    outputs = [labels] * len(call.returns)
    if call.is_backward:
        outputs[1:] = [(None,) * inner] * (len(outputs) - 1)
    return Dims(inputs, outputs, {*labels} - {None}, exact, leading=call.is_backward)


BATCHED = ("input", "grad_out", "grad_output", "mean", "rstd")


BY_QUERY = (
    "_scaled_dot_product_flash_attention_for_cpu.default",
    "_scaled_dot_product_flash_attention_for_cpu_backward.default",
    "_scaled_dot_product_flash_attention.default",
)
"""Others return a statistic whose size is the number of queries, rounded up, or read a size."""


def attention(call: Call) -> Dims | None:
    """Return the dimensions along which scaled dot-product attention or its gradient is split.

    These are items and heads, and queries if each of them attends to all keys. If several heads of
    queries share one of keys and values, they stay together. The result is ``None`` with dropout,
    with a debug mask, or if there is a gradient of the bias.
    """
    values = call.values
    has_unknown = values.get("return_debug_mask") or (values.get("grad_input_mask") or [False])[-1]
    if values["dropout_p"] or has_unknown:
        return None
    by_query = not values["is_causal"] and call.name in BY_QUERY
    query: Labels = ("b", "h", "q" if by_query else None, None)
    heads_only: Labels = ("b", "h", None, None)
    inputs = dict.fromkeys(("query", "out", "grad_out", "grad_out_"), query)
    inputs |= dict.fromkeys(("key", "value"), heads_only)
    inputs |= {n: broadcast_labels(call.tensors.get(n), query) for n in ("attn_mask", "attn_bias")}
    inputs["logsumexp"] = query[: len(call.tensors.get("logsumexp", ()))]
    if call.is_backward:
        gradients: list[Labels] = [query, heads_only, heads_only, ()]
        summed = frozenset("qh")  # over heads of queries that share a single head of keys
        return Dims(inputs, gradients[: len(call.returns)], summed, grouped=frozenset("h"))
    # Without dropout, nobody reads the state of the random generator.
    draws = [None] * len(call.returns[2:])
    outputs = [query, query[: len(call.returns[1] or ())], *draws]
    return Dims(inputs, outputs, grouped=frozenset("h"))


def batched(call: Call) -> Dims:
    """Return the dimension to split a convolution, a group norm, or a gradient along: the batch.

    Gradients of weights are sums over it.
    """
    inputs = {n: ("n", *whole(s)[1:]) for n, s in call.tensors.items() if n in BATCHED}
    outputs: list[Labels] = [("n", *whole(s)[1:]) for s in call.returns]
    if call.is_backward:
        outputs[1:] = [whole(s) for s in call.returns[1:]]
    return Dims(inputs, outputs, {"n"})


def imaged(call: Call) -> Dims:
    """Return the dimensions along which a pooling or resampling of images is split.

    These are all but the last two, which are those of an image.
    """
    inner = 2
    labels = axes(call.out, without={*range(len(call.out) - inner, len(call.out))})
    exact = call.on_cpu and "_bi" not in call.name
    return Dims(dict.fromkeys(call.tensors, labels), [labels] * len(call.returns), exact=exact)


def embedding(call: Call) -> Dims:
    """Return the dimensions to split ``embedding`` or its gradient along: all but the table's rows.

    The gradient of the table is a sum over indices.
    """
    places = axes(call.tensors["indices"])
    if not call.is_backward:
        inputs: dict[str, Labels] = {"weight": (None, "c"), "indices": places}
        return Dims(inputs, [(*places, "c")], exact=True)
    summed = frozenset(places)
    if call.values["scale_grad_by_freq"]:
        places = (None,) * len(places)  # counting an index takes all of them
    inputs = {"grad_output": (*places, "c"), "indices": places}
    return Dims(inputs, [(None, "c")], summed, exact=call.on_cpu)


NONE, MEAN, _ = range(3)


def loss(call: Call) -> Dims | None:
    """Return the dimensions to split ``nll_loss`` or its gradient along: all but the classes.

    The result is ``None`` for a single row, and for a mean, but not for its gradient.
    """
    self, reduction = call.tensors["self"], call.values["reduction"]
    if len(self) < 2 or (reduction == MEAN and not call.is_backward):
        return None
    places = axes(self[1:])
    inputs: dict[str, Labels] = {"self": (0, None, *places[1:]), "target": places}
    if call.is_backward:
        each = places if reduction == NONE else ()
        return Dims(inputs | {"grad_output": each}, [inputs["self"]], exact=True)
    if reduction == NONE:  # the total weight is not computed
        return Dims(inputs, [places, None], exact=True)
    return Dims(inputs, [(), ()], frozenset(places))


def distance(call: Call) -> Dims | None:
    """Return the dimensions along which an elementwise loss, such as ``mse_loss``, is split: all.

    This holds for its gradient, too. The result is ``None`` for a mean, which reads the number of
    elements, and if the target is broadcast.
    """
    shape, reduction = call.tensors["self"], call.values["reduction"]
    if reduction == MEAN or call.tensors["target"] != shape:
        return None
    labels = axes(shape)
    inputs = {name: broadcast_labels(shape, labels) for name, shape in call.tensors.items()}
    outputs = [labels if call.is_backward or reduction == NONE else ()]
    return Dims(inputs, outputs, frozenset(labels))


OPERATORS_BY_RULE: Mapping[Rule, str] = {
    pointwise: "_to_copy detach alias lift_fresh_copy copy where.self where.ScalarOther"
    " where.ScalarSelf where.Scalar masked_fill.Tensor hardswish hardswish_backward elu_backward"
    " hardtanh_backward leaky_relu_backward softplus_backward mish_backward hardsigmoid_backward"
    " hardshrink_backward softshrink_backward _prelu_kernel _prelu_kernel_backward fill.Scalar"
    " fill.Tensor",
    alike: "full_like zeros_like ones_like empty_like",
    moved: "permute transpose.int t unsqueeze squeeze.dim squeeze.dims",
    expanded: "expand repeat",
    along: "cumsum cumprod logcumsumexp sort sort.stable topk split.Tensor split_with_sizes flip",
    gated: "glu glu_backward",
    banded: "tril triu",
    normalized: "_softmax _safe_softmax _log_softmax _softmax_backward_data"
    " _log_softmax_backward_data",
    sliced: "slice.Tensor slice_scatter slice_backward",
    picked: "select.int unbind.int select_backward select_scatter",
    joined: "cat stack",
    padded: "constant_pad_nd",
    indexed: "gather scatter.value scatter.src scatter_add",
    selected: "index_select",
    reduced: "sum sum.dim_IntList mean.dim amax amin any.dim any.dims all.dim all.dims argmax"
    " argmin prod.dim_int logsumexp max.dim min.dim var.correction var_mean.correction"
    " linalg_vector_norm norm.ScalarOpt_dim",
    product("nk", "km", "nm"): "mm addmm",
    product("bnk", "bkm", "bnm"): "bmm baddbmm",
    product("nk", "k", "n"): "mv",
    normed: "native_layer_norm native_layer_norm_backward _fused_rms_norm _fused_rms_norm_backward",
    batched: "native_group_norm native_group_norm_backward convolution convolution_backward",
    imaged: "max_pool2d_with_indices max_pool2d_with_indices_backward avg_pool2d"
    " avg_pool2d_backward _adaptive_avg_pool2d _adaptive_avg_pool2d_backward adaptive_max_pool2d"
    " adaptive_max_pool2d_backward upsample_nearest2d upsample_nearest2d_backward"
    " upsample_bilinear2d upsample_bilinear2d_backward upsample_bicubic2d"
    " upsample_bicubic2d_backward _upsample_nearest_exact2d _upsample_nearest_exact2d_backward",
    attention: "_scaled_dot_product_flash_attention_for_cpu"
    " _scaled_dot_product_flash_attention_for_cpu_backward _scaled_dot_product_flash_attention"
    " _scaled_dot_product_flash_attention_backward _scaled_dot_product_efficient_attention"
    " _scaled_dot_product_efficient_attention_backward _scaled_dot_product_cudnn_attention"
    " _scaled_dot_product_cudnn_attention_backward",
    embedding: "embedding embedding_dense_backward",
    loss: "nll_loss_forward nll_loss_backward nll_loss2d_forward nll_loss2d_backward",
    distance: "mse_loss mse_loss_backward smooth_l1_loss smooth_l1_loss_backward huber_loss"
    " huber_loss_backward binary_cross_entropy binary_cross_entropy_backward"
    " binary_cross_entropy_with_logits",
}


def overload(name: str) -> str:
    """Return ``name``, with ``.default`` appended if it names no overload."""
    return name if "." in name else f"{name}.default"


def overloads(names: str | Sequence[str]) -> list[str]:
    """Return the names of overloads for ``names``, a list or a text with blanks in between.

    Names of operators stand for their default overload.
    """
    return [overload(name) for name in (names.split() if isinstance(names, str) else names)]


RULES: Mapping[str, Rule] = {
    name: rule for rule, names in OPERATORS_BY_RULE.items() for name in overloads(names)
}

EXACT = frozenset(overloads(EVEN))

BY_INDEX = frozenset((indexed, selected, imaged, attention, embedding, loss))
"""Rules of operators that may read integers as indices, or as a seed."""
