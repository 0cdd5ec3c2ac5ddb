"""What the commands do."""

from __future__ import annotations

import argparse
import json
from typing import Any

import torch

from fxremat import api
from fxremat.command import FITS, TOO_LARGE
from fxremat.command.source import Step, refuse, step_of
from fxremat.progress import shown
from fxremat.report.estimate import Estimate
from fxremat.report.plan import Plan


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
    _tell(asked, found)
    return FITS if found.fits else TOO_LARGE


def _tell(asked: argparse.Namespace, found: Estimate) -> None:
    if asked.json:
        _print_json(found.facts())
        return
    found.show()
    if found.batches is not None:
        found.batches.show()


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
        return step_of(asked)


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
    """Those of ``compile``."""
    return {
        "optimizer": asked.optimizer,
        "loss": "own" if step.own_loss else None,
        "drop_unused": asked.drop_unused,
        "accumulate": asked.accumulate,
        "offload": asked.offload,
        "reserve": asked.reserve,
    }
