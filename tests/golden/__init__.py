"""Plans of models on costs that were recorded once: they change in no byte unless that is meant.

``costs/MODEL.json`` is what was measured of a model when it was recorded; ``plans/CASE.txt`` is
what comes of it: figures, the schedule, the code that runs, and a digest of the whole plan as it
is saved. ``python -m tests.golden --write`` writes the plans anew; costs that are missing are
measured. Where only a digest differs, ``--whole FOLDER`` writes all plans into a folder, before
and after, for ``diff``.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxremat
from fxremat.costs.measured.cost import Measured
from fxremat.costs.measured.stages import measure_line
from fxremat.graph import further
from fxremat.graph import graph as graphs
from fxremat.ir import MeasuredLink, RecordedCosts
from fxremat.report.codec import decode, encode
from fxremat.report.plan import Plan
from tests.efforts import ROUNDED_PARTS, WHOLE
from tests.models import ZOO
from tests.models.zoo import seeded

FOLDER = Path(__file__).parent

LINK = MeasuredLink(4e9, 3e9, 5e9, 1.05, shared=False)

TORCH = "2.13.0"
"""The version of torch whose operations were recorded; another version may trace other ones."""

DIGITS = 10
"""Of seconds in plans: the last of them are the machine's."""

MACHINE = ("device", "versions", "settings")
"""Of a plan's origin: what differs by machine."""

Plans = dict[str, Plan]
"""Of one model, by what each is for."""


def _planned(name: str, **options: Any) -> Plans:
    """One plan of a model of the zoo."""
    entry = ZOO[name]
    options.setdefault("loss", None if entry.loss_inside else entry.loss)
    options.setdefault("effort", WHOLE)  # what is in parts by default is measured
    with entry.context():
        plan = fxremat.plan(entry.build(), fxremat.Sample(*entry.sample(0)), **options)
    return {"plan": plan}


class Layer(nn.Module):
    """A residual layer with dropout."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.dropout(self.down(nn.functional.gelu(self.up(self.norm(x)))))


class Broken(nn.Module):
    """Layers, between some of which the graph breaks."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(64) for _ in range(6))

    def forward(self, x: Tensor) -> Tensor:
        for index, layer in enumerate(self.layers):
            if index in (2, 4):
                torch._dynamo.graph_break()
            x = layer(x)
        return x.square().mean()


def _regions() -> Plans:
    """The plans of the regions of a step, chosen together."""
    with seeded(0):
        model, x = Broken(), torch.randn(256, 64)
    call = fxremat.compile(model, x, 0.6, effort=WHOLE)
    for _ in range(4):
        model.zero_grad()
        call(x).backward()
    return {f"region {i}": row.plan for i, row in enumerate(call.plan.regions)}


def _sizes() -> Plans:
    """The plans of a model that is called with several sizes."""
    entry = ZOO["gpt"]
    (ids, targets), _ = entry.sample(0)
    call = fxremat.compile(entry.build(), (ids, targets), 0.6, dynamic=True, effort=WHOLE)
    found = {}
    for batch, length in ((2, 64), (2, 32), (3, 48)):
        own = [torch.cat((t, t))[:batch, :length].contiguous() for t in (ids, targets)]
        call.zero_grad()
        call(*own).backward()
        found[f"{batch} x {length}"] = call.plan
    return found


CASES: dict[str, tuple[str, Callable[[], Plans]]] = {
    "recompute-min": ("gpt", partial(_planned, "gpt", budget="min")),
    "recompute-0.6": ("gpt", partial(_planned, "gpt", budget=0.6)),
    "everything-kept": ("gpt", partial(_planned, "gpt", budget=1.0)),
    "norms-0.7": ("unet", partial(_planned, "unet", budget=0.7)),
    "join-min": ("siamese", partial(_planned, "siamese", budget="min")),
    "join-0.75": ("siamese", partial(_planned, "siamese", budget=0.75)),
    "transfers-0.55": ("gpt", partial(_planned, "gpt", budget=0.55, offload="auto")),
    "transfers-only": ("unet", partial(_planned, "unet", budget="min", offload="only")),
    "regions-0.6": ("regions", _regions),
    "sizes-0.6": ("gpt_sizes", _sizes),
    "parts-min": (
        "gpt_parts",
        partial(_planned, "gpt", budget="min", **ROUNDED_PARTS),
    ),
    "fused-min": ("outputs", partial(_planned, "outputs", budget="min", executor="inductor")),
}
"""The name of the model's costs, and what makes its plans."""


