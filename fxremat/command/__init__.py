"""The ``fxremat`` command: estimates, plans and diagnoses a step, and explains errors.

This module does not import torch, which takes seconds to load, so that help appears at once.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import logging
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import fxremat
from fxremat.errors import ArgumentError, BudgetError, FxrematError, PlanError
from fxremat.options.table import BUDGET, Field, fields_of
from fxremat.progress import on_terminal, wanted

FITS, TOO_LARGE, WRONG, FAILED = range(4)

LIBRARY = "transformers"
"""The module in a source ``transformers:CLASS``, whose models are made from a configuration."""

IMAGES = "timm"
"""The module in a source ``timm:NAME``, whose models are made by name."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code.

    Args:
        arguments: arguments of the command line, by default those of this process.

    Returns:
        0 if the step fits, 1 if it does not, 2 for wrong arguments, 3 if the model failed.
    """
    asked = _parser().parse_args(arguments)
    try:
        run: Callable[[argparse.Namespace], int]
        run = getattr(importlib.import_module(asked.module), asked.command)
        with _logged():
            return run(asked)
    except BudgetError as error:
        return _report_error(asked, error, WRONG if error.least_budget_bytes is None else TOO_LARGE)
    except (ArgumentError, PlanError) as error:
        return _report_error(asked, error, WRONG)
    except Exception as error:
        return _report_error(asked, error, FAILED)


@contextlib.contextmanager
def _logged() -> Iterator[None]:
    """Return a context that prints the package's log if no progress bar is shown."""
    if on_terminal() or not wanted():
        yield
        return
    logger, handler = logging.getLogger("fxremat"), logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(name)s: %(message)s"))
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)


def _report_error(asked: argparse.Namespace, error: Exception, code: int) -> int:
    """Print an error on standard error, and return ``code``, the exit code of the command."""
    if asked.traceback:
        traceback.print_exception(error)
    message = str(error)
    if code == FAILED:
        message = " ".join(message.split())
        if not isinstance(error, FxrematError):
            what = getattr(asked, "source", asked.command)
            message = f"{what} failed: {type(error).__name__}: {message}"
        if not asked.traceback:
            message += " (--traceback prints where)"
    sys.stderr.write(f"fxremat: {message}\n")
    return code


class _Version(argparse.Action):
    """The action of ``--version``: prints the version and exits."""

    def __call__(self, parser: argparse.ArgumentParser, *_given: Any) -> None:
        print(f"fxremat {fxremat.__version__}")
        parser.exit(FITS)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="fxremat",
        description="Make PyTorch training fit in a stated number of bytes.",
        epilog="Exit codes: 0 fits, 1 does not fit, 2 wrong arguments, 3 the model failed. For "
        "arguments, and for exit codes of doctor and env: fxremat COMMAND --help.",
    )
    parser.add_argument("--version", action=_Version, nargs=0, help="print the version and exit")
    parser.set_defaults(module="fxremat.command.run")
    commands = parser.add_subparsers(required=True, metavar="COMMAND", dest="command")
    estimate = commands.add_parser(
        "estimate", help="estimate a training step on any device, present or not"
    )
    _add_step(estimate, "estimate")
    estimate.add_argument(
        "--device",
        default="cpu",
        help="name of a device, such as H100, or file of a Device (%(default)s)",
    )
    estimate.add_argument("--budget", help=_help(BUDGET.doc))
    estimate.add_argument(
        "--max-batch", action="store_true", help="also find the largest batch that fits the budget"
    )
    estimate.add_argument("--costs", metavar="PLAN", help="file of a plan with measurements to use")
    plan = commands.add_parser("plan", help="plan a training step on this machine")
    _add_step(plan, "plan")
    plan.add_argument("--device", default="cpu", help="cpu or cuda (%(default)s)")
    plan.add_argument("--budget", required=True, help=_help(BUDGET.doc))
    plan.add_argument("--save", type=Path, metavar="FILE", help="save for compile(plan=FILE)")
    report = commands.add_parser("report", help="print a saved plan")
    report.add_argument("source", metavar="PLAN", help="file that Plan.save wrote")
    _add_output(report)
    explain = commands.add_parser("explain", help="explain the code of an error or warning")
    explain.add_argument("source", metavar="CODE", help="the code, such as FXR002")
    _add_json(explain)
    explain.set_defaults(module="fxremat.command.explain")
    _add_doctor(commands.add_parser("doctor", help="say what is planned of a model, and why"))
    _add_env(commands.add_parser("env", help="print versions and devices, for a bug report"))
    return parser


