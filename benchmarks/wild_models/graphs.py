"""Networks on graphs, of torch_geometric."""

# ruff: noqa: D102

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.wild_models.registry import Case, square, wild

NODES, EDGES, WIDTH = 2000, 12000, 32


def a_graph() -> tuple[Tensor, Tensor]:
    """Features and edges."""
    return torch.randn(NODES, WIDTH), torch.randint(0, NODES, (2, EDGES))


class Stacked(nn.Module):
    """Layers of one kind, one after the other."""

    def __init__(self, layer: Any, depth: int = 4, **options: Any) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layer(WIDTH, WIDTH, **options) for _ in range(depth))

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        for layer in self.layers:
            x = functional.dropout(functional.relu(layer(x, edges)), 0.2, self.training) + x
        return x


@wild("torch_geometric")
def gcn() -> Case:
    from torch_geometric.nn import GCNConv

    return Case(Stacked(GCNConv), a_graph(), {}, square)


@wild("torch_geometric")
def gcn_unnormalized() -> Case:
    from torch_geometric.nn import GCNConv

    return Case(Stacked(GCNConv, normalize=False), a_graph(), {}, square)


@wild("torch_geometric")
def graph_transformer() -> Case:
    from torch_geometric.nn import TransformerConv

    return Case(Stacked(TransformerConv, heads=2, concat=False), a_graph(), {}, square)


@wild("torch_geometric")
def gcn_loops_within() -> Case:
    """A mask that removes loops: its sum is a size."""
    from torch_geometric.nn import GCNConv
    from torch_geometric.utils import remove_self_loops

    class Cleaned(Stacked):
        def forward(self, x: Tensor, edges: Tensor) -> Tensor:
            return super().forward(x, remove_self_loops(edges)[0])

    return Case(Cleaned(GCNConv), a_graph(), {}, square)


@wild("torch_geometric")
def sage() -> Case:
    from torch_geometric.nn import SAGEConv

    return Case(Stacked(SAGEConv), a_graph(), {}, square)


@wild("torch_geometric")
def gat() -> Case:
    from torch_geometric.nn import GATConv

    return Case(
        Stacked(GATConv, heads=2, concat=False, add_self_loops=False), a_graph(), {}, square
    )


@wild("torch_geometric")
def gat_self_loops() -> Case:
    """Removes self loops, by ``nonzero``."""
    from torch_geometric.nn import GATv2Conv

    return Case(Stacked(GATv2Conv, heads=2, concat=False), a_graph(), {}, square)


@wild("torch_geometric")
def dropped_edges() -> Case:
    from torch_geometric.nn import GCNConv
    from torch_geometric.utils import dropout_edge

    class Dropped(Stacked):
        def forward(self, x: Tensor, edges: Tensor) -> Tensor:
            for layer in self.layers:
                kept, _ = dropout_edge(edges, p=0.2, training=self.training)
                x = functional.relu(layer(x, kept)) + x
            return x

    return Case(Dropped(GCNConv), a_graph(), {}, square)


@wild("torch_geometric")
def topk_pooling() -> Case:
    from torch_geometric.nn import GraphConv, TopKPooling, global_mean_pool

    class Pooled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(GraphConv(WIDTH, WIDTH) for _ in range(3))
            self.pools = nn.ModuleList(TopKPooling(WIDTH, ratio=0.7) for _ in range(3))
            self.head = nn.Linear(WIDTH, 10)

        def forward(self, x: Tensor, edges: Tensor, batch: Tensor) -> Tensor:
            found: Any = 0
            for layer, pool in zip(self.layers, self.pools, strict=True):
                x = functional.relu(layer(x, edges))
                x, edges, _, batch, _, _ = pool(x, edges, None, batch)
                found = found + global_mean_pool(x, batch, size=8)
            return self.head(found)

    x, edges = a_graph()
    batch = torch.arange(NODES) * 8 // NODES
    return Case(Pooled(), (x, edges, batch), {}, square)


@wild("torch_geometric")
def gin_jumping() -> Case:
    from torch_geometric.nn import GIN

    model = GIN(WIDTH, 64, num_layers=4, out_channels=10, dropout=0.2, jk="cat")
    return Case(model, a_graph(), {}, square)


@wild("torch_geometric")
def pna() -> Case:
    from torch_geometric.nn import PNAConv

    options = {
        "aggregators": ["mean", "min", "max", "std"],
        "scalers": ["identity", "amplification"],
        "deg": torch.bincount(torch.randint(0, 12, (NODES,))),
    }
    return Case(Stacked(PNAConv, depth=2, **options), a_graph(), {}, square)


@wild("torch_geometric")
def sag_pooling_unet() -> Case:
    from torch_geometric.nn import GraphUNet

    model = GraphUNet(WIDTH, 32, 10, depth=2, pool_ratios=0.5)
    x, edges = torch.randn(NODES, WIDTH), torch.randint(0, NODES, (2, EDGES // 2))
    return Case(model, (x, edges), {}, square)
