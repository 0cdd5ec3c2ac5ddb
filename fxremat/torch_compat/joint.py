"""AOTAutograd: a backend that gets joint graphs, and the metadata in these graphs."""

from __future__ import annotations

import contextlib
import itertools
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import fx

from fxremat.torch_compat.graphs import BoxedCallable


def aot_autograd_backend(
    *,
    forward_compiler: Callable[..., BoxedCallable],
    backward_compiler: Callable[..., BoxedCallable],
    inference_compiler: Callable[..., BoxedCallable],
    partition: Callable[..., tuple[fx.GraphModule, fx.GraphModule]],
    decompositions: Mapping[Any, Callable[..., Any]] | None = None,
) -> Callable[..., Any]:
    """Return a Dynamo backend that has AOTAutograd trace joint graphs, cut and compile them.

    Args:
        forward_compiler, backward_compiler, inference_compiler: return a function that runs a
            graph: a forward, a backward, or one that is not differentiated.
        partition: returns a forward and a backward graph, given a joint one.
        decompositions: operations that are decomposed when the joint graph is traced.
    """
    from torch._dynamo.backends.common import aot_autograd  # noqa: PLC0415

    # Input mutations stay outside of the graph, as copies after the forward. So the joint graph
    # is functional, and may be reordered and recomputed freely.
    backend: Callable[..., Any] = aot_autograd(
        fw_compiler=forward_compiler,
        bw_compiler=backward_compiler,
        inference_compiler=inference_compiler,
        partition_fn=partition,
        decompositions=decompositions,
        keep_inference_input_mutations=False,
    )
    return backend


