"""The checker finds what a pass must not leave, and names the pass and the node."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

from fxremat.errors import CostError, GraphError
from fxremat.passes import conditions
from fxremat.passes.contract import Condition, Pass, PassConfig
from fxremat.passes.joint.graph import JointGraph
from fxremat.passes.joint.sizes import LAYOUTS, layouts_of
from fxremat.passes.pipeline import PASSES, run_passes
from fxremat.passes.stages.linearize import StageNodes
from fxremat.passes.step_graph import StepGraph
from tests.harness import capture

Change = Callable[[StepGraph], StepGraph]


class Noisy(nn.Module):
    """Two layers, with new statistics and noise between them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 4)
        self.norm = nn.BatchNorm1d(8)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.first(x).tanh())
        return self.last(x * torch.rand_like(x)).sin()


@functools.cache
def step_at(name: str | None) -> StepGraph:
    """The step as the pass ``name`` is given it; ``None``: as the last pass leaves it."""
    step = capture(Noisy(), (torch.randn(16, 8),))
    graph = StepGraph.captured(step.traced, forward_output_count=step.output_count)
    return run_passes(graph, config=PassConfig(), before=name)


def run(own: Pass, graph: StepGraph) -> StepGraph:
    """What the pass makes of ``graph``, run as the list's last."""
    PASSES.append(own)
    try:
        return run_passes(graph, config=PassConfig(), first=own.name)
    finally:
        PASSES.remove(own)


def error_of(change: Change, graph: StepGraph, **contract: Any) -> str:
    """What is said of a pass that changes ``graph`` so."""
    with pytest.raises(GraphError) as caught:
        run(breaking(change, **contract), graph)
    return str(caught.value)


def breaking(change: Change, **contract: Any) -> Pass:
    """A pass that changes its graph so."""

    def breaks(graph: StepGraph, *, config: PassConfig) -> StepGraph:
        return change(graph)

    return Pass("breaks", breaks, **contract)


def named(graph: fx.Graph, name: str) -> fx.Node:
    return next(n for n in graph.nodes if n.name == name)


def edited(edit: Callable[[fx.Graph], object]) -> Change:
    """A change of a copy of the graph."""

    def change(graph: StepGraph) -> StepGraph:
        module = graph.copied()
        edit(module.graph)
        return graph.changed(module)

    return change


def read_too_early(graph: fx.Graph) -> None:
    named(graph, "tanh").prepend(named(graph, "sin"))


def swap_inputs(graph: fx.Graph) -> None:
    named(graph, "primals_1").prepend(named(graph, "primals_2"))


def add_input(graph: fx.Graph) -> None:
    with graph.inserting_before(named(graph, "primals_1")):
        graph.placeholder("more")


def drop_result(graph: fx.Graph) -> None:
    (results,) = graph.output_node().args
    graph.output_node().args = (results[:-1],)  # type: ignore[index]


def turn_input(graph: fx.Graph) -> None:
    node = named(graph, "primals_1")
    node.meta["val"] = node.meta["val"].t()


def draw_no_more(graph: fx.Graph) -> None:
    draw = named(graph, "rand_like")
    draw.replace_all_uses_with(named(graph, "getitem"))
    graph.erase_node(draw)


def draw_otherwise(graph: fx.Graph) -> None:
    named(graph, "rand_like").target = torch.ops.aten.randn_like.default


def compute_in_place(graph: fx.Graph) -> None:
    node = named(graph, "sin")
    with graph.inserting_after(node):
        graph.call_function(torch.ops.aten.sin.default, node.args).meta = dict(node.meta)


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (read_too_early, "node sin .* reads addmm_1, which does not precede it"),
        (swap_inputs, "node primals_2 is where primals_1 was"),
        (add_input, "node more is where primals_1 was"),
        (drop_result, r"node output returns \(13, 4\) values"),
        (turn_input, "node primals_1 lies as"),
        (draw_no_more, "node output is the last of 0 random draws; there were 1"),
        (draw_otherwise, "node rand_like .* draws where rand_like drew"),
        (
            compute_in_place,
            "node sin_default .* lies in the storage of sin, and reads nothing in it",
        ),
    ],
)
def test_what_every_pass_keeps_of_a_traced_graph(
    edit: Callable[[fx.Graph], object], words: str
) -> None:
    text = error_of(edited(edit), step_at("build"))
    assert "[FXR621: " in text
    assert text.startswith("pass 'breaks': every pass ensures that")
    assert re.search(words, text), text


def other_layout(graph: fx.Graph) -> None:
    node = named(graph, "tanh")
    (own,) = layouts_of(node)
    node.meta[LAYOUTS] = (replace(own, stride=(1, 8)),)


def short_storage(graph: fx.Graph) -> None:
    node = named(graph, "tanh")
    node.meta["val"] = node.meta["val"].clone()
    node.meta["val"].untyped_storage().resize_(16 * 8 * 4 - 4)


