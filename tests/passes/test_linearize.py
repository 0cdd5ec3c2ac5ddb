"""Stages: every operation in one of them, all that a backward reads at hand, one a block."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, fx, nn

from fxremat.passes.joint.graph import is_tensor
from fxremat.passes.stages.linearize import Line, Role, StageNodes
from fxremat.planner.search.generators import build_chain
from tests.harness import capture, captured
from tests.models import ZOO

every_model = pytest.mark.parametrize("name", ZOO)


@every_model
def test_every_forward_operation_is_in_one_stage_in_order(name: str):
    line = captured(name).line
    nodes = [n for stage in line.stages for n in stage.forward]
    assert len(set(nodes)) == len(nodes)
    assert nodes == [n for n in line.joint.forward if n not in line.views]
    for index, stage in enumerate(line.stages):
        assert all(line.stage_of[n] == index for n in stage.forward)


@every_model
def test_every_backward_operation_is_in_one_stage_in_a_valid_order(name: str):
    line = captured(name).line
    nodes = [n for stage in reversed(line.stages) for n in stage.backward]
    assert len(set(nodes)) == len(nodes)
    assert set(nodes) == set(line.joint.backward)
    done: set[fx.Node] = set()
    pending = set(nodes)
    for node in nodes:
        assert done.issuperset(pending.intersection(node.all_input_nodes)), node
        done.add(node)


@every_model
def test_what_a_backward_reads_is_at_hand(name: str):
    line = captured(name).line
    for stage in line.stages:
        hand = {*stage.saved, *stage.boundary, *line.pinned, *line.joint.given, *line.views}
        hand.update(line.joint.tangents, line.joint.backward)
        for node in stage.backward:
            missing = [n for n in node.all_input_nodes if is_tensor(n) and n not in hand]
            assert not missing, f"{node} reads {missing}"


@every_model
def test_what_a_forward_reads_is_at_hand(name: str):
    line = captured(name).line
    pinned_so_far: set[fx.Node] = set()
    for stage in line.stages:
        hand = {*stage.boundary, *stage.forward, *pinned_so_far, *line.joint.given, *line.views}
        for node in stage.forward:
            assert hand.issuperset(node.all_input_nodes), node
        pinned_so_far.update(stage.pinned)
    assert pinned_so_far == line.pinned


@every_model
def test_a_line_ends_at_the_turn_where_the_loss_is_outside(name: str):
    """A last stage without operations: no scalar outside takes memory worth one."""
    line = captured(name).line
    outside = any(n.meta["val"].numel() > 1 for n in line.joint.tangents)
    assert line.ends_at_loss_point == outside
    *others, last = line.stages
    assert all(stage.forward or stage.backward for stage in others)
    if outside:
        assert last == StageNodes((), (), (), (), (), ())
    names = [line.name_of(index) for index in range(len(line.stages))]
    assert (names[-1] == "loss point") == outside
    assert len(set(names)) == len(names)


@every_model
def test_boundaries_are_what_crosses_the_cut(name: str):
    line = captured(name).line
    for index, stage in enumerate(line.stages):
        crossing = [
            node
            for node in line.joint.forward
            if is_tensor(node)
            and node not in line.pinned
            and node not in line.views
            and line.stage_of[node] < index
            and any(line.stage_of.get(user, -1) >= index for user in node.users)
        ]
        assert list(stage.boundary) == crossing
    assert line.stages[0].boundary == ()


@every_model
def test_results_and_what_cannot_be_computed_again_are_pinned(name: str):
    line = captured(name).line
    kept = line.joint.storages.of((*line.pinned, *line.joint.given))
    for node in line.joint.forward_outputs:
        if isinstance(node, fx.Node):
            assert kept.issuperset(line.joint.storages.of_node[node]), node


BLOCKS = {
    "hf_llama": lambda m: len(m.model.layers),
    "hf_clip": lambda m: len(m.text_model.encoder.layers) + len(m.vision_model.encoder.layers),
    "hf_t5": lambda m: len(m.encoder.block) + len(m.decoder.block),
    "unet": lambda m: sum(1 for n, _ in m.named_modules() if n.count(".") == 1),
    "densenet121": lambda m: sum(
        1 for n, _ in m.named_modules() if type(_).__name__ == "DenseLayer"
    ),
}


@pytest.mark.parametrize("name", BLOCKS)
def test_models_with_long_connections_split_into_a_stage_a_block(name: str):
    line = captured(name).line
    model = ZOO[name].build()
    assert len(line.stages) >= BLOCKS[name](model) > 1


@pytest.mark.parametrize("name", ["gpt", *BLOCKS])
def test_no_stage_saves_most_of_it(name: str):
    """One huge stage beside many tiny ones would be no use."""
    line = captured(name).line
    table = line.joint.storages
    saved = [table.total(table.of(stage.saved)) for stage in line.stages]
    assert max(saved) < 0.3 * sum(saved)


@pytest.mark.parametrize("name", ["gpt", "hf_llama", "hf_vit"])
def test_blocks_that_are_alike_are_of_one_kind(name: str):
    step = captured(name)
    kinds = [s.kind for s in build_chain(step.measured.line, step.blocks).stages]
    line = step.line
    texts = [
        tuple(str(n.target) for n in (*stage.forward, *stage.backward)) for stage in line.stages
    ]
    # Alike in text, and neither first nor last: then alike altogether.
    inner = range(len(line.stages) // 4, 3 * len(line.stages) // 4)
    for i in inner:
        assert len({kinds[j] for j in inner if texts[j] == texts[i]}) == 1, kinds
    assert len({kinds[i] for i in inner}) <= 0.6 * len(inner)


class Tower(nn.Module):
    """Blocks that are alike but for one number in the middle one."""

    def __init__(self, odd: float):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(6))
        self.odd = odd

    def forward(self, x: Tensor) -> Tensor:
        for index, layer in enumerate(self.layers):
            x = layer(x.tanh()) * (self.odd if index == 3 else 0.5)
        return x


@pytest.mark.parametrize(("odd", "more"), [(0.5, 0), (0.25, 1)])
def test_one_number_makes_another_kind(odd: float, more: int):
    def kinds(value: float) -> int:
        step = capture(Tower(value), (torch.randn(4, 16),))
        chain = build_chain(step.measured.line, step.blocks)
        return len({stage.kind for stage in chain.stages})

    assert kinds(odd) == kinds(0.5) + more


class Masked(nn.Module):
    """Every block reads a small mask that the first operations computed."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(12))

    def forward(self, x: Tensor, seed: Tensor) -> Tensor:
        mask = (seed * 2).sigmoid()
        for layer in self.layers:
            x = torch.nn.functional.gelu(layer(x)) * mask
        return x


