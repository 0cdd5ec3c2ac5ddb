"""Measuring: every operation run as it will run, nothing left behind, no zero for a failure."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from torch import Tensor, fx, nn

from fxremat import torch_compat
from fxremat.costs import cost
from fxremat.costs.cache import CostCache
from fxremat.costs.cost import Measured, measure_line, stage_blocks
from fxremat.costs.execute import run_logged
from fxremat.errors import CostError
from fxremat.passes.joint.storage import tensors_of
from fxremat.passes.stages.block import Block, Mode, is_getitem
from fxremat.passes.stages.blocks import BlockCache
from tests.harness import Captured, capture, captured, silent
from tests.models.bits import assert_bitwise_equal

CPU = torch.device("cpu")


def measure(step: Captured, cache: CostCache, progress=silent) -> Measured:
    real = dict(zip(step.joint.primals, step.primals, strict=True))
    blocks = BlockCache(step.line)
    return measure_line(step.line, blocks, real=real, cache=cache, progress=progress)


@pytest.mark.parametrize("name", ["gpt", "integers", "wavenet"])
def test_every_stage_takes_time(name: str):
    step = captured(name)
    measured = measure(step, CostCache())
    for index, seconds in enumerate(measured.stages):
        first, again, backward = stage_blocks(step.line, step.blocks, index)
        pairs = [(seconds.forward_s, first), (seconds.rebuild_s, again),
                 (seconds.backward_s, backward)]  # fmt: skip
        for value, block in pairs:
            assert (value > 0) == bool(block.nodes)
            assert value < 1


@pytest.mark.parametrize("name", ["gpt", "resnet50", "inplace"])
def test_nothing_is_left_behind(name: str):
    step = captured(name)
    copies = [x.clone() for x in step.primals]
    versions = [x._version for x in step.primals]
    state = torch.get_rng_state()
    measure(step, CostCache())
    assert torch.equal(state, torch.get_rng_state())
    assert_bitwise_equal(list(step.primals), copies)
    assert [x._version for x in step.primals] == versions
    assert all(x.grad is None for x in step.primals if x.is_leaf)


def test_what_was_measured_once_is_not_measured_again(monkeypatch: pytest.MonkeyPatch):
    step, cache = captured("gpt"), CostCache()
    first = measure(step, cache)
    seconds, workspaces = dict(cache.seconds), dict(cache.workspace_bytes)

    def refuse(_block: Block) -> None:
        raise AssertionError("measured again")

    monkeypatch.setattr(cost, "compile_block", refuse)
    assert measure(step, cache).stages == first.stages
    assert (cache.seconds, cache.workspace_bytes) == (seconds, workspaces)


def test_stages_that_are_alike_are_measured_once():
    step, cache = captured("hf_llama"), CostCache()
    measured = measure(step, cache)
    count = sum(
        bool(b.nodes)
        for i in range(len(step.line.stages))
        for b in stage_blocks(step.line, step.blocks, i)
    )
    assert len(cache.seconds) < 0.6 * count
    assert len(set(measured.stages)) < len(measured.stages)


def test_progress_is_told():
    step = captured("gpt")
    told: list[tuple[str, int, int]] = []
    measure(step, CostCache(), lambda *what: told.append(what))
    count = len(step.line.stages)
    assert told[0] == ("measuring", 0, count)
    assert told[-1] == ("measuring", count, count)
    assert all(a[1] < b[1] for a, b in pairwise(told))


class Expanded(nn.Module):
    """Inputs and gradients of stride 0, on both sides of cuts."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(5))

    def forward(self, x: Tensor, shift: Tensor) -> Tensor:
        wide = shift.expand(16, 8)
        for layer in self.layers:
            x = layer(x).tanh() + wide
        return x.sum()


def test_inputs_of_stride_0_are_measured():
    shift = torch.randn(1, 8, requires_grad=True).expand(16, 8)
    assert shift.stride(0) == 0
    step = capture(Expanded(), (torch.randn(16, 8), shift.detach()))
    blocks = [
        b for i in range(len(step.line.stages)) for b in stage_blocks(step.line, step.blocks, i)
    ]
    for modes in ((Mode.FIRST, Mode.AGAIN), (Mode.BACKWARD,)):
        inputs = [n.meta["val"] for b in blocks if b.mode in modes for n in b.inputs]
        assert any(value.dim() and 0 in value.stride() for value in inputs)
    assert sum(stage.backward_s for stage in measure(step, CostCache()).stages) > 0


def test_workspaces_are_measured():
    step, cache = captured("unet"), CostCache()
    measure(step, cache)
    assert max(cache.workspace_bytes.values()) > 10_000
    assert min(cache.workspace_bytes.values()) == 0


def test_an_operation_that_was_not_measured_is_named():
    step = captured("gpt")
    measured = measure(step, CostCache())
    node = step.joint.forward[3]
    other = Block(0, Mode.FIRST, (node,), (), (), frozenset())
    stranger = fx.Graph().call_function(torch.ops.aten.sin.default, (3.0,))
    assert measured.workspace_bytes(node, other) >= 0
    with pytest.raises(CostError, match=r"sin.*was never measured"):
        measured.workspace_bytes(stranger, other)


@torch.library.custom_op("fxremat_tests::picky", mutates_args=())
def picky(x: Tensor) -> Tensor:
    raise RuntimeError("this kernel exists in name only")


