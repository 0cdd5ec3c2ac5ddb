"""Memory of one block: hand-made steps, and the allocator's word on real ones."""

from __future__ import annotations

import pytest
import torch
from torch.fx import Node

from fxremat.costs.measured.cost import stage_blocks
from fxremat.costs.measured.execute import compile_block
from fxremat.costs.measured.synthetic import Synthesizer
from fxremat.passes.joint.batchnorm import updates_statistics
from fxremat.passes.joint.graph import StorageTable, is_getitem
from fxremat.passes.stages.block import Block, Mode, dependencies
from fxremat.planner.allocator.footprints import OperationRequests, requests_of, steps_of
from fxremat.torch_compat import AllocationLog
from tests.harness import captured
from tests.reference.plain_sweep import Footprint, run

TABLE = StorageTable((100, 10, 1), (), {})
NOTHING: frozenset[int] = frozenset()


@pytest.mark.parametrize(
    ("steps", "kept", "peak", "change"),
    [
        ((), NOTHING, 0, 0),
        ((OperationRequests((0,), (), 0),), NOTHING, 100, 100),
        ((OperationRequests((0,), (), 7),), NOTHING, 107, 100),
        ((OperationRequests((0,), (0,), 7),), NOTHING, 107, 0),
        # released only after the operation has allocated its result
        ((OperationRequests((0,), (), 0), OperationRequests((1,), (0,), 0)), NOTHING, 110, 10),
        # an input that nobody else holds is freed, so memory falls below the start
        ((OperationRequests((), (0,), 0), OperationRequests((1,), (), 0)), NOTHING, 0, -90),
        ((OperationRequests((), (0,), 0), OperationRequests((1,), (), 0)), frozenset({0}), 10, 10),
        ((OperationRequests((), (0, 1, 2), 0),), frozenset({1}), 0, -101),
    ],
)
def test_replay(steps: tuple[OperationRequests, ...], kept: frozenset[int], peak: int, change: int):
    assert run(requests_of(steps, TABLE, kept=kept)) == Footprint(peak, change)


def allocated(step, block, kept_inputs: bool) -> Footprint:
    """Peak and change that the allocator reports while ``block`` runs."""
    function = compile_block(block)
    values = inputs_of(step, block)
    copies = [x.clone() for x in values]
    function(list(copies))  # warm
    with AllocationLog() as log:
        # Inputs allocated under the log, or their release would not be seen.
        arguments = own_storages(values, block)
        held = list(arguments) if kept_inputs else None
        log.mark("block")
        results = function(arguments)
    now = peak = 0
    for mark, change in log.events:
        if mark == "block":
            now += change
            peak = max(peak, now)
    del held, results
    return Footprint(peak, now)


def own_storages(values: list[torch.Tensor], block) -> list[torch.Tensor]:
    """Copies that share storages as the originals do."""
    bases: dict[int, torch.Tensor] = {}
    made = []
    for node, value in zip(block.inputs, values, strict=True):
        key = node.meta["val"].untyped_storage()._cdata
        if key not in bases:
            count = node.meta["val"].untyped_storage().nbytes() // value.element_size()
            bases[key] = torch.zeros(count, dtype=value.dtype)
        base = bases[key]
        if base.dtype != value.dtype:
            base = base.view(torch.uint8).view(value.dtype)
        traced = node.meta["val"]
        made.append(base.as_strided(traced.shape, traced.stride(), traced.storage_offset()))
    return made


def inputs_of(step, block) -> list[torch.Tensor]:
    real = dict(zip(step.joint.primals, step.primals, strict=True))
    values = Synthesizer(step.joint, real).of(block.inputs)
    return [values[n] for n in block.inputs]


@pytest.mark.parametrize("name", ["lora", "wavenet", "unet", "outputs"])
@pytest.mark.parametrize("kept_inputs", [True, False])
def test_a_block_takes_what_its_steps_say(name: str, kept_inputs: bool):
    step = captured(name)
    line = step.measured.line
    for index in range(1, len(line.stages) - 1):
        for block in stage_blocks(line, step.blocks, index):
            if not block.nodes:
                continue
            kept = block.reads if kept_inputs else NOTHING
            predicted = run(step.footprints.requests(block, kept=kept))
            with torch.no_grad():
                assert allocated(step, block, kept_inputs) == predicted, (index, block.mode)


