"""The joint forward and backward graph of a step, and which of its tensors share memory."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from fxremat import torch_compat
from fxremat.errors import GraphError
from fxremat.passes.joint.sizes import Sizes, layouts_of
from fxremat.runtime.expected import Expected
from fxremat.runtime.host_parameter import fetch


@dataclass(frozen=True, slots=True)
class StorageTable:
    """The storages of the tensors of a graph; the id of a storage is its index in ``nbytes``.

    Attributes:
        nbytes: bytes of each storage, as the allocator rounds them.
        owner: the operation that allocates each storage: the first node, in graph order, with a
            tensor in it.
        readers: operations that read each storage, including views of it.
        of_node: ids of the storages of what a node returns: several for a tuple, none for numbers
            and ``None``.
        asked_bytes: bytes that each storage is requested with; a number may follow the sizes. A
            storage in host memory has 0.
        granule_bytes: the multiple that the allocator rounds each request up to.
    """

    nbytes: tuple[int, ...]
    owner: tuple[fx.Node, ...]
    of_node: dict[fx.Node, tuple[int, ...]]
    readers: tuple[tuple[fx.Node, ...], ...] = ()
    asked_bytes: tuple[int, ...] = ()
    granule_bytes: tuple[int, ...] = ()

    def total(self, ids: Iterable[int]) -> int:
        """Return the bytes of the distinct storages among ``ids``."""
        return sum(self.nbytes[i] for i in set(ids))

    def of(self, nodes: Iterable[fx.Node]) -> frozenset[int]:
        """Return the ids of the storages that the results of ``nodes`` are in."""
        return frozenset(i for node in nodes for i in self.of_node[node])

    def is_view(self, node: fx.Node) -> bool:
        """Return whether ``node`` allocates nothing: its results share storages that it reads."""
        return self.of(node.all_input_nodes).issuperset(self.of_node[node])


@dataclass(frozen=True, slots=True)
class JointGraph:
    """A training step as a functional graph. Treat it, and its nodes, as immutable.

    Attributes:
        module: owns the graph and its constants (``get_attr``).
        primals: placeholders of the forward: parameters, buffers and inputs.
        tangents: placeholders of the backward: gradients of the outputs.
        constants: ``get_attr`` nodes.
        forward, backward: operations in graph order. The values of an operation with several
            results (``getitem`` nodes) directly follow it.
        forward_outputs: what the forward returns: new values of mutated inputs, then the outputs
            of the model. Each is a node or a plain value, which may be a ``Size``.
        backward_outputs: the gradient of each primal, or ``None``.
        mutated: primals whose new value is among ``forward_outputs``. Their old value does not
            exist any more when the forward has returned.
        storages: the storages of all tensors.
        sizes: the symbols that the graph follows; none where every call has the same sizes.
        device: the device of the step. A single input, such as the state of a generator, may be on
            another one.
        given: nodes whose value exists before the step: primals and constants.
        results, gradients: the nodes among ``forward_outputs`` and ``backward_outputs``.
        saved: storages that the forward allocates and a backward operation reads.
        made_backward: storages that the backward allocates.
        released: storages of tangents that are freed after their last reader: the backward reads
            them, and does not return them.
    """

    module: fx.GraphModule
    primals: tuple[fx.Node, ...]
    tangents: tuple[fx.Node, ...]
    constants: tuple[fx.Node, ...]
    forward: tuple[fx.Node, ...]
    backward: tuple[fx.Node, ...]
    forward_outputs: tuple[object, ...]
    backward_outputs: tuple[object, ...]
    mutated: frozenset[fx.Node]
    storages: StorageTable
    sizes: Sizes = field(default_factory=Sizes)
    device: torch.device = field(init=False)
    given: frozenset[fx.Node] = field(init=False)
    results: tuple[fx.Node, ...] = field(init=False)
    gradients: tuple[fx.Node, ...] = field(init=False)
    saved: frozenset[int] = field(init=False)
    made_backward: frozenset[int] = field(init=False)
    released: frozenset[int] = field(init=False)

    def __post_init__(self) -> None:
        tensors = [t for node in (*self.tangents, *self.primals) for t in tensors_of(node)]
        devices = [t.device for t in tensors] or [torch.device("cpu")]
        device = next((device for device in devices if device.type != "cpu"), devices[0])
        object.__setattr__(self, "device", device)
        results, gradients = (
            tuple(n for n in values if isinstance(n, fx.Node))
            for values in (self.forward_outputs, self.backward_outputs)
        )
        forward, backward, table = {*self.forward}, {*self.backward}, self.storages
        makers = list(enumerate(table.owner))
        read = table.of(n for node in self.backward for n in node.all_input_nodes)
        given = frozenset((*self.primals, *self.constants))
        released = read.intersection(table.of(self.tangents))
        kept = (node for node in (*given, *results, *gradients) if node in table.of_node)
        released -= table.of(kept)
        for name, value in {
            "given": given,
            "results": results,
            "gradients": gradients,
            "saved": read.intersection(i for i, maker in makers if maker in forward),
            "made_backward": frozenset(i for i, maker in makers if maker in backward),
            "released": released if torch_compat.releases_tangents() else frozenset(),
        }.items():
            object.__setattr__(self, name, value)

    def is_old_value(self, node: fx.Node) -> bool:
        """Return whether ``node`` copies a value that may have changed when it is read again.

        That is the value of a primal that the forward mutates, or a gradient that is expected
        because the step before had it. Such a node must not be recomputed.
        """
        copies = torch_compat.is_clone(node) and node.args[0] in self.mutated
        return copies or isinstance(node.target, Expected)


def attribute_of(module: fx.GraphModule, node: fx.Node) -> Any:
    """Return the attribute of ``module`` that its ``get_attr`` node ``node`` reads."""
    return operator.attrgetter(str(node.target))(module)


def is_tensor(node: fx.Node) -> bool:
    """Return whether ``node`` returns a single tensor."""
    return isinstance(node.meta.get("val"), torch.Tensor)


def is_getitem(node: fx.Node) -> bool:
    """Return whether ``node`` picks one result of an operation with several, by ``getitem``."""
    return node.target is operator.getitem


def values_of(node: fx.Node) -> list[fx.Node]:
    """Return the ``getitem`` nodes that pick a result of ``node``, if it has several."""
    return [user for user in node.users if is_getitem(user)]


def operation_of(node: fx.Node) -> fx.Node:
    """Return the operation whose result ``node`` picks or waits for; otherwise ``node`` itself."""
    if torch_compat.is_wait(node):
        return torch_compat.awaited(node)
    return node.all_input_nodes[0] if is_getitem(node) else node


def tensors_of(node: fx.Node) -> Iterator[torch.Tensor]:
    """Yield the dense fake tensors that ``node`` returns, in order.

    Raises:
        GraphError: the node was traced without a value.
    """
    if node.op == "output":
        return
    if "val" not in node.meta:
        raise GraphError(f"node {node.name} ({node.target}) carries no traced value")
    value = node.meta["val"]
    for item in value if isinstance(value, (tuple, list)) else (value,):
        if isinstance(item, torch.Tensor) and item.layout is torch.strided:
            yield item


def runs_once(node: fx.Node) -> bool:
    """Return whether ``node`` must not run a second time.

    It has an ordered effect, or it launches a kernel that may give other bits the next time.
    """
    return not getattr(node.target, "repeatable", True)


def backward_nodes(
    graph: fx.Graph, tangents: Sequence[fx.Node], forward_outputs: Sequence[object]
) -> set[fx.Node]:
    """Return the operations of the backward.

    These depend on a tangent, or were traced while autograd differentiated. One of the latter that
    an output of the forward depends on is of the forward instead.
    """
    for_outputs = {n for n in forward_outputs if isinstance(n, fx.Node)}
    for node in reversed(graph.nodes):
        if node in for_outputs:
            for_outputs.update(node.all_input_nodes)
    backward: set[fx.Node] = set()
    dependent = set(tangents)
    for node in graph.nodes:
        if node.op != "call_function":
            continue
        traced_late = torch_compat.is_backward_node(node) and node not in for_outputs
        if traced_late or dependent.intersection(node.all_input_nodes):
            dependent.add(node)
            backward.add(node)
    return backward


def copy_origin(source: fx.Node, target: fx.Node) -> None:
    """Copy the metadata that says which code and phase of autograd ``source`` is from.

    ``target`` is changed.
    """
    for key in ("seq_nr", "partitioner_tag", "stack_trace", "nn_module_stack"):
        if key in source.meta:
            target.meta[key] = source.meta[key]


def add_call(
    graph: fx.Graph,
    call: tuple[Any, Any, Any],
    values: Mapping[fx.Node, fx.Node],
    name: str | None = None,
) -> fx.Node:
    """Add a ``call_function`` node at the end of ``graph``, and return it.

    Args:
        graph: it is changed.
        call: function, arguments and keywords, which may contain nodes of another graph.
        values: the node of ``graph`` for each of these nodes.
        name: the name of the new node; by default it follows from the function.
    """
    target, args, kwargs = call
    args = fx.node.map_arg(args, values.__getitem__)
    kwargs = fx.node.map_arg(kwargs, values.__getitem__)
    return graph.create_node("call_function", target, args, kwargs, name=name)


def fake_result(call: tuple[Any, Any, Any], mode: Any) -> Any:
    """Return the fake result of a call, computed from the fake values of nodes in its arguments.

    Args:
        call: function, arguments and keywords.
        mode: the fake mode of these values.
    """
    target, args, kwargs = call

    def value_of(node: fx.Node) -> Any:
        return node.meta["val"]

    with mode, torch.no_grad():
        return target(*fx.node.map_arg(args, value_of), **fx.node.map_arg(kwargs, value_of))


def copy_of(graph: fx.Graph) -> fx.Graph:
    """Return a copy of ``graph`` whose nodes have the same names and metadata."""
    made = fx.Graph()
    made.output(made.graph_copy(graph, {}))
    made.output_node().meta = dict(graph.output_node().meta)
    return made


def replace_tensors(graph: fx.Graph, replaced: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Replace each fake tensor ``t`` that a node of ``graph`` returns by ``replaced(t)``."""
    for node in graph.nodes:
        if node.op != "output" and "val" in node.meta:
            node.meta["val"] = pytree.tree_map_only(torch.Tensor, replaced, node.meta["val"])


