"""Policies: what they let travel."""

from __future__ import annotations

from fxremat.planner.policy import conv_inputs
from tests.harness import captured


def test_inputs_of_convolutions_and_poolings_travel():
    joint = captured("resnet50").joint
    table = joint.storages
    expected = set()
    for node in joint.forward:
        if str(node.target).startswith(("aten.convolution", "aten.max_pool")):
            expected |= table.of(node.all_input_nodes)
    found = conv_inputs(joint)
    assert found == expected
    assert len(found - table.of(joint.given)) > 20


def test_a_transformer_has_none():
    assert not conv_inputs(captured("gpt").joint)
