"""Costs of a step that is not run, from the shapes of its operations and a device's figures.

An operation takes a launch, plus the longer of the time that the device's memory needs for its
bytes and the time that the arithmetic needs for its products (Williams, Waterman, Patterson:
Roofline, 2009). That is a lower bound. Real operations exceed it by similar factors, so plans can
be compared although their seconds are too low.

Storages have their traced sizes, except where kernels are known to allocate more. A run that is
computed in parts needs the memory of a part, and for a few operators the source of a kernel states
its workspace (``costs.estimated.working``). Other workspaces are not part of a trace. They are not
counted at their operations; :func:`aside_bytes` returns how much to set aside for them throughout
the step.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import fx

from fxremat.costs.estimated.devices import TF32, Device
from fxremat.costs.estimated.working import has_formula, with_working_bytes
from fxremat.costs.measured.cost import Measured, runs_of, stage_blocks, whole_block
from fxremat.costs.measured.work import Floats, Works
from fxremat.ir import RecordedCosts, StageSeconds
from fxremat.passes.joint.graph import JointGraph, StorageTable, tensors_of
from fxremat.passes.joint.masks.replace import mask_of
from fxremat.passes.parts.parts import Parts
from fxremat.passes.stages.block import Block, BlockCache, Mode, call_of
from fxremat.passes.stages.linearize import Line
from fxremat.runtime.host_parameter import fetch

aten = torch.ops.aten


def estimate_line(line: Line, blocks: BlockCache, device: Device) -> Measured:
    """Return ``line`` with seconds and bytes estimated for ``device``, without running anything."""
    seconds = operation_seconds(line.joint, device)
    order = line.order

    def total_s(block: Block) -> float:
        return float(sum(seconds[order[n]] for n in block.nodes))

    stages, again = [], dict[int, float]()
    runs = set[tuple[int, str]]()
    for index in range(len(line.stages)):
        first, rebuild, backward = stage_blocks(line, blocks, index)
        whole = whole_block(line, blocks, index)
        stages.append(StageSeconds(*map(total_s, (first, rebuild, backward))))
        operations = (order[n] for n in whole.operations)
        again.update({i: float(seconds[i]) for i in operations})
        for block in (first, whole, backward):
            runs.update((order[n], m.value) for n, modes in runs_of(line, block) for m in modes)
    costs = RecordedCosts(
        tuple(stages),
        tuple(sorted(again.items())),
        tuple((index, mode, 0) for index, mode in sorted(runs)),
        _result_bytes(line.joint),
        (),
    )
    return Measured.of(line, with_working_bytes(costs, line, line.joint.sizes.hints))


def operation_seconds(joint: JointGraph, device: Device) -> Floats:
    """Return the estimated seconds of each node, by index; 0 for a node that computes nothing."""
    works = Works(joint)
    work = works.at(joint.sizes.hints)
    flop_s = np.array([device.flop_s(_dtype_of(node)) for node in joint.module.graph.nodes])
    busy_s = np.maximum(work.nbytes / device.bytes_per_s, work.flops * flop_s)
    sizes = joint.sizes.named(joint.sizes.hints)
    calls = [_calls(node, sizes) for node in joint.module.graph.nodes]
    fetched = np.array([_fetched_bytes(node) for node in joint.module.graph.nodes])
    busy_s = np.where(fetched > 0, fetched / device.link_bytes_per_s, busy_s)
    seconds: Floats = np.where(works.kind > 0, device.launch_s * np.array(calls) + busy_s, 0.0)
    return seconds


def _fetched_bytes(node: fx.Node) -> int:
    """Return the bytes that a node copies from host memory; 0 if it copies none."""
    return sum(t.nbytes for t in tensors_of(node)) if node.target is fetch else 0


def _calls(node: fx.Node, sizes: Mapping[str, int]) -> int:
    """Return how many operations a node launches: those of a run in parts once per part, else 1."""
    run = node.target
    return run.count(sizes) * len(run.whole) if isinstance(run, Parts) else 1


def _dtype_of(node: fx.Node) -> str:
    """Return the name of the dtype in which a node multiplies matrices, or ``"tf32"``.

    It is the dtype of the first floating-point tensor that the node reads.
    """
    sources = (t.dtype for n in node.all_input_nodes for t in tensors_of(n))
    dtype = next((dtype for dtype in sources if dtype.is_floating_point), torch.float32)
    if dtype is torch.float32 and _uses_tf32(node):
        return TF32
    return str(dtype).removeprefix("torch.")


def _uses_tf32(node: fx.Node) -> bool:
    """Return whether torch allows a GPU to compute ``node``, a float32 product, in TF32."""
    if node.target in CONVOLUTIONS:
        return torch.backends.cudnn.allow_tf32
    return torch.get_float32_matmul_precision() != "highest"


def _result_bytes(joint: JointGraph) -> tuple[int, ...]:
    """Return the bytes of each storage, by index: as traced, or more if a kernel allocates more."""
    table = joint.storages
    sizes = list(table.nbytes)
    for node in joint.module.graph.nodes:
        made = _made_bytes(node, table)
        for storage in table.of_node.get(node, ()) if made else ():
            granule = table.granule_bytes[storage]
            sizes[storage] = max(sizes[storage], -(-made // granule) * granule)
    return tuple(sizes)


def _made_bytes(node: fx.Node, table: StorageTable) -> int:
    """Return the bytes that the kernel of ``node`` allocates for its result; 0 if as traced."""
    if node.target in REDUCED:  # the mean is in the storage of the terms
        shapes = [t.shape for n in node.all_input_nodes[:2] for t in tensors_of(n)]
        (result,) = tensors_of(node)
        terms: Sequence[int] = torch.broadcast_shapes(*shapes)  # type: ignore[no-untyped-call]
        return math.prod(terms) * result.element_size()
    if node.target is aten.copy.default:  # the result is a clone of its first argument's storage
        return max(table.asked_bytes[i] for i in table.of_node[node.all_input_nodes[0]])
    return 0


CONVOLUTIONS = frozenset((aten.convolution.default, aten.convolution_backward.default))

REDUCED: frozenset[object] = frozenset(
    (
        aten.mse_loss.default,
        aten.smooth_l1_loss.default,
        aten.binary_cross_entropy.default,
        aten.soft_margin_loss.default,
    )
)

WORKING: frozenset[object] = CONVOLUTIONS | {
    aten.native_batch_norm_backward.default,
    aten.native_layer_norm_backward.default,
    aten.native_group_norm_backward.default,
    aten.native_dropout.default,
    aten.native_dropout_backward.default,
    aten.embedding_dense_backward.default,
    aten._safe_softmax.default,
    aten.cumsum.default,
    aten.sort.stable,
}
"""Operations whose workspaces were observed to grow with their sizes."""

PRODUCTS: frozenset[object] = frozenset((aten.mm.default, aten.addmm.default, aten.bmm.default))
"""Operations that use workspaces on a CPU for 16-bit numbers, since they repack matrices."""


def aside_bytes(joint: JointGraph) -> int:
    """Return the bytes to set aside for workspaces throughout a step, since a trace has none.

    These are the bytes that the largest operation reads and makes of those that have a workspace
    for which there is no formula (``costs.estimated.working``), without masks of attention. In the
    tests' zoo on a CPU all operations need less, except for convolutions of a few kilobytes.
    """
    table, cpu = joint.storages, joint.device.type == "cpu"
    most = 0
    for node in (*joint.forward, *joint.backward):
        target = call_of(node, Mode.FIRST)[0]
        if has_formula(target, joint.device):
            continue
        packs = cpu and target in PRODUCTS and next(tensors_of(node)).element_size() == 2
        if packs or target in WORKING or "attention" in str(target):
            mask = mask_of(node)  # kernels read it where it is
            read = [source for source in node.all_input_nodes if source is not mask]
            most = max(most, table.total(table.of((node, *read))))
    return most
