"""Origins: what measured costs and plans hold for, and the keys that follow from it."""

from __future__ import annotations

import functools
import hashlib
import importlib
import json
import platform
from collections.abc import Iterator, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

import fxremat.units as anchor
from fxremat.costs.estimated.devices import Device
from fxremat.costs.measured.cache import THREADS, measuring_settings
from fxremat.effort import DEFAULT_GENERATORS, OF_STAGES, Effort
from fxremat.ir import Origin
from fxremat.ir.recorded import Facts
from fxremat.passes.joint.digest import Digests
from fxremat.passes.pipeline import added_passes
from fxremat.planner.allocator.allocator import AllocatorSettings
from fxremat.planner.context.context_bytes import Caller, ContextBytes
from fxremat.planner.transfers.transfers import HostMemory


def origin_of_costs(
    digests: Digests,
    device: torch.device,
    executor: str,
    effort: Effort,
    target: Device | None = None,
    constraints: tuple[str, ...] = (),
) -> Origin:
    """Return the origin of a traced step's costs: the conditions under which they are valid.

    Args:
        digests: digests of the step's graph.
        device: the device of the step.
        executor: the name of the executor that runs its operations.
        effort: the effort, some numbers of which decide where the graph is cut into stages.
        target: the device that costs are estimated for; ``None``: they are measured on ``device``.
        constraints: what a policy, or tags in the model, decide about single operations.
    """
    settings = {"executor": executor, **measuring_settings()}
    settings |= {f"effort.{name}": value for name, value in _changed_of(effort, stages=True)}
    added = added_passes()
    if added:
        settings["passes"] = ", ".join(added)
    if constraints:
        digest = hashlib.sha256("\n".join(constraints).encode()).hexdigest()[:12]
        settings["policy"] = f"{digest} of {len(constraints)} operations"
    if device.type != "cpu":
        del settings[THREADS]
    return Origin(
        operations=digests.operations,
        code=digests.code,
        inputs=digests.inputs,
        device=_device_name(device) if target is None else f"estimated for {target.name}",
        versions=_facts(_versions(device)),
        settings=_facts(settings),
        options=(),
        held=(),
    )


def origin_of_plan(
    costs: Origin,
    caller: Caller,
    context_bytes: ContextBytes,
    *,
    host: HostMemory | None,
    exact: bool,
    split: bool | str,
    effort: Effort,
    allocator: AllocatorSettings | None,
) -> Origin:
    """Return the origin of a plan: the conditions under which it may be followed again.

    Args:
        costs: the origin of the costs that the plan was made from.
        caller: the bytes that the caller of the step holds.
        context_bytes: the bytes of the step context that the plan was made for.
        host, exact, split, effort: options of :func:`fxremat.compile`.
        allocator: the allocator's settings, where its blocks are counted.
    """
    options: dict[str, object] = {
        "exact": exact,
        "offload": host is not None and ("conv" if host.conv else "only" if host.only else "auto"),
        "host_limit": host.limit_bytes if host else None,
        "budget_on": caller.budget_on,
        "reserve": caller.reserve_bytes,
        "accumulate": caller.accumulate,
        "optimizer": f"{sum(caller.held_bytes)} bytes",
        "loss": None if caller.loss_bytes is None else f"{caller.loss_bytes} bytes",
    }
    if split != "exact":
        options["split"] = split
    if effort.scale != 1.0:
        options["effort"] = effort.scale
    if effort.generators != DEFAULT_GENERATORS:
        options["generators"] = ", ".join(effort.generators)
    options |= {f"effort.{name}": value for name, value in _changed_of(effort, stages=False)}
    held = {
        "through the step": context_bytes.given_bytes,
        "of that, tensor by tensor": context_bytes.given_each_bytes,
        "at the loss point": context_bytes.loss_point_bytes,
        "as gradients of outputs": (context_bytes.tangent_bytes, *context_bytes.tangent_each_bytes),
        "at the end": context_bytes.end_bytes,
        "the allocator's rules": None if allocator is None else asdict(allocator),
    }
    return replace(costs, options=_facts(options), held=_facts(held))


