"""``fxremat doctor``: what can be planned of a model on this machine, and what that takes."""

from __future__ import annotations

import argparse
import contextlib
import itertools
import os
import re
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fxremat.cache.folder import VARIABLE, Store
from fxremat.capture.sample import Sample, call_without_data, check_sample
from fxremat.command.env import home_shortened
from fxremat.command.opaque import opaque_in, operations_of, shortened
from fxremat.command.points import kept_point, least_point
from fxremat.command.source import Step, load, local_device, options_of, print_json
from fxremat.command.trial import Trial, try_budget, unchanged
from fxremat.effort import Effort
from fxremat.errors import (
    BudgetError,
    CaptureError,
    CostError,
    GraphError,
    NoGradientError,
)
from fxremat.loop.optimizer_state import optimizer_bytes
from fxremat.options.arguments import read_model
from fxremat.options.loss import returned_loss
from fxremat.progress import LOG
from fxremat.report.diagnosis import Advice, Diagnosis, FirstStep, GraphBreak, Point, Region
from fxremat.report.memory import Kind
from fxremat.report.modules import named
from fxremat.report.plan import Plan, StepPlan
from fxremat.units import format_bytes, format_seconds

PLANNED, PREVENTED = 0, 1
"""Exit codes: all is planned or runs as it is, and something prevents planning."""

PREVENTING = (CaptureError, CostError, GraphError, NoGradientError)
"""Errors which mean that a step cannot be planned, not that the model failed."""

FASTER = 0.98
"""A recommendation of offloading takes at most this share of the time without it."""

_LEAST = re.compile(r"least feasible budget is (\d+) bytes")
"""The least budget of a loop that clears gradients to ``None``, in a :class:`BudgetError`."""

_PLACE = re.compile(r"(?P<file>[^\n]*?):(?P<line>\d+): (?P<reason>.*)", re.S)


def doctor(asked: argparse.Namespace) -> int:
    """Run ``fxremat doctor`` and return its exit code."""
    with local_device(asked.device):
        step = load(asked)
    diagnosis = diagnose(step, options_of(asked, step), asked.optimizer, loss=asked.loss)
    if asked.json:
        print_json(diagnosis.facts())
    else:
        print("\n".join(diagnosis.lines()))
    return PREVENTED if diagnosis.problem else PLANNED


def diagnose(
    step: Step,
    options: Mapping[str, Any],
    optimizer: str | None = None,
    *,
    loss: str | None = None,
) -> Diagnosis:
    """Return what can be planned of a step, and what that takes.

    Args:
        step: the model and the sample.
        options: arguments of :func:`fxremat.compile`, by name.
        optimizer: the name of the optimizer among them.
        loss: whether the model returns its loss, as ``--loss`` says it; ``None``: a call shows it
            where shapes do not.

    Raises:
        FxrematError: the errors of :func:`fxremat.compile`, except those in ``PREVENTING``.
        Exception: what the model itself raises.
    """
    model, call = read_model(step.model), Sample.of(step.sample)
    device = next((t.device for t in model.parameters()), torch.device("cpu"))
    described = tuple(
        (place, f"{str(t.dtype).removeprefix('torch.')}{list(t.shape)}")
        for place, t in call.tensors()
    )
    nothing = Diagnosis(
        model=type(model).__name__,
        arguments=described,
        device=str(device),
        loss="own" if step.own_loss else "unknown",
        optimizer=optimizer,
    )
    given = dict(options)
    try:
        check_sample(model, call)
        if loss is None and not step.own_loss and _returns_loss(model, call):
            given["loss"], nothing = "own", replace(nothing, loss="own")
        with _Examination.in_empty_cache(model, call, given) as examination:
            return examination.completed(nothing)
    except PREVENTING as error:
        return replace(nothing, problem=str(error))


def _returns_loss(model: nn.Module, call: Sample) -> bool:
    """Return whether a model returns its loss, by running it if shapes depend on data."""
    if call_without_data(model, call) is not None:
        return False  # the outputs were looked at
    with unchanged(model, call), torch.no_grad():
        return returned_loss(model(*call.args, **call.kwargs)) is not None


