"""The commands that estimate a step, plan one, and print a saved plan."""

from __future__ import annotations

import argparse

import torch

from fxremat import api
from fxremat.command import FITS, TOO_LARGE
from fxremat.command.source import load, local_device, options_of, print_json
from fxremat.report.plan import Plan


def estimate(asked: argparse.Namespace) -> int:
    """Run ``fxremat estimate`` and return its exit code."""
    with torch.device("meta"):  # nothing is allocated
        step = load(asked)
    estimated = api.estimate(
        step.model,
        step.sample,
        device=asked.device,
        budget=asked.budget,
        dim=0 if asked.max_batch else None,
        costs=asked.costs,
        **options_of(asked, step),
    )
    if asked.html is not None:
        (estimated.plan or estimated.kept).save_html(asked.html)
    if asked.json:
        print_json(estimated.facts())
    else:
        estimated.show()
        if estimated.batches is not None:
            estimated.batches.show()
    return FITS if estimated.fits else TOO_LARGE


def plan(asked: argparse.Namespace) -> int:
    """Run ``fxremat plan`` and return its exit code."""
    with local_device(asked.device):
        step = load(asked)
    planned = api.plan(step.model, step.sample, asked.budget, **options_of(asked, step))
    if asked.save is not None:
        planned.save(asked.save)
    _print_plan(asked, planned)
    return FITS


def report(asked: argparse.Namespace) -> int:
    """Run ``fxremat report`` and return its exit code."""
    _print_plan(asked, Plan.load(asked.source))
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
    holders = [row.facts() for row in plan.at_peak()] if plan.memory.lives else []
    facts = {name: getattr(plan, name) for name in names}
    print_json({**facts, "frontier": frontier, "at_peak": holders})
