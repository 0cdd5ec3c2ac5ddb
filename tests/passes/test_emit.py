"""Emitted code: reads as the schedule, empties its arguments, and computes what its graph does."""

from __future__ import annotations

import ast
import operator
import re
import traceback

import pytest
import torch
from torch import Tensor, fx, nn

from fxremat.ir import Backward, Schedule
from fxremat.passes.emit.code import COMMENT, GROUP, WIDTH, ScheduleModule, render
from fxremat.passes.emit.program import Program, keep_all
from fxremat.passes.emit.rewrite import BlockModules, rewrite
from tests.harness import SEED, Captured, Made, captured, periodic, random_schedule
from tests.models.bits import assert_bitwise_equal

models = pytest.mark.parametrize("name", ["gpt", "siamese", "outputs", "buffers", "gru"])


def emitted(step: Captured, schedule: Schedule) -> tuple[Program, ScheduleModule, ScheduleModule]:
    program = step.program(schedule)
    return (program, *rewrite(program, step.sweep(program).peaks_bytes, BlockModules()))


def schedules_of(step: Captured) -> list[Schedule]:
    count = len(step.line.stages)
    return [keep_all(count), periodic(count, 3), random_schedule(count, 4)]


@models
def test_an_interpreter_gives_the_same(name: str):
    """The graph is an ordinary graph, whatever its code looks like."""
    step = captured(name)
    for schedule in schedules_of(step):
        _, forward, backward = emitted(step, schedule)
        with torch.random.fork_rng(), torch.no_grad():
            torch.manual_seed(SEED)
            ours = forward([*step.primals])
            gradients = Made([None] * len(step.primals))
            backward([*ours[step.output_count :], *step.tangents, gradients])
            torch.manual_seed(SEED)
            theirs = fx.Interpreter(Listed(forward)).run(*step.primals)
            saved = theirs[step.output_count :]
            interpreted = Made([None] * len(step.primals))
            fx.Interpreter(Listed(backward)).run(*saved, *step.tangents, interpreted)
        assert_bitwise_equal(list(theirs), ours)
        assert_bitwise_equal(interpreted.gradients, gradients.gradients)


class Listed(fx.GraphModule):
    """The same graph; its submodules take a list, which an interpreter would spread."""

    def __init__(self, module: ScheduleModule):
        root = nn.Module()
        for node in module.graph.find_nodes(op="call_module"):
            root.add_module(node.target, Spread(module.get_submodule(node.target)))
        for node in module.graph.find_nodes(op="get_attr"):
            setattr(root, node.target, getattr(module, node.target))
        super().__init__(root, module.graph)


class Spread(nn.Module):
    def __init__(self, inner: nn.Module):
        super().__init__()
        self.inner = inner

    def forward(self, *values: Tensor):
        return self.inner(list(values))


@models
def test_the_arguments_are_emptied(name: str):
    step = captured(name)
    _, forward, backward = emitted(step, periodic(len(step.line.stages), 3))
    with torch.no_grad():
        arguments = [*step.primals]
        results = forward(arguments)
        assert arguments == []
        made = Made([None] * len(step.primals))
        arguments = [*results[step.output_count :], *step.tangents, made]
        assert list(backward(arguments)) == []
        assert arguments == []


@models
def test_one_line_an_operation(name: str):
    step = captured(name)
    for schedule in schedules_of(step):
        program, forward, backward = emitted(step, schedule)
        lines = [
            line for line in (forward.code + backward.code).splitlines() if "(args)  #" in line
        ]
        assert len(lines) == len(program.calls)
        for call, line in zip(program.calls, lines, strict=True):
            stage = call.op.stage
            assert f" {step.line.name_of(stage)}_" in line
            said = f"rebuild {stage}" if call.rebuilds else str(call.op)
            assert f"# {said}" in line
            assert re.search(r"peak [\d.]+ (B|KiB|MiB)$", line)
            assert ("_backward" in line) == isinstance(call.op, Backward)


@models
def test_the_code_is_the_code_that_runs(name: str):
    step = captured(name)
    _, forward, backward = emitted(step, periodic(len(step.line.stages), 3))
    for module in (forward, backward):
        tree = ast.parse(module.code)
        assert [type(node) for node in tree.body] == [ast.FunctionDef]
        assert tree.body[0].name == "forward"
        assert module.code == render(module.graph)
        assert str(module.print_readable(print_output=False))


@models
def test_lines_are_not_too_long(name: str):
    step = captured(name)
    for schedule in schedules_of(step):
        _, forward, backward = emitted(step, schedule)
        for line in (forward.code + backward.code).splitlines():
            assert len(line.split("  # ")[0]) <= WIDTH + 4, line


