"""A line at another size is the line of that size."""

from __future__ import annotations

import pytest

from fxremat.costs.measured.cache import CostCache
from fxremat.costs.measured.stages import measure_line
from fxremat.passes.joint.sizes import layouts_of
from fxremat.passes.stages.block import BlockCache
from fxremat.passes.stages.linearize import Line
from fxremat.passes.stages.resize import resize
from fxremat.progress import silent
from tests.sized import AtSize, static, symbolic


def by_index(line: Line) -> list[object]:
    """All of a line by indices of nodes."""
    order = line.order

    def ids(nodes) -> list[int]:
        return sorted(order[n] for n in nodes)

    parts = ("forward", "backward", "boundary", "saved", "pinned")
    return [
        [[ids(getattr(stage, part)) for part in parts] for stage in line.stages],
        ids(line.pinned),
        ids(line.views),
        sorted((order[n], stage) for n, stage in line.stage_of.items()),
        sorted((order[n], role) for n, role in line.role_of.items()),
        sorted((order[n], sorted(stages)) for n, stages in line.sums.items()),
        [ids(getattr(line.joint, part)) for part in ("primals", "tangents", "constants")],
        ids(line.joint.mutated),
    ]


@pytest.mark.parametrize(
    ("name", "hints", "sizes"), [("gpt", (3, 24), (5, 17)), ("unet", (3, 32, 64), (2, 64, 32))]
)
def test_only_sizes_differ(name: str, hints: tuple[int, ...], sizes: tuple[int, ...]):
    step = symbolic(name, hints)
    at = AtSize.of(step, static(name, sizes))
    line = resize(step.line, at.values)
    assert by_index(line) == by_index(step.line)
    assert line.joint.sizes.hints == at.values
    table = step.joint.storages
    wanted = step.joint.sizes.formulas(table.asked_bytes)(at.values)
    assert line.joint.storages.nbytes == tuple(wanted.tolist())
    assert line.joint.storages.asked_bytes == table.asked_bytes
    for node, value in zip(line.joint.primals, at.primals, strict=True):
        traced = node.meta["val"]
        found = int(traced) if isinstance(value, int) else traced.shape
        assert found == (value if isinstance(value, int) else value.shape)
    for old, new in zip(step.line.order, line.order, strict=True):
        assert layouts_of(old) == layouts_of(new) or old.op == "output"


def test_there_and_back():
    step = symbolic("gpt", (3, 24))
    back = resize(resize(step.line, (2, 9, 2, 9)), step.joint.sizes.hints)
    assert by_index(back) == by_index(step.line)
    assert back.joint.storages.nbytes == step.joint.storages.nbytes
    for old, new in zip(step.line.order, back.order, strict=True):
        assert repr(old.meta.get("val")) == repr(new.meta.get("val"))


def test_it_can_be_measured():
    step = symbolic("gpt", (3, 24))
    alone = static("gpt", (5, 17))
    line = resize(step.line, AtSize.of(step, alone).values)
    found = measure_line(line, BlockCache(line), real={}, cache=CostCache(), progress=silent)
    assert found.costs.storage_bytes == line.joint.storages.nbytes
