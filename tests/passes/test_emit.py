"""Emitted code: reads as the schedule, empties its arguments, and does what it says."""

from __future__ import annotations

import ast
import copy
import re
import traceback
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fxremat.ir import Backward, Schedule
from fxremat.passes.emit.body import GIVE, RETURN, Body, Statement, Variable
from fxremat.passes.emit.code import WIDTH, Emitted, compile_graph, emitted, render
from fxremat.passes.emit.program import Program, keep_all
from fxremat.passes.emit.rewrite import BlockModules, rewrite
from tests.harness import SEED, Captured, Made, captured, periodic, random_schedule
from tests.models.bits import assert_bitwise_equal

models = pytest.mark.parametrize("name", ["gpt", "siamese", "outputs", "buffers", "gru"])


def code_of(step: Captured, schedule: Schedule) -> tuple[Program, Emitted, Emitted]:
    program = step.program(schedule)
    return (program, *rewrite(program, step.sweep(program).peaks_bytes, BlockModules()))


def schedules_of(step: Captured) -> list[Schedule]:
    count = len(step.line.stages)
    return [keep_all(count), periodic(count, 3), random_schedule(count, 4)]


@models
def test_the_code_does_what_its_statements_say(name: str):
    step = captured(name)
    for schedule in schedules_of(step):
        _, forward, backward = code_of(step, schedule)
        with torch.random.fork_rng(), torch.no_grad():
            torch.manual_seed(SEED)
            ours = forward([*step.primals])
            gradients = Made([None] * len(step.primals))
            backward([*ours[step.output_count :], *step.tangents, gradients])
            torch.manual_seed(SEED)
            theirs = interpreted(forward.body, step.primals)
            saved = theirs[step.output_count :]
            made = Made([None] * len(step.primals))
            interpreted(backward.body, [*saved, *step.tangents, made])
        assert_bitwise_equal(theirs, ours)
        assert_bitwise_equal(made.gradients, gradients.gradients)


def interpreted(body: Body, args: Sequence[object]) -> list[Any]:
    """What the statements of ``body`` give, one after the other, none of it dropped."""
    known: dict[str, Any] = dict(body.constants)
    known.update(zip((v.name for v in body.takes), args, strict=True))

    def at(argument: object) -> Any:
        return known[argument.name] if isinstance(argument, Variable) else argument

    for statement in body.statements:
        if statement.target == GIVE:
            receiver, made = statement.arguments
            at(receiver).give({primal: at(value) for primal, value in made.items()})
            continue
        values = list(map(at, statement.arguments))
        if statement.target == RETURN:
            return values
        results = body.stages[statement.target](values)
        known.update(zip((v.name for v in statement.makes), results, strict=True))
    raise AssertionError("nothing is returned")


@models
def test_the_arguments_are_emptied(name: str):
    step = captured(name)
    _, forward, backward = code_of(step, periodic(len(step.line.stages), 3))
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
        program, forward, backward = code_of(step, schedule)
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
    _, forward, backward = code_of(step, periodic(len(step.line.stages), 3))
    for module in (forward, backward):
        tree = ast.parse(module.code)
        assert [type(node) for node in tree.body] == [ast.FunctionDef]
        assert tree.body[0].name == "forward"
        assert module.code == render(module.body)


@models
def test_a_digest_tells_schedules_apart(name: str):
    step = captured(name)
    digests = [
        [part.structure_digest() for part in code_of(step, schedule)[1:]]
        for schedule in (*schedules_of(step), schedules_of(step)[0])
    ]
    assert digests[0] == digests[-1]
    assert len(set(map(tuple, digests))) == len(digests) - 1


@models
def test_lines_are_not_too_long(name: str):
    step = captured(name)
    for schedule in schedules_of(step):
        _, forward, backward = code_of(step, schedule)
        for line in (forward.code + backward.code).splitlines():
            assert len(line.split("  # ")[0]) <= WIDTH + 4, line