@models
def test_names_are_dropped_where_they_are_read_last(name: str):
    """After its last reader no name of a tensor is left, but for the caller's own tensors."""
    step = captured(name)
    for schedule in schedules_of(step):
        _, forward, backward = emitted(step, schedule)
        for module in (forward, backward):
            check_names(ast.parse(module.code).body[0])


def check_names(function: ast.FunctionDef) -> None:
    alive: set[str] = set()
    later = [names_in(s, ast.Load) for s in function.body]
    for index, statement in enumerate(function.body):
        if isinstance(statement, ast.Delete):
            alive -= names_in(statement, ast.Del)
            continue
        alive |= names_in(statement, ast.Store)
        if isinstance(statement, ast.Return):
            break
        if not calls_a_stage(statement):
            continue
        still_read = set().union(*later[index + 1 :])
        free = {n for n in alive if not re.match(r"primals|params|args|_tensor_constant", n)}
        assert free <= still_read | names_in(statement, ast.Store), ast.unparse(statement)


def calls_a_stage(statement: ast.stmt) -> bool:
    return re.search(r"stage\w+\(args\)", ast.unparse(statement)) is not None


def names_in(statement: ast.stmt, context: type) -> set[str]:
    return {
        node.id
        for node in ast.walk(statement)
        if isinstance(node, ast.Name) and isinstance(node.ctx, context)
    }


class Failing(nn.Module):
    def forward(self, args: list[Tensor]) -> list[Tensor]:
        raise ValueError("no luck")


def tiny(child: nn.Module) -> ScheduleModule:
    root = nn.Module()
    root.add_module("stage0_forward", child)
    graph = fx.Graph()
    x = graph.placeholder("x")
    call = graph.call_module("stage0_forward", (x,))
    call.meta[COMMENT] = "F_all 0"
    graph.output((graph.call_function(operator.getitem, (call, 0)), None, 3))
    return ScheduleModule(root, graph, "Tiny")


def test_a_traceback_shows_the_emitted_line():
    with pytest.raises(ValueError, match="no luck") as caught:
        tiny(Failing())([torch.ones(1)])
    shown = "".join(traceback.format_exception(caught.value))
    assert "= stage0_forward(args)  # F_all 0" in shown


class Doubling(nn.Module):
    def forward(self, args: list[Tensor]) -> list[Tensor]:
        return [2 * args.pop()]


def test_constants_are_returned_as_they_are():
    (value, none, three) = tiny(Doubling())([torch.ones(1)])
    assert_bitwise_equal([value, none, three], [torch.tensor([2.0]), None, 3])


def test_after_a_change_of_the_graph_the_code_is_anew():
    module = tiny(Doubling())
    before = module.code
    output = module.graph.output_node()
    output.args = ((output.args[0][0], 4),)
    module.recompile()
    assert module.code != before
    assert module([torch.ones(1)])[1] == 4


def test_modules_do_not_share_code():
    a, b = tiny(Doubling()), tiny(Failing())
    assert_bitwise_equal(a([torch.ones(1)])[0], torch.tensor([2.0]))
    with pytest.raises(ValueError):
        b([torch.ones(1)])


def test_values_that_travel_together_are_one_list():
    graph = fx.Graph()
    root = nn.Module()
    for name in ("stage0_forward", "stage0_backward"):
        root.add_module(name, Doubling())
    x = graph.placeholder("primals_1")
    call = graph.call_module("stage0_forward", (x,))
    parts = [graph.call_function(operator.getitem, (call, i)) for i in range(3)]
    for part in parts:
        part.meta[GROUP] = "kept0"
    graph.output((graph.call_module("stage0_backward", tuple(parts)),))
    source = render(graph)
    assert "[*kept0] = stage0_forward(args)" in source
    assert "args = [*kept0]\n    del kept0\n" in source


def test_values_that_part_are_named_one_by_one():
    graph = fx.Graph()
    x = graph.placeholder("primals_1")
    call = graph.call_module("stage0_forward", (x,))
    parts = [graph.call_function(operator.getitem, (call, i), name=f"kept0_{i}") for i in range(3)]
    for part in parts:
        part.meta[GROUP] = "kept0"
    first = graph.call_module("stage0_backward", tuple(parts[:2]))
    graph.output((first, graph.call_module("stage1_backward", (parts[2],))))
    source = render(graph)
    assert "kept0_2] = stage0_forward(args)" in source
    assert "del kept0_2\n" in source


@pytest.mark.parametrize("value", [float("inf"), float("nan"), -0.0, None, True, 7])
def test_any_plain_value_can_be_returned(value):
    graph = fx.Graph()
    graph.placeholder("x")
    graph.output((value,))
    (result,) = ScheduleModule(nn.Module(), graph, "Plain")([torch.ones(1)])
    assert repr(result) == repr(value)