def masked(*mask_shape: int) -> Line:
    return capture(Masked(), (torch.randn(256, 64), torch.randn(mask_shape))).line


def test_small_tensors_that_live_long_are_pinned_and_cross_nothing():
    line = masked(64)
    assert any(str(n.target) == "aten.sigmoid.default" for n in line.pinned)
    table = line.joint.storages
    assert all(len(table.of(stage.boundary)) <= 1 for stage in line.stages)
    outputs = table.of(n for n in line.joint.forward_outputs if isinstance(n, fx.Node))
    assert table.total(table.of(line.pinned) - outputs) < 0.01 * table.total(
        table.of(n for stage in line.stages for n in (*stage.saved, *stage.boundary))
    )


def test_large_tensors_that_live_long_cross_the_cuts():
    line = masked(256, 64)
    assert not any(str(n.target) == "aten.sigmoid.default" for n in line.pinned)
    assert any(
        str(n.target) == "aten.sigmoid.default" for stage in line.stages for n in stage.boundary
    )


def test_views_of_parameters_cross_nothing():
    line = captured("hf_llama").line
    assert line.views
    given = line.joint.storages.of(line.joint.given)
    for node in line.views:
        assert given.issuperset(line.joint.storages.of_node[node])
    for stage in line.stages:
        assert line.views.isdisjoint((*stage.boundary, *stage.saved, *stage.pinned))


def test_roles_tell_what_a_tensor_is_to_the_stages():
    line = captured("gpt").line
    for stage in line.stages:
        assert {line.role_of[n] for n in stage.boundary} <= {Role.BOUNDARY}
        assert {line.role_of[n] for n in stage.saved} <= {Role.SAVED, Role.BOUNDARY}
    assert {line.role_of[n] for n in line.pinned} == {Role.PINNED}
    assert {line.role_of[n] for n in line.joint.given} == {Role.GIVEN}
    assert {line.role_of[n] for n in line.joint.backward} == {Role.GRADIENT}
    ranks = [line.rank(n) for n in sorted(line.role_of, key=line.rank)]
    assert ranks == sorted(ranks)


@pytest.mark.parametrize("activation", [nn.Tanh, nn.ReLU, nn.GELU, nn.SiLU, nn.Identity])
def test_layers_of_one_width_are_cut(activation: type[nn.Module]):
    """What crosses is as large everywhere, so that no place is cheaper than its neighbours."""
    layers = [layer for _ in range(12) for layer in (nn.Linear(64, 64), activation())]
    line = capture(nn.Sequential(*layers), (torch.randn(256, 64),)).line
    assert len(line.stages) >= 11
