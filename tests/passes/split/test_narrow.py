"""Values that are nearly all that is held at a narrow place of a step."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from fxremat.passes.joint.graph import JointGraph
from fxremat.passes.split.narrow import narrow_values
from tests.harness import capture, captured

ROWS, WIDTH = 256, 32


class Residual(nn.Module):
    """Layers that add what they compute to a stream, with room for much more inside."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.up = nn.ModuleList(nn.Linear(WIDTH, 8 * WIDTH) for _ in range(layers))
        self.down = nn.ModuleList(nn.Linear(8 * WIDTH, WIDTH) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        for up, down in zip(self.up, self.down, strict=True):
            x = x + down(functional.gelu(up(x)))
        return x


class Chain(nn.Module):
    """Layers of one width, of which none is narrower than the others."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(6))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x).relu()
        return x


def joint_of(model: nn.Module) -> JointGraph:
    return capture(model, (torch.randn(ROWS, WIDTH),)).line.joint


def bytes_of_narrow(joint: JointGraph) -> tuple[list[int], list[int]]:
    """In forward and backward, in order."""
    table, forward = joint.storages, {*joint.forward}
    narrow = sorted(narrow_values(joint))
    ours = [table.nbytes[i] for i in narrow if table.owner[i] in forward]
    return ours, [table.nbytes[i] for i in narrow if table.owner[i] not in forward]


def test_they_are_the_residual_stream_and_its_gradients():
    layers, stream_bytes = 3, 4 * ROWS * WIDTH
    forward, backward = bytes_of_narrow(joint_of(Residual(layers)))
    assert {*forward, *backward} == {stream_bytes}
    assert layers - 1 <= len(forward) <= layers + 1
    assert layers - 1 <= len(backward) <= layers + 1


def test_a_chain_of_equal_layers_has_next_to_none():
    forward, backward = bytes_of_narrow(joint_of(Chain()))
    assert len(forward) <= 1
    assert len(backward) <= 1


def test_logits_are_not_among_them():
    joint = captured("hf_llama").line.joint
    table = joint.storages
    most_bytes = max(table.nbytes)
    narrow = narrow_values(joint)
    assert narrow
    assert all(table.nbytes[i] < most_bytes for i in narrow)