def plans_of(case: str, *, record: bool = False) -> Plans:
    """The plans of a case, on recorded costs.

    Args:
        case: its name.
        record: measure, and keep, costs of which there is no file.
    """
    name, make = CASES[case]
    file = FOLDER / "costs" / f"{name}.json"
    costs: list[RecordedCosts] = []
    recording = record and not file.exists()
    if not recording:
        costs += (decode(RecordedCosts, own) for own in json.loads(file.read_text()))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch._dynamo.reset()
    try:
        with _on(costs, recording=recording):
            found = make()
    finally:
        torch.set_num_threads(threads)
        torch._dynamo.reset()
    if recording:
        lines = (json.dumps(encode(RecordedCosts, own), separators=(",", ":")) for own in costs)
        file.write_text("[" + ",\n".join(lines) + "]\n")
    return found


@contextlib.contextmanager
def _on(costs: list[RecordedCosts], *, recording: bool) -> Iterator[None]:
    """Graphs cost ``costs`` meanwhile, in the order in which they are captured."""
    known = iter(costs)

    def measured(line: Any, blocks: Any, **options: Any) -> Measured:
        if recording:
            costs.append(_short(measure_line(line, blocks, **options).costs))
        own = costs[-1] if recording else next(known)
        return Measured.of(line, own)

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FXREMAT_CACHE", "0")
        patch.setattr(graphs, "measure_line", measured)
        patch.setattr(further, "measure_link", lambda *_args, **_options: LINK)
        yield


def _short(costs: RecordedCosts) -> RecordedCosts:
    """``costs`` with three digits of each second: files stay small."""
    data = _rounded(encode(RecordedCosts, costs), digits=3)
    return decode(RecordedCosts, data)


def _rounded(data: Any, *, digits: int) -> Any:
    """JSON with so many digits of each float."""
    if isinstance(data, float):
        return float(f"{data:.{digits}g}")
    if isinstance(data, dict):
        return {name: _rounded(own, digits=digits) for name, own in data.items()}
    return [_rounded(own, digits=digits) for own in data] if isinstance(data, list) else data


def whole(plan: Plan) -> str:
    """A plan as JSON, without what differs by machine, and without lines of the models' files."""
    data = _rounded(encode(Plan, plan), digits=DIGITS)
    for name in MACHINE:
        del data["origin"][name]
    del data["memory"]["lines"]
    return json.dumps(data, indent=1)


def told(plan: Plan) -> str:
    """What is kept of a plan."""
    figures = {
        "budget": f"{plan.budget_bytes} bytes",
        "least": f"{plan.least_budget_bytes} bytes",
        "peak": f"{plan.predicted_peak_bytes} bytes",
        "everything kept": f"{plan.baseline_peak_bytes} bytes, {plan.baseline_s:.{DIGITS}g} s",
        "host": f"{plan.host_bytes} bytes",
        "seconds": f"{plan.predicted_s:.{DIGITS}g}",
        "units": len(plan.fused),
        "digest": hashlib.sha256(whole(plan).encode()).hexdigest(),
        "schedule": plan.schedule,
    }
    lines = (f"{name}: {value}" for name, value in figures.items())
    return "\n".join((*lines, plan.forward_code.strip(), plan.backward_code.strip()))


def text_of(plans: Plans) -> str:
    """What is kept of the plans of a case; of code that several have alike once."""
    seen: dict[str, str] = {}
    parts = []
    for name, plan in plans.items():
        text = told(plan)
        parts.append(f"== {name}\n" + (f"as {seen[text]}" if text in seen else text))
        seen.setdefault(text, name)
    return "\n\n".join(parts) + "\n"
