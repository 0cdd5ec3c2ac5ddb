"""What collectives cost: stand-ins are as large as the real ones, and the law is a line."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode

from fxremat import torch_compat
from fxremat.costs.link.collectives import LATE, late_bytes, with_collectives
from fxremat.effort import USUAL
from fxremat.errors import CaptureError
from fxremat.ir import RecordedCosts, StageSeconds
from fxremat.passes.joint.build import build_joint_graph
from fxremat.passes.stages.block import BlockCache
from fxremat.passes.stages.linearize import Line, linearize

OPS: Any = torch.ops._c10d_functional
GROUP = "a group"


def example(rows: int = 4) -> torch.Tensor:
    return torch.randn(rows, 6).t().contiguous().t()  # not as contiguous tensors lie


@pytest.mark.parametrize(
    ("op", "args"),
    [
        ("all_reduce", ("sum", GROUP)),
        ("broadcast", (0, GROUP)),
        ("all_gather_into_tensor", (2, GROUP)),
        ("reduce_scatter_tensor", ("sum", 2, GROUP)),
        ("all_to_all_single", ([1, 3], [2, 2], GROUP)),
        ("wait_tensor", ()),
    ],
)
def test_what_stands_for_a_collective_is_as_large(op: str, args: tuple[Any, ...]) -> None:
    target = getattr(OPS, op).default
    made = torch_compat.alone(target)(example(), *args)
    with FakeTensorMode() as mode:
        traced = target(mode.from_tensor(example()), *args)
    assert (made.shape, made.dtype) == (traced.shape, traced.dtype)


@pytest.fixture
def alone() -> Iterator[str]:
    """The name of a group of this process alone."""
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield torch.distributed.group.WORLD.group_name
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize(
    ("op", "args"),
    [
        ("all_reduce", ("sum",)),
        ("broadcast", (0,)),
        ("all_gather_into_tensor", (1,)),
        ("reduce_scatter_tensor", ("sum", 1)),
        ("all_to_all_single", ([4], [4])),
    ],
)
def test_what_stands_for_a_collective_lies_as_its_result(
    op: str, args: tuple[Any, ...], alone: str
) -> None:
    target = getattr(OPS, op).default
    try:
        found = OPS.wait_tensor.default(target(example(), *args, alone))
    except RuntimeError as error:
        if "is_contiguous" not in str(error):
            raise
        pytest.skip("this torch takes contiguous tensors only")
    made = torch_compat.alone(target)(example(), *args, alone)
    assert (made.shape, made.stride()) == (found.shape, found.stride())


@pytest.mark.parametrize(
    ("op", "args"),
    [
        ("all_reduce_coalesced", ("sum", GROUP)),
        ("all_gather_into_tensor_coalesced", (2, GROUP)),
        ("reduce_scatter_tensor_coalesced", ("sum", 2, GROUP)),
    ],
)
def test_what_stands_for_several_is_as_large(op: str, args: tuple[Any, ...]) -> None:
    target = getattr(OPS, op).default
    made = torch_compat.alone(target)([example(), example(8)], *args)
    with FakeTensorMode() as mode:
        traced = target([mode.from_tensor(example()), mode.from_tensor(example(8))], *args)
    assert [t.shape for t in made] == [t.shape for t in traced]


def test_other_functions_stand_for_themselves() -> None:
    assert torch_compat.alone(torch.ops.aten.mm.default) is torch.ops.aten.mm.default
    assert torch_compat.alone(OPS.all_reduce_.default) is None


def graph_of(target: Any, *args: Any) -> fx.GraphModule:
    """``gelu(wait(target(x @ w)))`` and its backward, as AOTAutograd would write it."""
    graph = fx.Graph()
    aten = torch.ops.aten
    with FakeTensorMode() as mode:
        x, w, tangent = (
            mode.from_tensor(torch.empty(*shape)) for shape in ((4, 8), (8, 16), (4, 16))
        )

        def call(function: Any, *inputs: Any) -> fx.Node:
            node = graph.call_function(function, inputs)
            node.meta["val"] = function(
                *[i.meta["val"] if isinstance(i, fx.Node) else i for i in inputs]
            )
            return node

        placed = []
        for name, value in (("primals_1", x), ("primals_2", w), ("tangents_1", tangent)):
            placed.append(graph.placeholder(name))
            placed[-1].meta["val"] = value
        primal, weight, given = placed
        product = call(aten.mm.default, primal, weight)
        waited = call(OPS.wait_tensor.default, call(target, product, *args))
        made = call(aten.gelu.default, waited)
        back = call(aten.gelu_backward.default, given, waited)
        turned = call(aten.t.default, primal)
        graph.output((made, None, call(aten.mm.default, turned, back)))
    return fx.GraphModule(torch.nn.Module(), graph)


def line() -> Line:
    module = graph_of(OPS.all_reduce.default, "sum", GROUP)
    return linearize(build_joint_graph(module, forward_output_count=1, mutated_primals=()), USUAL)


def test_who_waits_has_what_was_waited_for() -> None:
    joint = line().joint
    (collective,) = (n for n in joint.forward if torch_compat.group_of(n) == GROUP)
    (wait,) = (n for n in joint.forward if torch_compat.is_wait(n))
    assert joint.storages.of_node[wait] == joint.storages.of_node[collective]


def test_a_collective_that_nothing_stands_for_is_refused() -> None:
    module = graph_of(OPS.all_reduce.default, "sum", GROUP)
    for node in module.graph.nodes:
        if torch_compat.group_of(node):
            node.target = OPS.all_reduce_.default
    with pytest.raises(CaptureError, match="does not know what this collective costs") as caught:
        build_joint_graph(module, forward_output_count=1, mutated_primals=())
    assert caught.value.code == "FXR306"


def test_a_message_and_its_bytes_are_added_wherever_it_is_sent() -> None:
    own = line()
    order = {node: i for i, node in enumerate(own.joint.module.graph.nodes)}
    (collective,) = (n for n in own.joint.forward if torch_compat.group_of(n))
    stages = tuple(StageSeconds(1.0, 1.0, 1.0) for _ in own.stages)
    again = tuple((order[n], 1.0) for n in own.joint.forward)
    costs = RecordedCosts(stages, again, (), own.joint.storages.nbytes, ())
    found = with_collectives(costs, own, BlockCache(own), {GROUP: (10.0, 2.0)})
    more = 10.0 + 2.0 * 4 * 16 * 4
    assert sum(stage.forward_s - 1.0 for stage in found.stages) == more
    assert sum(stage.backward_s - 1.0 for stage in found.stages) == 0.0
    assert dict(found.again_s) == {
        i: 1.0 + more * (i == order[collective]) for i, _ in costs.again_s
    }


def test_a_cpu_leaves_room_for_buffers_that_go_late() -> None:
    assert late_bytes(line(), torch.device("cpu")) == LATE * 4 * 16 * 4
    assert late_bytes(line(), torch.device("cuda")) == 0