@picky.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


picky.register_autograd(lambda _context, gradient: gradient)


class Picky(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return picky(self.layer(x)).tanh()


def test_an_operation_that_cannot_run_alone_is_named():
    step = capture(Picky(), (torch.randn(2, 4),))
    with pytest.raises(CostError, match=r"(?s)picky.*fxremat_tests.*alone.*in name only"):
        measure(step, CostCache())


def test_after_a_failure_the_generators_are_as_before():
    step = capture(Picky(), (torch.randn(2, 4),))
    state = torch.get_rng_state()
    with pytest.raises(CostError):
        measure(step, CostCache())
    assert torch.equal(state, torch.get_rng_state())
    assert torch.is_grad_enabled()


def test_a_copy_where_the_trace_has_a_view_is_an_error():
    """Its memory would be nobody's."""
    graph = fx.Graph()
    x = graph.placeholder("x")
    x.meta["val"] = torch.zeros(4, 4)
    node = graph.call_function(torch.clone, (x,))
    node.meta["val"] = x.meta["val"].t()
    block = Block(0, Mode.FIRST, (node,), (x,), (node,), frozenset())
    with pytest.raises(CostError, match=r"clone.* allocates 1 storages where its trace has 0"):
        run_logged(block, {x: torch.ones(4, 4)}, CostCache(), device=CPU)


def test_a_workspace_is_the_peak_beyond_arguments_and_results():
    def hungry(x: Tensor) -> Tensor:
        a = x.new_empty(1000)
        del a
        b = x.new_empty(300)
        return x + b.sum() * 0

    graph = fx.Graph()
    x = graph.placeholder("x")
    x.meta["val"] = torch.zeros(50)
    node = graph.call_function(hungry, (x,))
    node.meta["val"] = torch.zeros(50)
    block, cache = Block(0, Mode.FIRST, (node,), (x,), (node,), frozenset()), CostCache()
    run_logged(block, {x: torch.ones(50)}, cache, device=CPU)
    assert list(cache.workspace_bytes.values()) == [4000 - 4 * 50]
    assert list(cache.result_bytes.values()) == [(200,)]


def test_results_are_carried_on_and_getitems_cost_nothing():
    step = captured("gpt")
    cache = CostCache()
    measure(step, cache)
    for index in range(len(step.line.stages)):
        for block in stage_blocks(step.line, step.blocks, index):
            for node in block.nodes:
                if not is_getitem(node):
                    assert cost.node_key(node, block) in cache.workspace_bytes


@torch.library.custom_op("fxremat_tests::seeded", mutates_args=())
def seeded(x: Tensor) -> tuple[Tensor, Tensor]:
    """As attention with dropout does: the seed that the backward reads is on the CPU."""
    return x.sin(), torch.full((64,), 3.0)


@seeded.register_fake
def _(x: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x), torch.empty(64, device="meta")


@torch.library.custom_op("fxremat_tests::seeded_backward", mutates_args=())
def seeded_backward(gradient: Tensor, x: Tensor, seed: Tensor) -> Tensor:
    """Reads the seed where it is."""
    return gradient * x.cos() * seed[0]


@seeded_backward.register_fake
def _(gradient: Tensor, x: Tensor, _seed: Tensor) -> Tensor:
    return torch.empty_like(x)


seeded.register_autograd(
    lambda ctx, gradient, _seed: seeded_backward(gradient, *ctx.saved_tensors),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(inputs[0], output[1]),
)


def test_what_lives_elsewhere_than_traced_stays_where_it_is():
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(4))

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = seeded(layer(x))[0]
            return x

    step = capture(Model(), (torch.randn(256, 64),))
    measured = measure(step, CostCache())
    table = measured.line.joint.storages
    elsewhere = {
        storage
        for node in step.joint.forward
        for tensor in tensors_of(node)
        if tensor.device.type == "meta"
        for storage in table.of_node[node]
    }
    assert len(elsewhere) >= 4
    assert elsewhere <= measured.displaced


def test_results_on_another_device_take_none_of_the_steps_memory():
    """An operation that gives a GPU tensor and a state on the CPU, seen from either."""

    def op(x: Tensor) -> tuple[Tensor, Tensor]:
        return x.new_empty(300), torch.empty(1000, device="meta")

    graph = fx.Graph()
    x = graph.placeholder("x")
    x.meta["val"] = torch.zeros(50)
    node = graph.call_function(op, (x,))
    node.meta["val"] = (torch.zeros(300), torch.zeros(1000))
    block, cache = Block(0, Mode.FIRST, (node,), (x,), (node,), frozenset()), CostCache()
    run_logged(block, {x: torch.ones(50)}, cache, device=CPU)
    assert list(cache.workspace_bytes.values()) == [0]


def test_the_device_of_a_step_is_not_that_of_its_first_input():
    joint = captured("gpt").joint
    state, *others = joint.primals
    mode = torch_compat.fake_mode()
    with mode:
        on_gpu = torch.empty(4, device="cuda")
        on_cpu = torch.empty(4)
    nodes = {state: on_cpu, **dict.fromkeys(others, on_gpu)}
    graph = fx.Graph()
    primals = []
    for node, value in nodes.items():
        primals.append(graph.placeholder(node.name))
        primals[-1].meta["val"] = value
    assert replace(joint, primals=tuple(primals), tangents=()).device.type == "cuda"
    assert joint.device == CPU
