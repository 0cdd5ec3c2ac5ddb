"""Modules that are captured by themselves get their own forwards back."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from fxremat.compiler.entry import SeparateCapture


def test_forwards_are_others_inside_and_their_own_again_after() -> None:
    plain, assigned = nn.Linear(2, 2), nn.Linear(2, 2)
    own = lambda x: 2 * x
    assigned.forward = own  # type: ignore[method-assign]
    x = torch.ones(1, 2)
    before = plain(x), assigned(x)
    apart = SeparateCapture(nn.ModuleList([plain, assigned]), [plain, assigned])
    with pytest.raises(KeyError), apart, apart:
        assert "forward" in vars(plain)
        assert assigned.forward is not own
        inside = plain(x), assigned(x)
        raise KeyError
    assert "forward" not in vars(plain)
    assert assigned.forward is own
    assert all(map(torch.equal, before, inside))


def test_each_is_captured_by_itself() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    graphs = []

    def backend(graph: torch.fx.GraphModule, _inputs: object) -> torch.fx.GraphModule:
        graphs.append(graph)
        return graph

    layers = [nn.Sequential(nn.Linear(2, 2), nn.ReLU()) for _ in range(2)]
    model = nn.Sequential(*layers)
    torch._dynamo.reset()
    with SeparateCapture(model, layers):
        torch.compile(model, backend=backend)(torch.ones(1, 2))
    torch._dynamo.reset()
    assert len(graphs) >= 2


IMPORTED = """
import torch, torch._dynamo
from torch._dynamo import convert_frame

def functions():
    found = dict(vars(convert_frame))
    for name, own in vars(convert_frame).items():
        if isinstance(own, type):
            found |= {(name, key): value for key, value in vars(own).items()}
    return {name: own for name, own in found.items() if callable(own)}

before = functions()
import fxremat
for name in fxremat.__all__:
    if name not in ("backend", "plan_of"):
        getattr(fxremat, name)
changed = [name for name, own in functions().items() if own is not before[name]]
assert not changed, changed
fxremat.compile(torch.nn.Linear(4, 4), torch.ones(2, 4), 1.0)
assert functions() != before
"""


def test_an_import_leaves_dynamo_as_it_is() -> None:
    root = Path(__file__).parents[2]
    subprocess.run([sys.executable, "-c", IMPORTED], check=True, cwd=root, timeout=300)