def _changed_of(effort: Effort, *, stages: bool) -> Iterator[tuple[str, object]]:
    """Yield name and value of each number of ``effort`` that differs from its default.

    Args:
        effort: the effort of planning.
        stages: whether to yield numbers that decide where stages are cut, or all others.
    """
    for name, value in effort.changed.items():
        if (name in OF_STAGES) == stages:
            yield name, value


def key_of(origin: Origin, **more: object) -> str:
    """Return a digest of ``origin``, of the values in ``more``, and of this package's code."""
    data = [_code_digest(), asdict(origin), _facts(more)]
    return hashlib.sha256(json.dumps(data).encode()).hexdigest()


def differences(plan: Origin, now: Origin, *, of: str = "the plan's") -> Iterator[str]:
    """Yield each difference between two origins as a clause for messages, the plainest first.

    Args:
        plan: the origin of a plan.
        now: the origin of the present step.
        of: the words that refer to values of ``plan`` in the clauses.
    """
    if plan.device != now.device:
        yield f"the device is {now.device}, {of} was {plan.device}"
    yield from _changed_facts("version of ", plan.versions, now.versions, of)
    yield from _changed_facts("option ", plan.options, now.options, of)
    yield from _changed_facts("setting ", plan.settings, now.settings, of)
    inputs = list(_changed_inputs(plan.inputs, now.inputs, of))
    yield from inputs
    if plan.operations != now.operations:
        yield "the model computes other operations"
    elif plan.code != now.code and not inputs:
        yield "the operations are the same, but not their constants, strides or dtypes"
    if not inputs and plan.operations == now.operations:
        yield from _changed_facts("bytes held ", plan.held, now.held, of)


def _changed_inputs(plan: tuple[str, ...], now: tuple[str, ...], of: str) -> Iterator[str]:
    if len(plan) != len(now):
        yield f"parameters, buffers and arguments are {len(now)}, {of} were {len(plan)}"
        return
    for index, (before, after) in enumerate(zip(plan, now, strict=True)):
        if before != after:
            yield f"input {index} is {after}, {of} was {before}"


def _changed_facts(what: str, plan: Facts, now: Facts, of: str) -> Iterator[str]:
    before, after = dict(plan), dict(now)
    for name in (*before, *(name for name in after if name not in before)):
        if before.get(name) != after.get(name):
            yield f"{what}{name} is {after.get(name)}, {of} was {before.get(name)}"


def _facts(named: Mapping[str, object]) -> Facts:
    return tuple((name, repr(value)) for name, value in named.items())


@functools.cache
def _device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{_processor()}, {torch.backends.cpu.get_cpu_capability()}"


def _processor() -> str:
    """Return the name of the CPU model, or its architecture if the name is unknown."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except (OSError, UnicodeDecodeError):
        lines = []
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, "") or platform.processor() or platform.machine()


@functools.cache
def _versions(device: torch.device) -> dict[str, object]:
    versions: dict[str, object] = {"torch": torch.__version__, "fxremat": version_of("fxremat")}
    if device.type == "cuda":
        versions["CUDA"] = torch.version.cuda
        versions["cuDNN"] = torch.backends.cudnn.version()  # type: ignore[no-untyped-call]
    return versions


def version_of(package: str) -> str | None:
    """Return the version of an installed package, or ``None`` where it is not installed."""
    metadata: Any = importlib.import_module("importlib.metadata")
    try:
        return str(metadata.version(package))
    except metadata.PackageNotFoundError:
        return None


@functools.cache
def _code_digest() -> str:
    """Return a digest of the source files of this package."""
    root = Path(anchor.__file__).parent
    digest = hashlib.sha256()
    for file in sorted(root.rglob("*.py")):
        digest.update(f"{file.relative_to(root)} {file.stat().st_size}\n".encode())
        digest.update(file.read_bytes())
    return digest.hexdigest()
