"""Measuring: every operation run as it will run, nothing left behind, no zero for a failure."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from torch import Tensor, fx, nn

from fxremat import torch_compat
from fxremat.costs.measured.cache import CostCache
from fxremat.costs.measured.cost import Measured, stage_blocks
from fxremat.costs.measured.execute import (
    BLOCK_S,
    DOUBTFUL_RUNS,
    LEAST_RUNS,
    MOST_RUNS,
    Operations,
    least_s,
)
from fxremat.costs.measured.measure import KernelClock
from fxremat.costs.measured.stages import measure_line
from fxremat.costs.measured.synthetic import Synthesizer
from fxremat.errors import CostError
from fxremat.ir import RecordedCosts
from fxremat.passes.joint.graph import is_getitem, tensors_of
from fxremat.passes.stages.block import Block, BlockCache, Mode, node_key
from fxremat.progress import silent
from tests.harness import Captured, capture, captured
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


RAN: list[str] = []


@torch.library.custom_op("fxremat_tests::counted", mutates_args=())
def counted(x: Tensor) -> Tensor:
    RAN.append("forward")
    return x.sin()


@counted.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


@torch.library.custom_op("fxremat_tests::counted_backward", mutates_args=())
def counted_backward(gradient: Tensor, x: Tensor) -> Tensor:
    RAN.append("backward")
    return gradient * x.cos()


@counted_backward.register_fake
def _(gradient: Tensor, x: Tensor) -> Tensor:
    return torch.empty_like(x)


counted.register_autograd(
    lambda ctx, gradient: counted_backward(gradient, *ctx.saved_tensors),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
)


class Counted(nn.Module):
    """Equal layers, then others, of operations that tell when they run."""

    def __init__(self, *, last: int = 16):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(6))
        self.last = nn.Linear(16, last)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = counted(layer(x))
        return counted(self.last(x))


def runs_of(step: Captured, cache: CostCache) -> int:
    """How often operations ran while ``step`` was measured."""
    RAN.clear()
    measure(step, cache)
    return len(RAN)


def test_what_was_measured_once_is_not_measured_again():
    step, cache = capture(Counted(), (torch.randn(4, 16),)), CostCache()
    first = measure(step, cache)
    seconds, workspaces = dict(cache.seconds), dict(cache.workspace_bytes)
    assert runs_of(step, cache) == 0
    second = measure(step, cache)
    assert second.stages == first.stages
    assert second.again_s == first.again_s
    assert second.line.joint.storages == first.line.joint.storages
    assert (cache.seconds, cache.workspace_bytes) == (seconds, workspaces)


def test_stages_before_one_that_is_new_run_once_and_nothing_runs_after_it():
    cache = CostCache()
    measure(capture(Counted(), (torch.randn(4, 16),)), cache)
    all_new = runs_of(capture(Counted(last=24), (torch.randn(4, 16),)), CostCache())
    last_new = runs_of(capture(Counted(last=24), (torch.randn(4, 16),)), cache)
    layers = len(Counted().layers)
    assert layers < last_new < all_new - layers * LEAST_RUNS


@pytest.mark.parametrize("name", ["gpt", "resnet50", "inplace"])
def test_timing_changes_no_value(name: str):
    """What is drawn is drawn once, and what is asked for is what an untimed run gives."""
    step = captured(name)
    real = dict(zip(step.joint.primals, step.primals, strict=True))
    for index in (0, 1):
        first, again, _ = stage_blocks(step.line, step.blocks, index)
        inputs = Synthesizer(step.joint, real).of(first.inputs)
        values = []
        for timed in (again, None):
            torch.manual_seed(0)
            operations = Operations(CostCache(), device=CPU)
            with torch.no_grad():
                ran = operations.run(first, inputs, keep=first.outputs, again=timed)
            values.append((list(ran.values()), torch.get_rng_state()))
        assert_bitwise_equal(values[0][0], values[1][0])
        assert torch.equal(values[0][1], values[1][1])


def test_a_value_goes_with_its_last_reader():
    alive: list[weakref.ref[Tensor]] = []
    counts = []

    def op(*xs: Tensor) -> Tensor:
        counts.append(sum(ref() is not None for ref in alive))
        result = sum(xs) + torch.ones(3)
        alive.append(weakref.ref(result))
        return result

    graph = fx.Graph()
    x = graph.placeholder("x")
    a = graph.call_function(op, (x,))
    b = graph.call_function(op, (a,))
    c = graph.call_function(op, (a, b))
    d = graph.call_function(op, (c,))
    e = graph.call_function(op, (d,))
    for node in graph.nodes:
        node.meta["val"] = torch.zeros(3)
    block = Block(0, Mode.FIRST, (a, b, c, d, e), (x,), (b,), frozenset())
    cache, inputs = CostCache(), {x: torch.ones(3)}
    kept = Operations(cache, device=CPU).run(block, inputs, keep=(b,))
    assert counts == [0, 1, 2, 2, 2]
    assert {node: value.tolist() for node, value in kept.items()} == {b: [3.0] * 3}
    assert inputs.keys() == {x}
    del kept
    assert all(ref() is None for ref in alive)


def test_the_most_that_measuring_holds_is_counted():
    """Measured on a line whose tensors all have 4096 bytes: what is held is a number of these."""
    graph = fx.Graph()
    x, w = graph.placeholder("x"), graph.placeholder("w")
    a = graph.call_function(torch.ops.aten.mul.Tensor, (x, w))
    b = graph.call_function(torch.ops.aten.exp.default, (a,))
    c = graph.call_function(torch.ops.aten.view.default, (b, [32, 32]))  # in the memory of b
    d = graph.call_function(torch.ops.aten.mul.Tensor, (b, b))
    for node in graph.nodes:
        node.meta["val"] = torch.zeros(1024)
    c.meta["val"] = torch.zeros(32, 32)
    nodes = (a, b, c, d)
    inputs, nbytes = {x: torch.ones(1024), w: torch.ones(1024)}, 4096
    for keep, given, also_held, most in (
        ((), (), (), 4),  # x, w; two of a, b, d
        ((a, b), (), (), 5),
        ((a, b), (w,), (), 4),
        ((), (w,), (torch.ones(1024), inputs[x]), 4),
    ):
        block = Block(0, Mode.FIRST, nodes, (x, w), keep, frozenset())
        values = [inputs[node] for node in given]
        operations = Operations(CostCache(), device=CPU, given=values)
        operations.run(block, inputs, keep=keep, also_held=also_held)
        assert operations.peak_bytes == most * nbytes


class Scripted(KernelClock):
    """Runs for real, and tells what was scripted; the last for ever after."""

    def __init__(self, *seconds: float):
        super().__init__(CPU)
        self._seconds = list(seconds)
        self.runs = 0

    def seconds_of(self, run: Callable[[], object]) -> float:
        run()
        told = self._seconds[min(self.runs, len(self._seconds) - 1)]
        self.runs += 1
        return told


@pytest.mark.parametrize(
    ("script", "runs", "least"),
    [
        ((0.1,), LEAST_RUNS, 0.1),
        ((0.1, 0.103), LEAST_RUNS, 0.1),
        ((0.103, 0.1), LEAST_RUNS, 0.1),
        ((0.2, 0.1, 0.1), 3, 0.1),  # one of two was disturbed
        ((0.5, 0.4, 0.3, 0.2, 0.1), DOUBTFUL_RUNS, 0.1),
        ((0.002,), 5, 0.002),
        ((30e-6,), MOST_RUNS, 30e-6),
        ((0.5, 0.7, 30e-6), MOST_RUNS, 30e-6),  # a pause is not what a run takes
        ((5.0, 7.0, 0.002, 0.002), 5, 0.002),
    ],
)
def test_what_is_slow_runs_twice_and_what_is_fast_often(
    script: tuple[float, ...], runs: int, least: float
):
    clock = Scripted(*script)
    assert least_s(lambda: None, [], clock=clock, enough_s=BLOCK_S) == least
    assert clock.runs == runs


def test_there_is_never_more_than_one_result():
    alive: list[weakref.ref[Tensor]] = []

    def run() -> Tensor:
        assert all(ref() is None for ref in alive)
        result = torch.ones(3)
        alive.append(weakref.ref(result))
        return result

    kept = [run()]
    least_s(run, kept, clock=Scripted(30e-6), enough_s=BLOCK_S)
    assert len(alive) == MOST_RUNS + 1
    assert [alive[-1]()] == kept


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
    assert told[0] == ("measure", 0, count)
    assert told[-1] == ("measure", count, count)
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
    measured = measure(step, cache)
    assert max(cache.workspace_bytes.values()) > 10_000
    assert min(cache.workspace_bytes.values()) == 0
    most_bytes = measured.most_workspace_bytes(step.joint.module.graph.nodes)
    assert most_bytes == max(cache.workspace_bytes.values())
    assert measured.most_workspace_bytes(step.joint.given) == 0


def test_an_operation_that_was_not_measured_is_named():
    step = captured("gpt")
    measured = measure(step, CostCache())
    node = step.joint.forward[3]
    other = Block(0, Mode.FIRST, (node,), (), (), frozenset())
    stranger = fx.Graph().call_function(torch.ops.aten.sin.default, (3.0,))
    assert measured.workspace_bytes(node, other) >= 0
    with pytest.raises(CostError, match=r"(?s)sin.*was never measured.*FXR900"):
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
    with pytest.raises(CostError, match=r"(?s)picky.*fxremat_tests.*separately.*in name only"):
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
        Operations(CostCache(), device=CPU).run(block, {x: torch.ones(4, 4)})


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
    Operations(cache, device=CPU).run(block, {x: torch.ones(50)})
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
                    assert node_key(node, block) in cache.workspace_bytes


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
    Operations(cache, device=CPU).run(block, {x: torch.ones(50)})
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


@pytest.mark.parametrize(
    "damage",
    [
        lambda c: {"storage_bytes": (c.storage_bytes[0] - 1, *c.storage_bytes[1:])},
        lambda c: {"storage_bytes": c.storage_bytes[1:]},
        lambda c: {"workspace_bytes": ((1 << 40, "first", 0), *c.workspace_bytes)},
        lambda c: {"workspace_bytes": ((0, "first", -1), *c.workspace_bytes)},
        lambda c: {"workspace_bytes": ((0, "sideways", 1), *c.workspace_bytes)},
        lambda c: {"asked": ((*c.workspace_bytes[0][:2], ((1, 0),)),)},
        lambda c: {"asked": ((*c.workspace_bytes[0][:2], ((0, 0), (-1, 8))),)},
        lambda c: {"asked": ((*c.workspace_bytes[0][:2], ((-1, -8), (-1, 8))),)},
        lambda c: {"asked": ((1 << 40, "first", ((0, 0),)),)},
        lambda c: {"again_s": ((-1, 0.0), *c.again_s)},
        lambda c: {"again_s": ((0, float("nan")), *c.again_s)},
        lambda c: {"displaced": (len(c.storage_bytes),)},
    ],
)
def test_damaged_costs_are_refused(damage: Callable[[RecordedCosts], dict[str, object]]):
    step = captured("gpt")
    costs = step.measured.costs
    assert Measured.of(step.line, costs).costs == costs
    with pytest.raises(CostError):
        Measured.of(step.line, replace(costs, **damage(costs)))