def return_no_gradient(graph: fx.Graph) -> None:
    (results,) = graph.output_node().args
    graph.output_node().args = ((*results[:-1], None),)  # type: ignore[misc]


def listed(**fields: Callable[[JointGraph], object]) -> Change:
    """A change of the lists of a classified graph, and not of its operations."""

    def change(graph: StepGraph) -> StepGraph:
        joint = graph.joint
        values: dict[str, Any] = {name: value(joint) for name, value in fields.items()}
        return replace(graph, classified=replace(joint, **values))

    return change


def doubled_bytes(joint: JointGraph) -> object:
    return replace(joint.storages, nbytes=tuple(2 * n for n in joint.storages.nbytes))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (edited(other_layout), "node tanh .* its layouts say"),
        (edited(short_storage), "node tanh .* ends at byte 512 of a storage of 508 bytes"),
        (edited(return_no_gradient), "node output returns None as result 13, and returned view"),
        (listed(storages=doubled_bytes), "node primals_1 takes 256 bytes, and the table says 512"),
        (listed(forward=lambda j: j.forward[1:]), "node t .* is neither given nor"),
        (
            listed(forward=lambda j: j.forward[1:], backward=lambda j: (j.forward[0], *j.backward)),
            "node addmm .* is of the forward, and reads t of the backward",
        ),
        (listed(mutated=lambda j: frozenset()), "is mutated in the graph or in its classified"),
        (listed(primals=lambda j: j.primals[::-1]), "begins placeholders that are not"),
        (
            listed(backward_outputs=lambda j: j.backward_outputs[::-1]),
            "node output returns other values",
        ),
    ],
)
def test_what_every_pass_keeps_of_a_classified_graph(change: Change, words: str) -> None:
    text = error_of(change, step_at("split"))
    assert text.startswith("pass 'breaks': every pass ensures that")
    assert re.search(words, text), text


def write_into(graph: fx.Graph) -> None:
    named(graph, "sin").target = torch.ops.aten.sin_.default


