"""What a plan holds for: a step, where it runs, and what was asked for."""

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
from fxremat.costs.cache import THREADS, measuring_settings
from fxremat.costs.devices import Device
from fxremat.ir import Origin
from fxremat.ir.recorded import Facts
from fxremat.passes.joint.digest import Digests
from fxremat.planner.allocator import AllocatorSettings
from fxremat.planner.context_bytes import ContextBytes


def origin_of_costs(
    digests: Digests, device: torch.device, executor: str, target: Device | None = None
) -> Origin:
    """What costs of a traced step hold for, measured on ``device`` under the settings of now.

    Not measured, but estimated for ``target``, where there is one.
    """
    settings = {"executor": executor, **measuring_settings()}
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
    *,
    options: Mapping[str, object],
    context_bytes: ContextBytes,
    allocator: AllocatorSettings | None,
) -> Origin:
    """What a plan holds for that rests on such costs.

    Args:
        costs: of the same step.
        options: what was asked for beside a budget.
        context_bytes: what the caller of the step holds.
        allocator: rules of the device's.
    """
    held = {
        "through the step": context_bytes.given_bytes,
        "of that, tensor by tensor": context_bytes.given_each_bytes,
        "at the turn": context_bytes.turn_bytes,
        "as gradients of outputs": (context_bytes.tangent_bytes, *context_bytes.tangent_each_bytes),
        "at the end": context_bytes.end_bytes,
        "the allocator's rules": None if allocator is None else asdict(allocator),
    }
    return replace(costs, options=_facts(options), held=_facts(held))


def key_of(origin: Origin, **more: object) -> str:
    """A digest of ``origin``, of what else is named, and of this package's code."""
    data = [_code_digest(), asdict(origin), _facts(more)]
    return hashlib.sha256(json.dumps(data).encode()).hexdigest()


def differences(plan: Origin, now: Origin, *, of: str = "the plan's") -> Iterator[str]:
    """What is not now as it was for a plan, the plainest first.

    Args:
        plan: what that holds for.
        now: what is there.
        of: whose the former is.
    """
    if plan.device != now.device:
        yield f"the device is {now.device}, {of} was {plan.device}"
    yield from _changed("version of ", plan.versions, now.versions, of)
    yield from _changed("option ", plan.options, now.options, of)
    yield from _changed("setting ", plan.settings, now.settings, of)
    inputs = list(_other_inputs(plan.inputs, now.inputs, of))
    yield from inputs
    if plan.operations != now.operations:
        yield "the model computes other operations"
    elif plan.code != now.code and not inputs:
        yield "the operations are the same, but not their constants, strides or dtypes"
    if not inputs and plan.operations == now.operations:
        yield from _changed("bytes held ", plan.held, now.held, of)


def _other_inputs(plan: tuple[str, ...], now: tuple[str, ...], of: str) -> Iterator[str]:
    if len(plan) != len(now):
        yield f"parameters, buffers and arguments are {len(now)}, {of} were {len(plan)}"
        return
    for index, (before, after) in enumerate(zip(plan, now, strict=True)):
        if before != after:
            yield f"input {index} is {after}, {of} was {before}"


def _changed(what: str, plan: Facts, now: Facts, of: str) -> Iterator[str]:
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
    """The CPU's name, where the system tells it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except (OSError, UnicodeDecodeError):
        lines = []
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, "") or platform.processor() or platform.machine()


@functools.cache
def _versions(device: torch.device) -> dict[str, object]:
    found: dict[str, object] = {"torch": torch.__version__, "fxremat": version_of("fxremat")}
    if device.type == "cuda":
        found["CUDA"] = torch.version.cuda
        found["cuDNN"] = torch.backends.cudnn.version()  # type: ignore[no-untyped-call]
    return found


def version_of(package: str) -> str | None:
    """The version of an installed package; ``None``: it is not installed."""
    metadata: Any = importlib.import_module("importlib.metadata")
    try:
        return str(metadata.version(package))
    except metadata.PackageNotFoundError:
        return None


@functools.cache
def _code_digest() -> str:
    """A digest of this package's source: other code might have planned otherwise."""
    root = Path(anchor.__file__).parent
    found = hashlib.sha256()
    for file in sorted(root.rglob("*.py")):
        found.update(f"{file.relative_to(root)} {file.stat().st_size}\n".encode())
        found.update(file.read_bytes())
    return found.hexdigest()
