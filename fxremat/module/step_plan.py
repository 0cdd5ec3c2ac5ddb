"""The plan of a step that runs several graphs, made of the plans of its regions."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from fxremat.calls.plans import record_of
from fxremat.errors import PlanError
from fxremat.loop.loop import Loop
from fxremat.regions.regions import Regions
from fxremat.regions.step_profiles import RegionCall, StepProfile
from fxremat.regions.warnings import NOT_CAPTURED
from fxremat.report.modules import block_of, common_module, named
from fxremat.report.plan import Plan, RegionRow, StepPlan
from fxremat.training.training import Training


def latest_plan(training: Training, names: Callable[[], Mapping[int, str]]) -> Plan | StepPlan:
    """Return the plan of the step that ran last, or that was planned last where none has run.

    Args:
        training: the training of the model.
        names: returns the names of the model's parameters by ``id``.

    Returns:
        The plan, which is a ``StepPlan`` where steps run several graphs.

    Raises:
        PlanError: no step was planned, or its graphs followed no plans that were chosen together.
    """
    if training.regions.several:
        return step_plan(training.loop, training.regions, names)
    return training.latest_record()


def step_plan(loop: Loop, regions: Regions, names: Callable[[], Mapping[int, str]]) -> StepPlan:
    """Return the plan of the step that ran last, which followed plans that were chosen together.

    Args:
        loop: the training loop of the model.
        regions: the regions of the model, which is captured in several graphs.
        names: returns the names of the model's parameters by ``id``.

    Raises:
        PlanError: no step has run, or it followed plans that were chosen separately.
    """
    ran = tuple(regions.latest)
    followed = _followed(ran)
    if followed is None:
        raise PlanError(_why_no_plan(regions), code="FXR601")
    profile, places = followed
    owners, last = names(), len(ran) - 1
    rows = tuple(
        _row(loop, profile, place, call, owners, is_last=at == last)
        for at, (place, call) in enumerate(zip(places, ran, strict=True))
    )
    resident_bytes = profile.base_bytes + profile.more_bytes
    peak_bytes = max(resident_bytes + profile.first_bytes, *_peaks(rows, resident_bytes))
    plans = [row.plan for row in rows]
    budget = loop.budget.now
    return StepPlan(
        budget=budget.written if isinstance(budget.written, (str, int)) else float(budget.written),
        budget_bytes=budget.nbytes or 0,
        least_budget_bytes=profile.least_bytes,
        baseline_peak_bytes=profile.full_bytes,
        # Blocks of an allocator are larger than what was asked for.
        predicted_peak_bytes=peak_bytes
        + max(plan.predicted_peak_bytes - plan.predicted_held_bytes for plan in plans),
        predicted_reserved_bytes=peak_bytes
        + max(plan.predicted_reserved_bytes - plan.predicted_held_bytes for plan in plans),
        measured_peak_bytes=profile.peak_bytes,
        resident_bytes=resident_bytes,
        regions=rows,
    )


def _followed(ran: Sequence[RegionCall]) -> tuple[StepProfile, list[int]] | None:
    """Return the profile whose plans all calls of a step followed, and their indices in it.

    Return ``None`` if there is no such profile, or no plans were chosen for it.
    """
    for profile in dict(ran[0].matches) if ran else ():
        places = [dict(call.matches).get(profile) for call in ran]
        matched = [place for place in places if place is not None]
        if len(matched) == len(ran) and profile.choices:
            return profile, matched
    return None


def _row(
    loop: Loop,
    profile: StepProfile,
    place: int,
    ran: RegionCall,
    names: Mapping[int, str],
    *,
    is_last: bool,
) -> RegionRow:
    plan = record_of(loop, ran.graph, ran.compiled)
    memory = plan.memory
    held = memory.held_bytes()
    reads = [names[own].rpartition(".")[0] for own in ran.parameters if own in names]
    _, between_bytes, _, between_back_bytes = profile.profiles[place]
    timed = len(profile.between_s) == len(profile.calls) - 1 and not is_last
    why = profile.calls[place].ended_by
    return RegionRow(
        plan=plan,
        module=_modules_of(reads),
        ended_by="" if is_last and why.endswith(NOT_CAPTURED) else why,
        held_bytes=ran.held_bytes,
        forward_peak_bytes=max(held[: memory.loss_point], default=0),
        backward_peak_bytes=max(held[memory.loss_point + 1 :], default=0),
        between_bytes=between_bytes,
        between_back_bytes=between_back_bytes,
        between_s=profile.between_s[place] if timed else None,
    )


def _modules_of(modules: Sequence[str]) -> str:
    """Return the module that contains all ``modules``, or a name for the range of their blocks."""
    blocks = list(dict.fromkeys(map(block_of, modules)))
    return named(blocks) if len(blocks) > 1 else common_module(modules)


def _peaks(rows: Sequence[RegionRow], resident_bytes: int) -> list[int]:
    """Return peaks of a step in bytes: four of each region, in no particular order.

    They are those during its forward, during its backward, and in the code after each of them.

    Args:
        rows: the regions.
        resident_bytes: the bytes allocated when the step begins.
    """
    peaks, held_bytes = [], resident_bytes
    for row in rows:
        peaks += [row.forward_peak_bytes, row.backward_peak_bytes]
        peaks.append(held_bytes + row.between_back_bytes)
        held_bytes += row.held_bytes
        peaks.append(held_bytes + row.between_bytes)
    return peaks


def _why_no_plan(regions: Regions) -> str:
    """Return the message of the error that the last step followed no jointly chosen plans."""
    notes = regions.warnings
    why = next(iter(notes.breaks or ()), "") or _shortened(notes.why)
    if notes.breaks is None:
        why = why or "as regions= requests"
    pieces = f"the model is captured as several graphs{f' ({why})' if why else ''}"
    planned = (
        "the first step is captured and the second is observed, so that plans are chosen together "
        "from the third step on"
    )
    if not regions.steps:
        return f"{pieces}, and no training step has run: {planned}. Run three steps first"
    return (
        f"{pieces}, and the last of the {regions.steps} training steps so far followed plans of "
        f"least memory, each chosen separately: {planned}. The same applies to new calls or sizes. "
        "Run further steps, or see the plans of the regions in .plans"
    )


def _shortened(why: str) -> str:
    """Return the first line of ``why``, and its last line that begins with ``File``."""
    first, *more = why.splitlines() or [""]
    lines = [line.strip() for line in more if line.strip().startswith("File ")]
    return " ".join([first, *lines[-1:]])
