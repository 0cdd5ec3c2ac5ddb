"""Steps of zoo models, compiled in different ways, ready to be measured."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

import fxremat
from benchmarks.entries import ENTRIES
from fxremat import torch_compat
from fxremat.costs.measured.measure import seconds_of
from tests.models import BENCH, ZOO
from tests.models.reference import compile_reference
from tests.models.zoo import Args, Kwargs, ZooModel, drawn_once


@dataclass(frozen=True, slots=True)
class Step:
    """A model and its training step (gradients dropped before each)."""

    model: torch.nn.Module
    run: Callable[[], None]

    def seconds(self) -> float:
        """Of one run."""
        return seconds_of(self.run, device=torch.device("cpu"))

    def peak_bytes(self) -> int:
        """Of one run, with what is resident."""
        self.model.zero_grad(set_to_none=True)
        return fxremat.measure_step(self.model, self.run).peak_bytes


def entry_of(name: str) -> ZooModel:
    """A model by name: of benchmarks alone, a benchmark configuration, of the zoo, or of another
    library.

    Raises:
        ImportError: the library is not installed.
    """
    known = {**ZOO, **BENCH, **ENTRIES}
    return known[name] if name in known else _of_library(name)


def _of_library(name: str) -> ZooModel:
    """What ``benchmarks/wild.py`` trains."""
    from benchmarks.wild_models import WILD, prepare

    prepare()
    make = drawn_once(WILD[name].make)

    def sample(_seed: int) -> tuple[Args, Kwargs]:
        case = make()
        return case.args, case.kwargs

    return ZooModel(name=name, build=lambda: make().model, sample=sample, loss=make().loss)


def make_step(entry: ZooModel, model: torch.nn.Module, call: Callable[..., Any]) -> Step:
    """A step of ``call``, which is ``model`` compiled."""
    args, kwargs = entry.sample(0)

    def run() -> None:
        model.zero_grad(set_to_none=True)
        with entry.context("cpu"):
            loss = entry.loss(call(*args, **kwargs))
        loss.backward()

    return Step(model, run)


def reference(entry: ZooModel) -> Step:
    """Through ``aot_eager``: nothing recomputed on purpose, nothing planned."""
    model = entry.build()
    return make_step(entry, model, compile_reference(entry, model))


def fused(entry: ZooModel) -> Step:
    """Through ``torch.compile`` as it is: Inductor's kernels, nothing planned."""
    model = entry.build()
    own = torch_compat.with_code_of_its_own(model)  # copies would share what was compiled first
    return make_step(entry, model, torch.compile(own, fullgraph=True))


def planned(entry: ZooModel, budget: Any, **options: Any) -> tuple[Step, fxremat.CompiledModule]:
    """Through fxremat, within ``budget``.

    The step drops outputs beside its loss at once, and fxremat is told so.
    """
    options.setdefault("assume", "strict")  # single steps are measured
    model = entry.build()
    args, kwargs = entry.sample(0)
    with entry.context("cpu"):
        compiled = fxremat.compile(
            model,
            fxremat.Sample(args, kwargs),
            budget,
            loss=fxremat.Loss(entry.loss, drop_unused=True),
            **options,
        )
    return make_step(entry, model, compiled), compiled


def static_bytes(model: torch.nn.Module) -> int:
    """Parameters, buffers and one set of parameter gradients."""
    parameters = list(model.parameters())
    gradients = sum(p.nbytes for p in parameters if p.requires_grad)
    return sum(t.nbytes for t in (*parameters, *model.buffers())) + gradients
