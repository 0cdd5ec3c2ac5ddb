"""The command: what a step would take, a plan of it, and what a saved plan says, from a shell.

Exit codes: 0, it fits; 1, it does not; 2, something that was asked for cannot be read.
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import json
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fxremat import api
from fxremat.errors import BudgetError, FxrematError
from fxremat.report.estimate import Estimate
from fxremat.report.plan import Plan

FITS, TOO_LARGE, WRONG = 0, 1, 2

LIBRARY = "transformers"
"""Of a source ``transformers:CLASS``: its models are made of a configuration."""


class _WrongError(Exception):
    """Something on the command line cannot be used; the message says what, and the remedy."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; its exit code.

    Args:
        arguments: those of the shell if None.
    """
    asked = _parser().parse_args(arguments)
    run: Callable[[argparse.Namespace], int] = asked.run
    try:
        return run(asked)
    except BudgetError as error:
        _complain(error)
        return WRONG if error.least_budget_bytes is None else TOO_LARGE
    except (FxrematError, _WrongError, OSError) as error:
        _complain(error)
        return WRONG


def _complain(error: Exception) -> None:
    sys.stderr.write(f"fxremat: {error}\n")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="fxremat",
        description="Make PyTorch training fit in a stated number of bytes.",
        epilog="Exit codes: 0 fits, 1 does not fit, 2 wrong arguments.",
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    estimate = commands.add_parser(
        "estimate", help="what a training step would take of a device, which need not be here"
    )
    _add_step(estimate)
    estimate.add_argument("--device", default="cpu", help="name, or file of a Device (%(default)s)")
    estimate.add_argument("--budget", help="such as 60GiB, 0.5 of the peak, or min")
    estimate.add_argument(
        "--max-batch", action="store_true", help="the largest batch that fits the budget, too"
    )
    estimate.add_argument("--costs", metavar="PLAN", help="a plan whose measurements are used")
    estimate.set_defaults(run=_estimate)
    plan = commands.add_parser("plan", help="plan a training step on this machine")
    _add_step(plan)
    plan.add_argument("--on", default="cpu", metavar="DEVICE", help="cpu or cuda (%(default)s)")
    plan.add_argument("--budget", required=True, help="such as 60GiB, 0.5 of the peak, or min")
    plan.add_argument("--save", type=Path, metavar="FILE", help="for compile(plan=FILE)")
    plan.set_defaults(run=_plan)
    report = commands.add_parser("report", help="what a plan says that was saved")
    report.add_argument("plan", type=Path, help="a file that Plan.save wrote")
    _add_output(report)
    report.set_defaults(run=_report)
    return parser


def _add_step(parser: argparse.ArgumentParser) -> None:
    """Arguments that name a step."""
    parser.add_argument(
        "source",
        help=f"MODULE:FUNCTION, which returns (model, sample), or {LIBRARY}:CLASS with --batch",
    )
    group = parser.add_argument_group(f"a model of {LIBRARY}")
    group.add_argument("--config", type=Path, metavar="JSON", help="its configuration")
    group.add_argument("--batch", metavar="4x2048", help="shape of its main input")
    group.add_argument("--dtype", default="float32", help="of its parameters (%(default)s)")
    options = parser.add_argument_group("the step")
    options.add_argument("--optimizer", help="class of torch.optim whose state counts")
    options.add_argument("--accumulate", action="store_true", help="gradients are accumulated")
    options.add_argument("--offload", choices=("auto", "only", "conv"), default=False)
    options.add_argument("--reserve", default="0", help="bytes of the budget to leave alone")
    _add_output(parser)


def _add_output(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--html", type=Path, metavar="FILE", help="write the plan as a page")


def _estimate(asked: argparse.Namespace) -> int:
    with torch.device("meta"):  # nothing is allocated
        model, sample = _step(asked)
    found = api.estimate(
        model,
        sample,
        device=asked.device,
        budget=None if asked.budget is None else _budget(asked.budget),
        dim=0 if asked.max_batch else None,
        costs=asked.costs,
        **_options(asked),
    )
    if asked.html is not None:
        (found.plan or found.kept).save_html(asked.html)
    _tell(asked, found)
    return FITS if found.fits else TOO_LARGE


def _tell(asked: argparse.Namespace, found: Estimate) -> None:
    if asked.json:
        _print_json(found.facts())
        return
    found.show()
    if found.batches is not None:
        found.batches.show()


def _plan(asked: argparse.Namespace) -> int:
    with torch.device(asked.on):
        model, sample = _step(asked)
    found = api.plan(model, sample, _budget(asked.budget), **_options(asked))
    if asked.save is not None:
        found.save(asked.save)
    _print_plan(asked, found)
    return FITS


def _report(asked: argparse.Namespace) -> int:
    _print_plan(asked, Plan.load(asked.plan))
    return FITS


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


def _budget(written: str) -> str | float:
    """Text as it is; a number with a point is a share."""
    try:
        return float(written) if "." in written else written
    except ValueError:
        return written


def _options(asked: argparse.Namespace) -> dict[str, Any]:
    """Those of ``compile``."""
    optimizer = None
    if asked.optimizer is not None:
        optimizer = getattr(torch.optim, asked.optimizer, None)
        if optimizer is None:
            raise _WrongError(f"torch.optim has no {asked.optimizer}: give one of its classes")
    return {
        "optimizer": optimizer,
        "accumulate": asked.accumulate,
        "offload": asked.offload,
        "reserve": asked.reserve,
    }


def _step(asked: argparse.Namespace) -> tuple[nn.Module, object]:
    """The model, and a sample of its arguments."""
    module, colon, name = asked.source.partition(":")
    if not (module and colon and name):
        raise _WrongError(
            f"the source is {asked.source!r}: must be MODULE:FUNCTION or {LIBRARY}:CLASS"
        )
    if os.curdir not in sys.path:
        sys.path.insert(0, os.curdir)  # as python -m does
    try:
        found = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise _WrongError(f"{asked.source} cannot be imported: {error}") from error
    if module == LIBRARY:
        return _of_library(found, asked)
    made = found()
    if not (isinstance(made, tuple) and len(made) == 2):
        raise _WrongError(f"{asked.source} returned a {type(made).__name__}: must be a pair")
    return made


def _of_library(cls: Any, asked: argparse.Namespace) -> tuple[nn.Module, object]:
    """A model of Transformers, and a batch of what it takes."""
    if asked.batch is None:
        raise _WrongError(f"{asked.source} needs --batch, such as 4x2048")
    try:
        shape = tuple(int(part) for part in asked.batch.lower().split("x"))
    except ValueError as error:
        raise _WrongError(f"--batch is {asked.batch!r}: must be sizes as in 4x2048") from error
    dtype = getattr(torch, asked.dtype, None)
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise _WrongError(f"--dtype is {asked.dtype!r}: must be one as float32 or bfloat16")
    try:
        written = json.loads(asked.config.read_text()) if asked.config else {}
        config = cls.config_class.from_dict(written)
        config.use_cache = False  # of no use in training
        model: nn.Module = cls(config)
    except (AttributeError, ValueError, TypeError) as error:
        raise _WrongError(f"{asked.source} cannot be made of its configuration: {error}") from error
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    main = cls.main_input_name
    text = main == "input_ids"
    sample = {main: torch.zeros(shape, dtype=torch.long if text else dtype)}
    if "labels" in inspect.signature(model.forward).parameters:
        sample["labels"] = torch.zeros(shape if text else shape[:1], dtype=torch.long)
    return model, sample