def allocated_bytes(nbytes: int, device: torch.device) -> int:
    """Return the least bytes that the allocator of ``device`` hands out for a request.

    The CUDA caching allocator rounds requests up to 512 bytes. A cached block may be larger,
    depending on earlier requests (``planner.allocations``).

    Args:
        nbytes: bytes that are requested.
        device: the device whose allocator is meant.
    """
    granule = granule_of(device)
    return -(-nbytes // granule) * granule


def granule_of(device: torch.device) -> int:
    """Return the bytes of which the allocator of ``device`` rounds requests up to a multiple."""
    return 512 if device.type == "cuda" else 1


def build_storage_table(graph: fx.Graph) -> StorageTable:
    """Return the storages of the tensors of ``graph``, with the nodes that own and read each.

    Requires: every node but the output carries the fake value of its trace.
    Ensures: every dense tensor is in exactly one storage; views share that of their base. A storage
        in host memory has no bytes: operations fetch what they read of it.
    """
    in_host = _storages_in_host(graph)
    ids: dict[int, int] = {}
    asked: list[int] = []
    granules: list[int] = []
    owner: list[fx.Node] = []
    of_node: dict[fx.Node, tuple[int, ...]] = {}
    for node in graph.nodes:
        ids_of_node: list[int] = []
        for index, tensor in enumerate(tensors_of(node)):
            key = torch_compat.storage_key(tensor)
            if key not in ids:
                ids[key] = len(asked)
                asked.append(0 if key in in_host else layouts_of(node)[index].storage_bytes)
                granules.append(granule_of(tensor.device))
                owner.append(node)
            ids_of_node.append(ids[key])
        of_node[node] = tuple(dict.fromkeys(ids_of_node))
    readers: list[dict[fx.Node, None]] = [{} for _ in asked]
    for node in graph.nodes:
        if node.op != "output":
            for source in node.all_input_nodes:
                for storage in of_node[source]:
                    readers[storage][node] = None
    sizes = (-(-int(n) // granule) * granule for n, granule in zip(asked, granules, strict=True))
    return StorageTable(
        tuple(sizes),
        tuple(owner),
        of_node,
        tuple(map(tuple, readers)),
        tuple(asked),
        tuple(granules),
    )


def _storages_in_host(graph: fx.Graph) -> frozenset[int]:
    """Return the keys of the storages in host memory: those that ``graph`` fetches from."""
    fetched = (n.args[0] for n in graph.find_nodes(op="call_function", target=fetch))
    return frozenset(
        torch_compat.storage_key(source.meta["val"])
        for source in fetched
        if isinstance(source, fx.Node)
    )
