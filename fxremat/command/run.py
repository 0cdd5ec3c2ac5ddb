"""What the commands do, and the model and the sample that they name."""

from __future__ import annotations

import argparse
import importlib
import inspect
import json
import os
import sys
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from fxremat import api
from fxremat.capture.sample import Sample, call_without_data
from fxremat.command import FITS, LIBRARY, TOO_LARGE
from fxremat.errors import refuse
from fxremat.options.loss import returned_loss
from fxremat.options.plain import gathered
from fxremat.options.table import fields_of
from fxremat.progress import shown
from fxremat.report.plan import Plan

_SHORT = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32", "fp64": "float64"}
"""Dtypes as others write them."""


def estimate(asked: argparse.Namespace) -> int:
    """``fxremat estimate``; its exit code."""
    with torch.device("meta"):  # nothing is allocated
        step = _loaded(asked)
    found = api.estimate(
        step.model,
        step.sample,
        device=asked.device,
        budget=asked.budget,
        dim=0 if asked.max_batch else None,
        costs=asked.costs,
        **_options(asked, step),
    )
    if asked.html is not None:
        (found.plan or found.kept).save_html(asked.html)
    if asked.json:
        _print_json(found.facts())
    else:
        found.show()
        if found.batches is not None:
            found.batches.show()
    return FITS if found.fits else TOO_LARGE


def plan(asked: argparse.Namespace) -> int:
    """``fxremat plan``; its exit code."""
    with _here(asked.device):
        step = _loaded(asked)
    found = api.plan(step.model, step.sample, asked.budget, **_options(asked, step))
    if asked.save is not None:
        found.save(asked.save)
    _print_plan(asked, found)
    return FITS


def report(asked: argparse.Namespace) -> int:
    """``fxremat report``; its exit code."""
    _print_plan(asked, Plan.load(asked.source))
    return FITS


def _loaded(asked: argparse.Namespace) -> Step:
    """The model and its sample; libraries that they need may take long to load."""
    with shown() as progress:
        progress("load")
        return _step_of(asked)


def _here(written: str) -> torch.device:
    """A device of this machine."""
    try:
        device = torch.device(written)
    except RuntimeError:
        device = torch.device("meta")
    if device.type != "cpu" and not (device.type == "cuda" and torch.cuda.is_available()):
        must_be = "cpu or cuda, and here, as a plan is measured: fxremat estimate takes others"
        refuse("--device", written, must_be)
    return device


def _print_plan(asked: argparse.Namespace, plan: Plan) -> None:
    if asked.html is not None:
        plan.save_html(asked.html)
    if not asked.json:
        plan.explain()
        return
    names = (
        "budget_bytes",
        "least_budget_bytes",
        "predicted_peak_bytes",
        "predicted_reserved_bytes",
        "predicted_s",
        "baseline_peak_bytes",
        "baseline_s",
        "lower_bound_s",
        "host_bytes",
    )
    frontier = [[p.peak_bytes, p.predicted_s] for p in plan.frontier.points]
    _print_json({**{name: getattr(plan, name) for name in names}, "frontier": frontier})


def _print_json(facts: dict[str, Any]) -> None:
    print(json.dumps(facts, indent=1))


def _options(asked: argparse.Namespace, step: Step) -> dict[str, Any]:
    """Return the options of ``compile`` that a command line gives."""
    fields = (field for field in fields_of(asked.command) if field.flag)
    given = {field.name: getattr(asked, field.name) for field in fields}
    given["loss"] = "own" if step.own_loss else None
    return gathered({name: value for name, value in given.items() if value is not None})


@dataclass(frozen=True, slots=True)
class Step:
    """A training step.

    Attributes:
        model, sample: of it.
        own_loss: its loss is one that the model returns.
    """

    model: nn.Module
    sample: object
    own_loss: bool


def _step_of(asked: argparse.Namespace) -> Step:
    """The step that a command line names. What the model's own code raises is not caught.

    Raises:
        ArgumentError: the command line names none.
    """
    module, _, name = asked.source.partition(":")
    if not (module and name):
        refuse("the source", asked.source, f"MODULE:FUNCTION or {LIBRARY}:CLASS")
    if os.curdir not in sys.path:
        sys.path.insert(0, os.curdir)  # as python -m does
    try:
        found = getattr(importlib.import_module(module), name)
    except ModuleNotFoundError as error:
        if not f"{module}.".startswith(f"{error.name}."):
            raise  # one that the module itself needs
        refuse("the source", asked.source, f"a module that can be imported: {error}")
    except AttributeError as error:
        if module in sys.modules and not hasattr(sys.modules[module], name):
            refuse("the source", asked.source, f"a function or class of {module}: {error}")
        raise
    if module == LIBRARY:
        return _step(asked, *_of_library(found, asked))
    made = found()
    if not (isinstance(made, tuple) and len(made) == 2):
        refuse("the source", asked.source, f"one that returns a pair, not a {type(made).__name__}")
    return _step(asked, *made)


def _step(asked: argparse.Namespace, model: nn.Module, sample: object) -> Step:
    """The step, with the loss that the model returns unless another is asked for."""
    own = asked.loss == "own"
    if asked.loss is None and isinstance(model, nn.Module):
        own = returned_loss(call_without_data(model, Sample.of(sample))) is not None
    return Step(model, sample, own)


def _of_library(cls: Any, asked: argparse.Namespace) -> tuple[nn.Module, dict[str, Any]]:
    """A model of Transformers, and a batch of what it takes."""
    if asked.batch is None:
        refuse("--batch", None, f"given for {asked.source}, as 4x2048")
    try:
        shape = tuple(int(part) for part in asked.batch.lower().split("x"))
    except ValueError:
        refuse("--batch", asked.batch, "sizes, as in 4x2048")
    dtype = getattr(torch, _SHORT.get(asked.dtype.lower(), asked.dtype), None)
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        refuse("--dtype", asked.dtype, "one as float32 or bfloat16, or as bf16")
    try:
        written = json.loads(asked.config.read_text()) if asked.config else {}
        config = cls.config_class.from_dict(written)
        config.use_cache = False  # of no use in training
        model: nn.Module = cls(config)
    except (AttributeError, OSError, ValueError, TypeError) as error:
        refuse("--config", asked.config, f"a configuration of {asked.source}: {error}")
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    main = cls.main_input_name
    text = main == "input_ids"
    sample = {main: torch.zeros(shape, dtype=torch.long if text else dtype)}
    if "labels" in inspect.signature(model.forward).parameters:
        sample["labels"] = _labels(model, sample, shape if text else shape[:1])
    return model, sample


def _labels(model: nn.Module, sample: dict[str, Any], shape: tuple[int, ...]) -> torch.Tensor:
    """One for each number of the batch, or, where the model takes no such, for each row of it."""
    labels = torch.zeros(shape, dtype=torch.long)
    try:
        call_without_data(model, Sample((), {**sample, "labels": labels}))
    except Exception:  # whatever the model raises; with the other shape it is not caught
        return labels.new_zeros(shape[:1])
    return labels