def _add_doctor(doctor: argparse.ArgumentParser) -> None:
    doctor.set_defaults(module="fxremat.command.doctor")
    doctor.description = (
        "Capture a model on this machine, and print what is planned, what runs as it is and why, "
        "the least budget, what the first step takes, and recommendations. The step is planned "
        "for several budgets. A model in several graphs is trained for some steps on the sample; "
        "its parameters and buffers are not changed."
    )
    doctor.epilog = (
        "Exit codes: 0 all is planned, or runs as it is at a cost that is printed; 1 something "
        "prevents planning; 2 wrong arguments; 3 the model failed."
    )
    _add_step(doctor, "doctor", has_plan=False)
    doctor.add_argument("--device", default="cpu", help="cpu or cuda (%(default)s)")


def _add_env(env: argparse.ArgumentParser) -> None:
    env.set_defaults(module="fxremat.command.env")
    env.description = "Print versions, devices, compilers and caches, as an issue needs them."
    env.epilog = "Exit codes: 0 compile has what it needs, 1 something is missing."
    _add_json(env)


def _add_step(parser: argparse.ArgumentParser, command: str, *, has_plan: bool = True) -> None:
    """Add the arguments of a command that name a training step, its options and its output."""
    parser.add_argument(
        "source",
        help=f"MODULE:FUNCTION that returns (model, sample), or {LIBRARY}:CLASS or {IMAGES}:NAME "
        "with --batch",
    )
    group = parser.add_argument_group(f"a model of {LIBRARY} or {IMAGES}")
    group.add_argument("--config", type=Path, metavar="JSON", help="file of its configuration")
    group.add_argument("--batch", metavar="SHAPE", help="shape of its main input, such as 4x2048")
    group.add_argument(
        "--dtype",
        default="float32",
        help="dtype of its parameters, such as bfloat16 or bf16 (%(default)s)",
    )
    options = parser.add_argument_group("the step")
    options.add_argument(
        "--loss",
        choices=("own", "outside"),
        help="own: the model returns its loss; outside: the loss is computed from the outputs "
        "(default: own if the model returns one)",
    )
    for field in fields_of(command):
        if field.flag and field.name != "loss":  # of which the command knows more
            _add_flag(options, field)
    if has_plan:
        _add_output(parser)
    else:
        _add_json(parser)


def _add_flag(parser: argparse._ActionsContainer, field: Field) -> None:
    """Add the flag that sets ``field``, a plain value of an option of ``compile``."""
    name, usual = f"--{field.name.replace('_', '-')}", field.default
    if field.kind is bool:
        parser.add_argument(name, action="store_true", help=_help(field.doc))
        return
    kind = field.kind if field.kind in (int, float) else str
    doc = field.doc if usual is None else f"{field.doc} ({usual})"
    choices = field.choices or None
    parser.add_argument(name, type=kind, default=usual, choices=choices, help=_help(doc))


def _help(text: str) -> str:
    """Return ``text`` escaped for argparse, which interprets ``%``."""
    return text.replace("%", "%%")


def _add_output(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--html", type=Path, metavar="FILE", help="write the plan as an HTML page")
    _add_json(parser)


def _add_json(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--traceback", action="store_true", help="print the traceback of an error")