@dataclass
class _Examination:
    """Trials of one model, whose measurements are in an empty cache folder.

    Attributes:
        model: the model.
        call: the arguments of the call.
        options: arguments of :func:`fxremat.compile`, by name.
        folder: the cache folder.
        users: the user's cache folder, or ``None`` if it is disabled or not writable.
        steps: the number of steps that were run so far.
        min_bytes: what the budget ``"min"`` is.
    """

    model: nn.Module
    call: Sample
    options: dict[str, Any]
    folder: Path
    users: str | None
    steps: int = 0
    min_bytes: int = 0

    @staticmethod
    @contextlib.contextmanager
    def in_empty_cache(
        model: nn.Module, call: Sample, options: dict[str, Any]
    ) -> Iterator[_Examination]:
        """Yield an examination in a temporary cache folder, which is deleted afterwards."""
        own, before = Store.of_environment().folder, os.environ.get(VARIABLE)
        nearest = own and next(p for p in (own, *own.parents) if p.exists())
        users = home_shortened(str(own)) if nearest and os.access(nearest, os.W_OK) else None
        with tempfile.TemporaryDirectory(prefix="fxremat-doctor-") as folder:
            os.environ[VARIABLE] = folder
            try:
                yield _Examination(model, call, options, Path(folder), users)
            finally:
                del os.environ[VARIABLE]
                if before is not None:
                    os.environ[VARIABLE] = before

    def try_budget(self, what: str, budget: str | int, **changes: Any) -> Trial:
        """Compile the model within a budget, with some options changed; ``None`` omits one."""
        LOG.info("%s: budget %s", what, budget)
        options = {**self.options, **changes}
        given = {name: value for name, value in options.items() if value is not None}
        trial = try_budget(self.model, self.call, budget, given)
        self.steps += trial.steps
        return trial

    def _entries(self) -> set[str]:
        return {entry.name for entry in self.folder.glob("fxremat-plan-*")}

    def completed(self, nothing: Diagnosis) -> Diagnosis:
        """Return ``nothing`` with what trials show."""
        lowest = self.try_budget("the least budget", "min")
        made = self._entries()
        unplanned, why = lowest.unplanned, lowest.training.regions.warnings.why
        diagnosis = replace(nothing, unplanned=unplanned, why_several=_first_lines(why))
        if lowest.plan is None:
            why_none = "; ".join([*unplanned, lowest.why_none])
            return replace(diagnosis, problem=why_none, steps_run=self.steps)
        self.min_bytes = lowest.plan.least_budget_bytes
        again = self.try_budget("again, from the cache", "min")
        is_cached = bool(made) and self._entries() == made
        first = FirstStep(lowest.seconds, again.seconds, is_cached, self.users)
        if isinstance(lowest.plan, Plan):
            lowest = self._deeper(lowest)
        kept = self._kept(lowest)
        least = least_point(lowest)
        half = self._half(kept, least)
        diagnosis = replace(
            diagnosis,
            regions=_regions_of(lowest),
            breaks=_breaks_of(lowest),
            opaque=opaque_in(graph.joint for graph in lowest.training.graphs),
            kept=kept,
            least=least,
            half=half,
            first_step=first,
        )
        advice = tuple(self._advice(diagnosis, lowest))
        return replace(diagnosis, advice=advice, steps_run=self.steps)

    def _deeper(self, lowest: Trial) -> Trial:
        """Return the trial within the least budget that an error names, if that is lower.

        A budget that nothing fits so far is searched for however long that takes, and ``"min"``
        only as far as the effort allows.
        """
        try:
            return self.try_budget("what no plan fits", 1)
        except BudgetError as error:
            named = _LEAST.search(str(error))
            budgets = [int(named[1])] if named else []
            budgets.append(error.least_budget_bytes or self.min_bytes)
        for nbytes in budgets:
            with contextlib.suppress(BudgetError):
                if nbytes < self.min_bytes:
                    return self.try_budget("the least budget", nbytes)
        return lowest

    def _kept(self, lowest: Trial) -> Point:
        """Return the step with everything kept; nothing is at its peak if it does not run."""
        with contextlib.suppress(torch.OutOfMemoryError):
            trial = self.try_budget("everything kept", "100%", effort=Effort(0.0))
            if trial.plan is not None:
                return kept_point(trial)
        assert lowest.plan is not None
        return Point(lowest.plan.baseline_peak_bytes, lowest.plan.baseline_s)

    def _half(self, kept: Point, least: Point) -> Point | None:
        """Return the step with half of the activations at the peak.

        If no plan takes so few bytes, or the model is captured in several graphs, it is the step
        with half of what a plan can free; ``None`` if that is nothing.
        """
        nbytes = kept.budget_bytes - kept.at_peak.get(Kind.ACTIVATIONS.value, 0) // 2
        if self.steps or not least.budget_bytes <= nbytes < kept.budget_bytes:
            nbytes = (kept.budget_bytes + least.budget_bytes) // 2
        if nbytes >= kept.budget_bytes:
            return None
        try:
            plan = self.try_budget("half of the memory that can be freed", nbytes).plan
        except (BudgetError, torch.OutOfMemoryError):
            return None
        if plan is None:
            return None
        return Point(nbytes, plan.predicted_s, host_bytes=plan.host_bytes)

    def _advice(self, so_far: Diagnosis, lowest: Trial) -> Iterator[Advice]:
        """Yield recommendations, each with an effect that was computed."""
        kept, least, half = so_far.kept, so_far.least, so_far.half
        assert kept is not None and least is not None
        if half is not None:
            freed = kept.budget_bytes - half.budget_bytes
            activations_bytes = kept.at_peak.get(Kind.ACTIVATIONS.value, 0)
            is_half = not self.steps and freed == activations_bytes // 2
            what = "half of the activations" if is_half else "half of what a plan can free"
            yield Advice(
                f"budget={half.budget_bytes}",
                f"{format_bytes(freed)} less than with everything kept ({what}), predicted "
                f"{format_seconds(half.predicted_s)} per step, "
                f"{half.predicted_s / kept.predicted_s:.2f} × the time",
                half.budget_bytes,
                half.predicted_s,
            )
            yield from self._offload(half)
        yield from self._loss(so_far, lowest)
        if so_far.optimizer is None:
            state = optimizer_bytes((torch.optim.AdamW,), self.model)
            nbytes = sum(map(sum, state.values()))
            yield Advice(
                "optimizer=torch.optim.AdamW",
                f"counts the optimizer's state, {format_bytes(nbytes)} of AdamW's, which no figure "
                "above includes",
            )
        own = so_far.first_step
        if own is not None and own.folder is None:
            cold, cached = (sum(s.values()) for s in (own.cold, own.cached))
            yield Advice(
                f"{VARIABLE}=FOLDER",
                f"a second process plans in {format_seconds(cached)} instead of "
                f"{format_seconds(cold)}",
            )

    def _offload(self, half: Point) -> Iterator[Advice]:
        """Recommend to offload activations, where there is a device and it is faster."""
        device = next((t.device.type for t in self.model.parameters()), "cpu")
        if device == "cpu" or self.steps or self.options.get("offload"):
            return
        try:
            plan = self.try_budget("with offload", half.budget_bytes, offload="auto").plan
        except BudgetError:
            return
        if plan is not None and plan.predicted_s < FASTER * half.predicted_s:
            yield Advice(
                'offload="auto"',
                f"at that budget, predicted {format_seconds(plan.predicted_s)} per step, with "
                f"{format_bytes(plan.host_bytes)} of host memory",
                half.budget_bytes,
                plan.predicted_s,
            )

    def _loss(self, so_far: Diagnosis, lowest: Trial) -> Iterator[Advice]:
        """Recommend ``loss=``, with the bytes that it saves."""
        if not isinstance(lowest.plan, Plan):
            return
        if so_far.loss == "own":
            without = self.try_budget("without loss=", "min", loss=None).plan
            if without is not None and without.least_budget_bytes > self.min_bytes:
                yield Advice(
                    'loss="own"',
                    "the model returns its loss; the figures above assume it. Without it "
                    f'budget="min" is {format_bytes(without.least_budget_bytes)} instead of '
                    f"{format_bytes(self.min_bytes)}",
                    without.least_budget_bytes,
                )
            return
        aside_bytes = lowest.plan.memory.most_bytes(Kind.LOSS)
        if aside_bytes:
            yield Advice(
                "loss=fxremat.Loss(criterion, target=y)",
                f"measures the loss, for which {format_bytes(aside_bytes)} are set aside now",
            )