def a_norm() -> tuple[StorageTable, Node, list[Node]]:
    """The storages of a step, a layer norm of it, and what picks its three results."""
    step = captured("gpt")
    norm = next(n for n in step.joint.forward if "native_layer_norm" in str(n.target))
    return step.joint.storages, norm, sorted(norm.users, key=lambda n: n.args[1])


def norm_beside_its_mean() -> tuple[StorageTable, Block, Node]:
    """A layer norm that runs again where its mean is at hand, for its output alone."""
    table, norm, (output, mean, _) = a_norm()
    inputs = (*norm.all_input_nodes, mean)
    block = Block(0, Mode.AGAIN, (norm, output), inputs, (output,), table.of(inputs))
    return table, block, mean


def test_a_second_copy_of_a_given_value_counts_as_workspace():
    """An operation with several results, one of which is at hand, makes that one again."""
    table, block, mean = norm_beside_its_mean()
    (made,) = steps_of(block, table, lambda _node, _block: 7)
    assert made.workspace_bytes == 7 + table.total(table.of([mean]))
    assert table.of([mean]).isdisjoint(made.allocates)


def test_results_are_asked_for_in_the_order_that_was_seen():
    table, norm, picked = a_norm()
    inputs, outputs = tuple(norm.all_input_nodes), tuple(picked)
    block = Block(0, Mode.FIRST, (norm, *outputs), inputs, outputs, table.of(inputs))
    asked = ((2, 0), (-1, 7), (0, 0), (-1, -7), (1, 0))
    made = steps_of(block, table, lambda _node, _block: 9, lambda _node, _block: asked)
    results = table.of_node[norm]
    first, second, third = ((s, table.nbytes[s]) for s in results)
    kept = table.of(inputs)
    plain = requests_of(made, table, kept=kept)
    assert plain == (first, second, third, (-1, 9), (-1, -9))
    in_pieces = requests_of(made, table, kept=kept, in_pieces=True)
    assert in_pieces == (third, (-1, 7), first, (-1, -7), second)


def test_a_second_copy_is_given_back_after_all_pieces():
    table, block, mean = norm_beside_its_mean()
    asked = ((1, 0), (0, 0), (-1, 7), (-1, -7), (2, 0))
    made = steps_of(block, table, lambda _node, _block: 7, lambda _node, _block: asked)
    found = requests_of(made, table, kept=block.reads, in_pieces=True)
    (mean_storage,) = table.of([mean])
    (unused, nbytes), *others = found
    assert nbytes == table.nbytes[mean_storage]
    assert found.count((unused, -nbytes)) == 1
    assert mean_storage not in [key for key, _ in found]
    assert found.index((unused, -nbytes)) > found.index((-1, -7))
    assert sum(n for key, n in others if key in (unused, -1)) == -nbytes


def test_a_repeated_norm_makes_no_statistics():
    step = captured("resnet50")
    table = step.joint.storages
    norm = next(n for n in step.joint.forward if updates_statistics(n))
    output = next(n for n in norm.users if n.args[1] == 0)
    sizes = []
    for mode in (Mode.FIRST, Mode.AGAIN):
        inputs = dependencies(norm, mode)
        block = Block(0, mode, (norm, output), inputs, (output,), table.of(inputs))
        (made,) = steps_of(block, table, lambda _node, _block: 0)
        sizes.append([table.nbytes[s] for s in made.allocates])
    channels = norm.args[1].meta["val"].numel()
    assert sizes[0] == [*sizes[1], 4 * channels, 4 * channels]
    assert len(sizes[1]) == 3


def test_results_of_one_operation_are_one_step():
    """Nothing happens to memory while a tuple is picked apart."""
    step = captured("gpt")
    for index in range(len(step.line.stages)):
        for block in stage_blocks(step.line, step.blocks, index):
            operations = [n for n in block.nodes if not is_getitem(n)]
            assert len(steps_of(block, step.joint.storages, lambda *_: 0)) == len(operations)
