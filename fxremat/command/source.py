"""The model and the sample that a command line names, and the options that its flags set."""

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

from fxremat.capture.sample import Sample, call_without_data
from fxremat.command import IMAGES, LIBRARY
from fxremat.errors import refuse
from fxremat.options.loss import returned_loss
from fxremat.options.plain import gathered
from fxremat.options.table import fields_of
from fxremat.progress import shown

_SHORT = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32", "fp64": "float64"}
"""Common short names of dtypes."""


@dataclass(frozen=True, slots=True)
class Step:
    """The training step that a command line names.

    Attributes:
        model: the model.
        sample: the arguments of one call of it.
        own_loss: whether the model returns its loss.
    """

    model: nn.Module
    sample: object
    own_loss: bool


def load(asked: argparse.Namespace) -> Step:
    """Return the training step that the command line names, with progress shown meanwhile."""
    with shown() as progress:
        progress("load")
        return _step_of(asked)


def local_device(written: str) -> torch.device:
    """Return the device that ``--device`` names.

    Raises:
        ArgumentError: this machine does not have the device.
    """
    try:
        device = torch.device(written)
    except RuntimeError:
        device = torch.device("meta")
    if device.type != "cpu" and not (device.type == "cuda" and torch.cuda.is_available()):
        must_be = (
            "a device of this machine, cpu or cuda, since plans are measured (fxremat estimate "
            "accepts others)"
        )
        refuse("--device", written, must_be)
    return device


def print_json(facts: dict[str, Any]) -> None:
    """Print facts as JSON."""
    print(json.dumps(facts, indent=1))


def options_of(asked: argparse.Namespace, step: Step) -> dict[str, Any]:
    """Return the arguments of ``fxremat.compile`` that the flags of a command line set, by name."""
    fields = (field for field in fields_of(asked.command) if field.flag)
    given = {field.name: getattr(asked, field.name) for field in fields}
    given["loss"] = "own" if step.own_loss else None
    return gathered({name: value for name, value in given.items() if value is not None})


def _step_of(asked: argparse.Namespace) -> Step:
    """Return the training step that the command line names.

    Raises:
        ArgumentError: the command line does not name a step.
        Exception: what the code of the model raises.
    """
    module, _, name = asked.source.partition(":")
    if not (module and name):
        must_be = f"MODULE:FUNCTION, {LIBRARY}:CLASS or {IMAGES}:NAME"
        refuse("source", asked.source, must_be)
    if os.curdir not in sys.path:
        sys.path.insert(0, os.curdir)  # as python -m does
    try:
        library = importlib.import_module(module)
        source: Any = None if module == IMAGES else getattr(library, name)
    except ModuleNotFoundError as error:
        if not f"{module}.".startswith(f"{error.name}."):
            raise  # the module itself imports a missing one
        refuse("source", asked.source, f"in a module that can be imported ({error})")
    except AttributeError as error:
        if module in sys.modules and not hasattr(sys.modules[module], name):
            refuse("source", asked.source, f"a function or class of {module} ({error})")
        raise
    if module == IMAGES:
        return _step(asked, *_from_timm(library, name, asked))
    if module == LIBRARY:
        return _step(asked, *_from_transformers(source, asked))
    pair = source()
    if not (isinstance(pair, tuple) and len(pair) == 2):
        must_be = f"a function that returns a pair, not a {type(pair).__name__}"
        refuse("source", asked.source, must_be)
    return _step(asked, *pair)


def _step(asked: argparse.Namespace, model: nn.Module, sample: object) -> Step:
    """Return the step of a model; without ``--loss`` the outputs show if it returns its loss."""
    own = asked.loss == "own"
    if asked.loss is None and isinstance(model, nn.Module):
        own = returned_loss(call_without_data(model, Sample.of(sample))) is not None
    return Step(model, sample, own)


def _from_transformers(cls: Any, asked: argparse.Namespace) -> tuple[nn.Module, dict[str, Any]]:
    """Return a new model of Transformers, and a batch of zeros for its main input and labels.

    Args:
        cls: the class of the model.
        asked: the command line, with ``--config``, ``--batch`` and ``--dtype``.
    """
    shape, dtype = _shape_of(asked), _dtype_of(asked)
    try:
        written = json.loads(asked.config.read_text()) if asked.config else {}
        config = cls.config_class.from_dict(written)
        config.use_cache = False  # of no use in training
        model: nn.Module = cls(config)
    except (AttributeError, OSError, ValueError, TypeError) as error:
        refuse("--config", str(asked.config), f"a configuration of {asked.source} ({error})")
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    main = cls.main_input_name
    text = main == "input_ids"
    sample = {main: torch.zeros(shape, dtype=torch.long if text else dtype)}
    if "labels" in inspect.signature(model.forward).parameters:
        sample["labels"] = _labels(model, sample, shape if text else shape[:1])
    return model, sample


def _labels(model: nn.Module, sample: dict[str, Any], shape: tuple[int, ...]) -> torch.Tensor:
    """Return zeros as labels, of this shape if the model accepts it, else one for each row."""
    labels = torch.zeros(shape, dtype=torch.long)
    try:
        call_without_data(model, Sample((), {**sample, "labels": labels}))
    except Exception:  # with the other shape, what the model raises is not caught
        return labels.new_zeros(shape[:1])
    return labels


def _from_timm(library: Any, name: str, asked: argparse.Namespace) -> tuple[nn.Module, Any]:
    """Return a new model of timm without pretrained weights, and a batch of zeros.

    Args:
        library: the module ``timm``.
        name: the name of the model.
        asked: the command line, with ``--config`` (keywords of ``create_model``), ``--batch`` and
            ``--dtype``.
    """
    shape, dtype = _shape_of(asked), _dtype_of(asked)
    if name not in library.list_models():
        refuse("source", asked.source, "a model that timm.list_models() lists")
    try:
        written = json.loads(asked.config.read_text()) if asked.config else {}
        model: nn.Module = library.create_model(name, pretrained=False, **written)
    except (OSError, ValueError, TypeError) as error:
        refuse("--config", str(asked.config), f"keywords of timm.create_model ({error})")
    return model.to(dtype), torch.zeros(shape, dtype=dtype)


def _shape_of(asked: argparse.Namespace) -> tuple[int, ...]:
    """Return the shape that ``--batch`` names."""
    example = "8x3x224x224" if asked.source.startswith(f"{IMAGES}:") else "4x2048"
    if asked.batch is None:
        refuse("--batch", None, f"given for {asked.source}, such as {example}")
    try:
        return tuple(int(part) for part in asked.batch.lower().split("x"))
    except ValueError:
        refuse("--batch", asked.batch, f"sizes, such as {example}")


def _dtype_of(asked: argparse.Namespace) -> torch.dtype:
    """Return the dtype that ``--dtype`` names."""
    dtype = getattr(torch, _SHORT.get(asked.dtype.lower(), asked.dtype), None)
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        refuse("--dtype", asked.dtype, "a floating-point dtype, such as float32, bfloat16 or bf16")
    return dtype