def _regions_of(trial: Trial) -> tuple[Region, ...]:
    """Return the graphs of a step; calls of one graph that follow each other are one region."""
    plan, training = trial.plan, trial.training
    if isinstance(plan, Plan):
        operations = operations_of(training.graphs[0].joint)
        return (Region("", len(operations), len(plan.chain)),)
    assert plan is not None
    regions = []
    ran = zip(training.regions.latest, plan.regions, strict=True)
    for _, calls in itertools.groupby(ran, key=lambda own: id(own[0].graph)):
        own = list(calls)
        call, row = own[0]
        module = named([each.module for _, each in own])
        operations = operations_of(call.graph.joint)
        regions.append(Region(module, len(operations), len(row.plan.chain), len(own)))
    return tuple(regions)


def _breaks_of(trial: Trial) -> tuple[GraphBreak, ...]:
    """Return the lines at which graphs of a step end, each once."""
    if not isinstance(trial.plan, StepPlan):
        return ()
    breaks: dict[str, GraphBreak] = {}
    for row in trial.plan.regions:
        if not row.ended_by:
            continue
        before = breaks.get(row.ended_by)
        measured = (before.seconds if before else None, row.between_s)
        seconds = [own for own in measured if own is not None]
        breaks[row.ended_by] = GraphBreak(
            *_place(row.ended_by),
            count=1 + (before.count if before else 0),
            seconds=sum(seconds) if seconds else None,
            nbytes=max(row.between_bytes, before.nbytes if before else 0, 0),
        )
    lines = {own.line for own in breaks.values()}
    for why in trial.training.regions.warnings.breaks or ():
        line, reason = _place(why)
        if why not in breaks and line not in lines:
            breaks[why] = GraphBreak(line, reason, count=0, seconds=None, nbytes=0)
    return tuple(breaks.values())


def _place(ended_by: str) -> tuple[str, str]:
    """Return the line and the reason in ``"file:line: reason"``."""
    match = _PLACE.fullmatch(ended_by)
    if match is None:
        return "", ended_by
    return f"{shortened(match['file'])}:{match['line']}", match["reason"]


def _first_lines(why: str) -> str:
    """Return the first line of a reason, and its last line that names a file."""
    first, *more = why.splitlines() or [""]
    files = [line.strip() for line in more if line.strip().startswith("File ")]
    text = " ".join([first, *files[-1:]])
    return re.sub(r'(?<=File ")[^"]+', lambda match: shortened(match[0]), text)
