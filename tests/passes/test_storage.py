"""Storages: views share their base's, sizes are the allocator's."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, fx

from fxremat.errors import GraphError
from fxremat.passes.joint.graph import allocated_bytes, build_storage_table, is_tensor, tensors_of
from fxremat.torch_compat import fake_mode
from tests.harness import captured


def traced(function, *inputs: Tensor) -> tuple[fx.Graph, dict[str, fx.Node]]:
    """A graph of plain calls whose nodes carry fake values."""
    graph = fx.symbolic_trace(function).graph
    mode = fake_mode()
    values: dict[fx.Node, object] = {}
    shells = iter([mode.from_tensor(x) for x in inputs])
    for node in graph.nodes:
        if node.op == "placeholder":
            values[node] = next(shells)
        elif node.op in ("call_function", "call_method"):
            args = fx.map_arg(node.args, values.__getitem__)
            kwargs = fx.map_arg(node.kwargs, values.__getitem__)
            with mode:
                target = node.target if callable(node.target) else getattr(Tensor, node.target)
                values[node] = target(*args, **kwargs)
        if node in values:
            node.meta["val"] = values[node]
    return graph, {node.name: node for node in graph.nodes}


def with_views(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
    transposed = x.t()
    part = transposed[1:]
    fresh = torch.add(part, 1)
    low, high = torch.chunk(fresh, 2, 1)
    return low, high, torch.mul(y, 2)


def test_views_share_their_bases_storage():
    graph, nodes = traced(with_views, torch.zeros(4, 6), torch.zeros(3))
    table = build_storage_table(graph)
    assert table.of_node[nodes["t"]] == table.of_node[nodes["x"]]
    assert table.of_node[nodes["getitem"]] == table.of_node[nodes["x"]]
    assert table.of_node[nodes["add"]] != table.of_node[nodes["x"]]
    chunks = table.of_node[nodes["chunk"]]
    assert chunks == table.of_node[nodes["add"]], "two views of one storage are one storage"
    assert table.of_node[nodes["getitem_2"]] == chunks
    assert table.of_node[nodes["mul"]] not in (chunks, table.of_node[nodes["y"]])
    assert table.of_node[nodes["output"]] == ()


def test_a_storage_is_as_large_as_its_base():
    graph, nodes = traced(with_views, torch.zeros(4, 6), torch.zeros(3))
    table = build_storage_table(graph)
    assert table.total(table.of([nodes["x"]])) == 4 * 6 * 4
    assert table.total(table.of([nodes["getitem"]])) == 4 * 6 * 4, "a part holds the whole"
    assert table.total(table.of([nodes["add"]])) == 5 * 4 * 4
    assert table.total(table.of([nodes["mul"]])) == 12


def test_shared_storages_are_counted_once():
    graph, nodes = traced(with_views, torch.zeros(4, 6), torch.zeros(3))
    table = build_storage_table(graph)
    both = table.of([nodes["x"], nodes["t"], nodes["getitem"], nodes["y"]])
    assert table.total(both) == 4 * 6 * 4 + 3 * 4
    assert table.total([0, 0, 1]) == table.nbytes[0] + table.nbytes[1]


def test_the_owner_is_the_first_node_in_a_storage():
    graph, nodes = traced(with_views, torch.zeros(4, 6), torch.zeros(3))
    table = build_storage_table(graph)
    assert table.owner[table.of_node[nodes["getitem"]][0]] is nodes["x"]
    assert table.owner[table.of_node[nodes["getitem_2"]][0]] is nodes["add"]
    assert len(table.owner) == len(table.nbytes)


def test_an_expanded_tensor_takes_what_it_holds():
    graph, nodes = traced(lambda x: torch.add(x, 1).expand(50, 3), torch.zeros(3))
    table = build_storage_table(graph)
    assert table.total(table.of([nodes["expand"]])) == 12


def test_empty_tensors_take_nothing():
    graph, nodes = traced(lambda x: torch.add(x, 1), torch.zeros(0, 5))
    assert build_storage_table(graph).total(build_storage_table(graph).of([nodes["add"]])) == 0


def test_numbers_and_none_lie_nowhere():
    graph, nodes = traced(lambda x: torch.add(x, 1), torch.zeros(2))
    nodes["add"].meta["val"] = (3, None, nodes["x"].meta["val"])
    assert not is_tensor(nodes["add"])
    assert is_tensor(nodes["x"])
    assert list(tensors_of(nodes["add"])) == [nodes["x"].meta["val"]]
    table = build_storage_table(graph)
    assert table.of_node[nodes["add"]] == table.of_node[nodes["x"]]


def test_a_node_without_a_value_is_named():
    graph, nodes = traced(lambda x: torch.add(x, 1), torch.zeros(2))
    del nodes["add"].meta["val"]
    with pytest.raises(GraphError, match=r"node add .*carries no traced value"):
        build_storage_table(graph)


@pytest.mark.parametrize(
    ("nbytes", "device", "expected"),
    [(0, "cuda", 0), (1, "cuda", 512), (512, "cuda", 512), (513, "cuda", 1024), (13, "cpu", 13)],
)
def test_cuda_rounds_up_and_the_cpu_does_not(nbytes: int, device: str, expected: int):
    assert allocated_bytes(nbytes, torch.device(device)) == expected


def test_aliases_of_a_real_step():
    joint = captured("outputs").joint
    table = joint.storages
    for node in joint.module.graph.nodes:
        for tensor in tensors_of(node):
            sizes = [table.nbytes[i] for i in table.of_node[node]]
            assert tensor.untyped_storage().nbytes() in sizes
    transposes = [n for n in joint.forward if str(n.target) == "aten.t.default"]
    assert transposes
    for node in transposes:
        assert table.of_node[node] == table.of_node[node.args[0]]


@pytest.mark.parametrize("name", ["gpt", "resnet50", "lora"])
def test_a_step_knows_who_reads_a_storage_and_what_is_saved(name: str):
    joint = captured(name).joint
    table = joint.storages
    for storage, readers in enumerate(table.readers):
        reading = [
            node
            for node in (*joint.forward, *joint.backward)
            if any(storage in table.of_node[source] for source in node.all_input_nodes)
        ]
        assert sorted(readers) == sorted(reading)
        saved = table.owner[storage] in joint.forward and not set(readers).isdisjoint(
            joint.backward
        )
        assert (storage in joint.saved) == saved