def forget_value(graph: fx.Graph) -> None:
    del named(graph, "sin").meta["val"]


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (read_too_early, "sin.*was used before it has been defined|addmm_1.*used before"),
        (write_into, "node sin .* writes into its arguments"),
        (forget_value, "node sin .* carries no traced value"),
    ],
)
def test_a_change_that_cannot_be_classified_is_refused_without_a_check_too(
    edit: Callable[[fx.Graph], object], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("FXREMAT_CHECK")
    text = error_of(edited(edit), step_at("split"))
    assert re.search(words, text), text


def staged(edit: Callable[[list[StageNodes]], None]) -> Change:
    """A change of the stages."""

    def change(graph: StepGraph) -> StepGraph:
        stages = [*graph.line.stages]
        edit(stages)
        return graph.as_line(replace(graph.line, stages=tuple(stages)))

    return change


def forget_operation(stages: list[StageNodes]) -> None:
    stages[0] = replace(stages[0], forward=stages[0].forward[1:])


def compute_twice(stages: list[StageNodes]) -> None:
    stages[1] = replace(stages[1], forward=(*stages[1].forward, stages[0].forward[0]))


def turn_around(stages: list[StageNodes]) -> None:
    stages[0] = replace(stages[0], forward=stages[0].forward[::-1])


def save_nothing(stages: list[StageNodes]) -> None:
    stages[2] = replace(stages[2], saved=())


def cross_the_end(stages: list[StageNodes]) -> None:
    stages[-1] = replace(stages[-1], boundary=(stages[0].forward[-1],))


@pytest.mark.parametrize(
    ("edit", "condition", "words"),
    [
        (forget_operation, conditions.stages_hold_operations, "node addmm .* is in no stage"),
        (compute_twice, conditions.stages_hold_operations, "node addmm .* is in stages 0 and 1"),
        (turn_around, conditions.stages_run_in_order, "node tanh .* reads addmm, which runs later"),
        (
            save_nothing,
            conditions.backwards_have_what_they_read,
            "node mul_2 .* reads rand_like, which stage 2 does not hold",
        ),
        (
            cross_the_end,
            conditions.nothing_crosses_the_loss_point,
            "node tanh .* crosses the cut before the loss point",
        ),
    ],
)
def test_what_linearize_ensures(
    edit: Callable[[list[StageNodes]], None], condition: Condition, words: str
) -> None:
    text = error_of(staged(edit), step_at(None), ensures=(condition,))
    assert text.startswith("pass 'breaks': it ensures that")
    assert re.search(words, text), text


def detach(graph: fx.Graph) -> None:
    node = named(graph, "sin")
    with graph.inserting_after(node):
        new = graph.call_function(torch.ops.aten.detach.default, (node,))
    new.meta = dict(node.meta)
    node.replace_all_uses_with(new, delete_user_cb=lambda user: user is not new)


def leave_dead(graph: fx.Graph) -> None:
    node = named(graph, "sin")
    with graph.inserting_after(node):
        dead = graph.call_function(torch.ops.aten.sin.default, node.args)
    dead.meta = {**node.meta, "val": node.meta["val"].clone()}


def forget_state(graph: fx.Graph) -> None:
    draw = named(graph, "rand_like")
    state, _device, draw.target, *draw.args = draw.args  # type: ignore[assignment, misc]
    graph.erase_node(state)


def return_transposed(graph: fx.Graph) -> None:
    node = named(graph, "t_8")
    node.replace_all_uses_with(named(graph, "t_7"))
    graph.erase_node(node)


@pytest.mark.parametrize(
    ("edit", "condition", "words"),
    [
        (detach, conditions.nothing_is_detached, "node detach.* detaches a tensor"),
        (leave_dead, conditions.nothing_is_dead, "node sin.* is read by nothing"),
        (forget_state, conditions.draws_are_recorded, "node rand_like .* draws from a generator"),
        (return_transposed, conditions.results_lie_as_before, "node t_7 .* is a result that lies"),
    ],
)
def test_what_other_passes_ensure(
    edit: Callable[[fx.Graph], object], condition: Condition, words: str
) -> None:
    text = error_of(edited(edit), step_at("split"), ensures=(condition,))
    assert text.startswith("pass 'breaks': it ensures that")
    assert re.search(words, text), text


def test_values_follow_their_operation() -> None:
    """Between passes that classify this is so whatever a pass does: it is checked of a trace."""
    module = step_at("build").copied()
    named(module.graph, "rand_like").append(named(module.graph, "getitem_4"))
    graph = step_at("build").changed(module)
    (found,) = conditions.values_follow(graph, before=graph, config=PassConfig())
    assert found[0].name == "getitem_4"


def test_a_tensor_on_another_device_than_the_target_is_found() -> None:
    graph = step_at("split")
    config = PassConfig(target=torch.device("cuda"))
    node, problem = next(conditions.tensors_are_on_target(graph, before=graph, config=config))
    assert node.name == "primals_1"
    assert problem == "is on cpu, not on cuda"


def test_what_a_pass_requires_is_checked_before_it_runs() -> None:
    def never(_graph: StepGraph) -> StepGraph:
        raise AssertionError

    requires = (conditions.operations_are_classified,)
    text = error_of(never, step_at("build"), requires=requires)
    assert text.startswith("pass 'breaks': it requires that each operation is of the forward or of")


@pytest.mark.parametrize(
    ("read", "words"),
    [("joint", "add the pass after 'build'"), ("line", "a pass that reads them follows")],
)
def test_what_is_not_derived_yet_says_which_pass_derives_it(read: str, words: str) -> None:
    text = error_of(lambda graph: getattr(graph, read), step_at("build"))
    assert words in text


def test_a_pass_that_changes_the_graph_it_was_given_is_found() -> None:
    def in_place(graph: StepGraph) -> StepGraph:
        named(graph.module.graph, "cos").target = torch.ops.aten.sin.default
        return graph.changed(graph.copied())

    def erased(graph: StepGraph) -> StepGraph:
        draw_no_more(graph.module.graph)
        return graph.changed(graph.copied())

    graph = step_at("build")
    for change, words in ((in_place, "it changed node cos of"), (erased, "which had 51 nodes and")):
        copy = replace(graph, module=graph.copied())  # the cached step is for other tests, too
        assert words in error_of(change, copy)


def test_an_error_that_the_contract_does_not_list_is_named() -> None:
    def fails(_graph: StepGraph) -> StepGraph:
        raise CostError("no cost")

    text = error_of(fails, step_at("build"))
    assert text.splitlines()[0] == (
        "pass 'breaks': it raised CostError, which its contract does not list: no cost"
    )
    with pytest.raises(CostError, match=r"^no cost$"):
        run(breaking(fails, raises={CostError: "always"}), step_at("build"))


@pytest.mark.parametrize("value", ["0", ""])
def test_nothing_is_checked_unless_asked(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FXREMAT_CHECK", value)
    made = run(breaking(edited(draw_no_more)), step_at("build"))
    assert "rand_like" not in {n.name for n in made.nodes}


def test_the_rest_of_many_violations_is_counted() -> None:
    def all_transposes_again(graph: fx.Graph) -> None:
        for node in list(graph.nodes):
            if node.target is torch.ops.aten.t.default:
                with graph.inserting_after(node):
                    graph.node_copy(node, lambda n: n)

    text = error_of(
        edited(all_transposes_again), step_at("split"), ensures=(conditions.nothing_is_dead,)
    )
    assert text.count("is read by nothing") == 3
    assert "(and 6 more)\n" in text