@models
def test_names_are_dropped_where_they_are_read_last(name: str):
    """After its last reader no name of a tensor is left, but for the caller's own tensors."""
    step = captured(name)
    for schedule in schedules_of(step):
        _, forward, backward = code_of(step, schedule)
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


def body_of(*names: str) -> Body:
    body = Body()
    body.takes += (Variable(name, i, given=True) for i, name in enumerate(names))
    return body


def called(body: Body, name: str, reads: Sequence[Variable], *makes: Variable) -> None:
    body.stages.setdefault(name, Doubling())
    body.statements.append(Statement(name, reads, makes))


def tiny(child: nn.Module) -> Emitted:
    body = body_of("primals_1")
    body.stages["stage0_forward"] = child
    y = Variable("y")
    body.statements.append(Statement("stage0_forward", body.takes, [y], comment="F_all 0"))
    body.statements.append(Statement(RETURN, [y, None, 3]))
    return emitted(body)


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


def test_modules_do_not_share_code():
    a, b = tiny(Doubling()), tiny(Failing())
    assert_bitwise_equal(a([torch.ones(1)])[0], torch.tensor([2.0]))
    with pytest.raises(ValueError):
        b([torch.ones(1)])


def test_values_that_are_read_together_are_one_list():
    body = body_of("primals_1")
    kept = [Variable(f"kept0_{i}", group="kept0") for i in range(3)]
    called(body, "stage0_forward", body.takes, *kept)
    called(body, "stage0_backward", kept)
    source = render(body)
    assert "[*kept0] = stage0_forward(args)" in source
    assert "args = [*kept0]\n    del kept0\n" in source


def test_values_that_part_are_named_one_by_one():
    body = body_of("primals_1")
    kept = [Variable(f"kept0_{i}", group="kept0") for i in range(3)]
    called(body, "stage0_forward", body.takes, *kept)
    called(body, "stage0_backward", kept[:2])
    called(body, "stage1_backward", kept[2:])
    source = render(body)
    assert "kept0_2] = stage0_forward(args)" in source
    assert "del kept0_2\n" in source


def test_a_name_is_one_owners():
    body = Body()
    first, second = object(), object()
    assert [body.named("add", x) for x in (first, second, first)] == ["add", "add_2", "add"]
    assert body.named("host", first) != "host"
    assert body.named("wait", first) != "wait"


@pytest.mark.parametrize("value", [float("inf"), float("nan"), -0.0, None, True, 7])
def test_any_plain_value_can_be_returned(value):
    body = body_of("primals_1")
    body.statements.append(Statement(RETURN, [value]))
    (result,) = emitted(body)([torch.ones(1)])
    assert repr(result) == repr(value)


def test_a_transpose_of_a_transpose_is_not_computed():
    """Nor are transposes that nobody else reads; what is read lies alike."""
    transpose, mm = torch.ops.aten.t.default, torch.ops.aten.mm.default
    graph = torch.fx.Graph()
    a, b = graph.placeholder("a"), graph.placeholder("b")
    once = graph.call_function(transpose, (a,))
    twice = graph.call_function(transpose, (graph.call_function(transpose, (b,)),))
    same = graph.call_function(transpose, (once,))
    graph.output((graph.call_function(mm, (once, twice)), same))
    plain = torch.fx.GraphModule(nn.Module(), copy.deepcopy(graph))
    module = compile_graph(graph)
    found = [node.target for node in graph.nodes if node.op == "call_function"]
    assert found == [transpose, mm]
    values = [torch.randn(8, 4), torch.randn(8, 6)]
    args, theirs = [*values], plain(*values)
    ours = module.forward(args)
    assert not args
    assert_bitwise_equal(list(theirs), list(ours))
    assert ours[1].data_ptr() == values[0].data_ptr()
    assert ours[1].stride() == values[0].stride()