def as_it_is(module: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
    """Return a function that runs a graph of Dynamo like ``torch.compile(backend="aot_eager")``."""
    from torch._dynamo.backends.debugging import aot_eager  # noqa: PLC0415

    run: Callable[..., Any] = aot_eager(module, list(inputs))
    return run


def opaque_to_dynamo(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``function`` as one operation in Dynamo's graphs, which Dynamo does not trace into.

    AOTAutograd traces what it does, including hooks of tensors.
    """
    compiler: Any = torch.compiler
    allowed: Callable[..., Any] = compiler.allow_in_graph(function)
    return allowed


def traced_tangent(output: torch.Tensor) -> torch.Tensor | None:
    """Return a tensor with the layout of the gradient that AOTAutograd will pass for ``output``.

    Returns ``None`` if no trace is active, or if AOTAutograd passes that gradient to no operation,
    because ``output`` is a view of an input.
    """
    from torch._functorch._aot_autograd import collect_metadata_analysis  # noqa: PLC0415
    from torch._subclasses.functional_tensor import FunctionalTensor  # noqa: PLC0415

    base = output._base if output._is_view() else output
    if not isinstance(output, FunctionalTensor) or base is None or base.is_leaf:
        return None
    coerced: Any = collect_metadata_analysis.coerce_tangent_and_suggest_memory_format
    tangent: torch.Tensor = coerced(output)[0]
    return tangent


def without_donated_buffers() -> contextlib.AbstractContextManager[Any]:
    """Return a context in which no buffers are donated, which would rule out ``retain_graph``."""
    from torch._functorch import config  # noqa: PLC0415

    patched: contextlib.AbstractContextManager[Any] = config.patch(donated_buffer=False)
    return patched


def allow_retained_graphs() -> None:
    """Declare that the step that is being compiled donates no buffers.

    Otherwise each backward would check for donated buffers, under the settings of that time, and
    refuse ``retain_graph=True``.
    """
    context = torch._guards.TracingContext.try_get()
    if context is not None and context.fw_metadata is not None:
        context.fw_metadata.bw_donated_idxs = []


def is_backward_node(node: fx.Node) -> bool:
    """Return whether AOTAutograd traced ``node`` while differentiating."""
    return node.meta.get("partitioner_tag") == "is_backward"


def sequence_number(node: fx.Node) -> int | None:
    """Return autograd's sequence number of ``node``, which is also that of its backward nodes.

    Returns ``None`` if it has none.
    """
    number = node.meta.get("seq_nr")
    return number if isinstance(number, int) else None


_TAGS: dict[str, Literal["keep", "recompute", "offload"]] = {
    "MUST_SAVE": "keep",
    "MUST_RECOMPUTE": "recompute",
    "MUST_CPU_OFFLOAD": "offload",
}
"""Names of ``torch.utils.checkpoint.CheckpointPolicy`` that are no hints, and what they ask for."""


def checkpoint_tag(node: fx.Node) -> Literal["keep", "recompute", "offload"] | None:
    """Return what selective activation checkpointing asks for of ``node``'s results.

    ``None``: nothing, or only a hint.
    """
    return _TAGS.get(getattr(node.meta.get("recompute"), "name", ""))


_ROOT = re.compile(r"^L\['\w+'\](\.__closure__\[\d+\]\.cell_contents)*\.?")
"""How Dynamo names the captured module itself, or the functions that call it."""


def module_path(node: fx.Node) -> str:
    """Return the path of the module whose forward, or its differentiation, contains ``node``.

    It is empty where the graph does not have it.
    """
    stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack")
    if not stack:
        return ""
    path, _ = list(stack.values())[-1]
    return _ROOT.sub("", str(path))


def is_tangent(node: fx.Node) -> bool:
    """Return whether ``node`` is a placeholder of the joint graph for the gradient of an output."""
    return node.op == "placeholder" and node.name.startswith("tangents_")


def releases_tangents() -> bool:
    """Return whether a compiled backward is the only holder of the gradients of its outputs.

    Since torch 2.13 autograd passes them in a list, which AOTAutograd empties. In earlier versions
    the caller holds them until the backward has returned.
    """
    return hasattr(torch.autograd.Function, "boxed_grads_call")


def _primals(joint: fx.GraphModule) -> list[fx.Node]:
    """Return the placeholders of the joint graph that are inputs of the forward."""
    return [n for n in joint.graph.find_nodes(op="placeholder") if not is_tangent(n)]


def _results(joint: fx.GraphModule) -> list[Any]:
    """Return the results of the joint graph: those of the forward, then those of the backward."""
    return list(joint.graph.output_node().args[0])  # type: ignore[arg-type]


def mutated_primals(module: fx.GraphModule) -> list[int]:
    """Return the indices of the primals whose new value the joint graph returns."""
    from torch._functorch._aot_autograd.descriptors import (  # noqa: PLC0415
        InputMutationAOTOutput,
    )

    described = module.graph.output_node().meta.get("desc", ())
    mutated = [d.mutated_input for d in described if isinstance(d, InputMutationAOTOutput)]
    return [i for i, node in enumerate(_primals(module)) if node.meta.get("desc") in mutated]


def primal_values(joint: fx.GraphModule, inputs: Sequence[object]) -> list[object]:
    """Return, for each primal, the input of the compiled function that it stands for.

    That may be a part of an input, such as the local part of a ``DTensor``. It is ``None`` for a
    primal that stands for neither.
    """
    return [_value_of(n.meta.get("desc"), inputs) for n in _primals(joint)]


def _value_of(described: Any, inputs: Sequence[object]) -> object:
    from torch._functorch._aot_autograd import descriptors  # noqa: PLC0415

    if isinstance(described, descriptors.PlainAOTInput):
        return inputs[described.idx] if described.idx < len(inputs) else None
    if isinstance(described, descriptors.SubclassGetAttrAOTInput):
        return getattr(_value_of(described.base, inputs), described.attr, None)
    return None


def spread_results(
    joint: fx.GraphModule, *, forward_output_count: int
) -> tuple[int | None, ...] | None:
    """Change the graph in place so that its backward has a result for each primal.

    AOTAutograd has a single result for all parts of a tensor without a gradient, such as a nested
    tensor.

    Tokens that order effects are no tensors any more, since calls pass ``None`` for them.

    Returns:
        The places of the previous results among the new ones, with ``None`` for a token. ``None``
        if the graph stays as it is, because its results cannot be assigned to primals.
    """
    results, output = _results(joint), joint.graph.output_node()
    described = list(output.meta.get("desc", ())) or [None] * len(results)
    tokens = _drop_tokens(joint, described)
    results, described = results[: len(results) - tokens], described[: len(described) - tokens]
    inputs = [_input_of(node.meta.get("desc")) for node in _primals(joint)]
    spread, names = results[:forward_output_count], described[:forward_output_count]
    places: list[int | None] = []
    place = forward_output_count
    whole = len(results) - forward_output_count == len(inputs)
    for index, group in itertools.groupby(range(len(inputs)), lambda i: inputs[i]):
        count = len(list(group))
        if index == _A_TOKEN:  # the backward returns nothing for it
            spread += [None] * count
            names += [None] * count
            continue
        if index is None and not whole:
            return None
        one = not whole and count > 1 and described[place : place + 1] == [None]
        parts = results[place : place + (1 if one else count)]
        part_names = described[place : place + len(parts)]
        first = len(spread) - forward_output_count
        places += range(first, first + len(parts))
        spread += parts + [None] * (count - len(parts))
        names += part_names + [None] * (count - len(parts))
        place += len(parts)
    if place != len(results) or len(spread) != forward_output_count + len(inputs):
        return None
    output.args = (tuple(spread),)
    output.meta["desc"] = names
    return (*places, *[None] * tokens)


_A_TOKEN = -1
"""Stands for the index of an input that is a token, which orders effects."""


def _drop_tokens(joint: fx.GraphModule, described: Sequence[Any]) -> int:
    """Make tokens among the inputs ``None``, and return how many the backward returns, at the end.

    ``described`` are AOTAutograd's descriptors of the results.
    """
    from torch._functorch._aot_autograd import descriptors  # noqa: PLC0415

    for node in joint.graph.find_nodes(op="placeholder"):
        if isinstance(node.meta.get("desc"), descriptors.ForwardTokenAOTInput) or (
            node.target == "tangents_token"
        ):
            node.meta["val"] = None
    return sum(isinstance(each, descriptors.BackwardTokenAOTOutput) for each in described)


def _input_of(described: Any) -> int | None:
    """Return the index of the input that a primal is, or is part of; ``None`` if there is none.

    For a token, returns a number that is no index. ``described`` is AOTAutograd's descriptor of the
    primal.
    """
    from torch._functorch._aot_autograd import descriptors  # noqa: PLC0415

    if isinstance(described, descriptors.ForwardTokenAOTInput):
        return _A_TOKEN
    while isinstance(described, descriptors.SubclassGetAttrAOTInput):
        described = described.base
    return described.idx if isinstance(described, descriptors.PlainAOTInput) else None


def differentiated_primals(joint: fx.GraphModule, *, forward_output_count: int) -> dict[int, int]:
    """Return the primals that get a gradient, each with its index among the tensor primals."""
    results = _results(joint)[forward_output_count:]
    differentiated: dict[int, int] = {}
    tensors = 0
    for i, (node, gradient) in enumerate(zip(_primals(joint), results, strict=True)):
        if isinstance(gradient, fx.Node) and _is_tensor(gradient):
            differentiated[i] = tensors
        tensors += isinstance(node.meta["val"], torch.Tensor)
    return differentiated


def passed_primals(joint: fx.GraphModule, *, forward_output_count: int) -> dict[int, int]:
    """Return the primals that the backward returns unchanged, by place among its results.

    Such results are no gradients, but for instance the mesh of a ``DTensor``.
    """
    primals = _primals(joint)
    return {
        place: primals.index(node)
        for place, node in enumerate(_results(joint)[forward_output_count:])
        if isinstance(node, fx.Node) and not _is_tensor(node)
    }


def _is_tensor(node: fx.Node) -> bool:
    return isinstance(node.meta["val"], torch.Tensor)


def stub_graphs(
    joint: fx.GraphModule, *, forward_output_count: int, places: Sequence[int | None]
) -> tuple[fx.GraphModule, fx.GraphModule]:
    """Return a forward and a backward graph that only show AOTAutograd what goes in and out.

    They are never run. The forward returns its outputs and a token, one number on the CPU, for all
    saved tensors. The backward takes the token and the tangents, and returns the results at
    ``places``, which :func:`spread_results` returned, and ``None`` for a token.
    """
    placeholders = joint.graph.find_nodes(op="placeholder")
    results = _results(joint)
    examples = [n.meta["val"] for n in placeholders if isinstance(n.meta["val"], torch.Tensor)]
    token = examples[0].new_empty(1, dtype=torch.int64, device="cpu")

    def stub(inputs: Sequence[object], outputs: Sequence[object]) -> fx.GraphModule:
        graph = fx.Graph()
        made: dict[object, fx.Node] = {}
        for node in inputs:
            made[node] = graph.placeholder(node.name if isinstance(node, fx.Node) else "token")
        for node in outputs:
            if node not in made and (isinstance(node, fx.Node) or node is _TOKEN):
                made[node] = graph.call_function(_never_run)
        for node, copy in made.items():
            copy.meta = dict(node.meta) if isinstance(node, fx.Node) else {"val": token}
        graph.output(tuple(made.get(node, node) for node in outputs))  # type: ignore[arg-type]
        return fx.GraphModule(torch.nn.Module(), graph)

    tangents = [n for n in placeholders if is_tangent(n)]
    forward = stub(_primals(joint), [*results[:forward_output_count], _TOKEN])
    gradients = results[forward_output_count:]
    return forward, stub(
        [_TOKEN, *tangents], [None if place is None else gradients[place] for place in places]
    )


_TOKEN = object()


def _never_run() -> None:
    raise AssertionError("a stub graph was run")
