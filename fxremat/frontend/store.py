"""Costs and plans as data: what they hold for, and the cache folder that keeps them."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib
import json
import os
import platform
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import torch

import fxremat.units as anchor
from fxremat.costs.cache import THREADS, measuring_settings
from fxremat.costs.devices import Device
from fxremat.ir import Origin
from fxremat.ir.recorded import Facts
from fxremat.passes.joint.digest import Digests
from fxremat.planner.allocator import AllocatorSettings
from fxremat.planner.context_bytes import Caller, ContextBytes
from fxremat.planner.effort import DEFAULT_GENERATORS
from fxremat.planner.transfers import HostMemory
from fxremat.progress import LOG
from fxremat.report.codec import PARTIAL, FormatError, decode, encode, pack, unpack, write_whole

VARIABLE = "FXREMAT_CACHE"
"""Environment variable: the folder, or 0 for none."""

MOST_BYTES = 256 << 20
"""Bytes of the folder: what was used longest ago goes first."""

LEFT_SHARE = 0.75
"""Share of these bytes that is left once something had to go."""

ABANDONED_S = 3600
"""A file that is being written for longer than that never will be."""

_PREFIX, _SUFFIX = "fxremat-", ".json.gz"

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Store:
    """Entries of a folder by kind and key; nothing that goes wrong with them is an error.

    An entry is a file of JSON. It is written whole or not at all, so that any number of
    processes may share the folder. One that cannot be read, or is not as it was written, is
    ignored, and written again.

    Attributes:
        folder: where they are; ``None``: nothing is found and nothing kept.
    """

    folder: Path | None

    @staticmethod
    def of_environment() -> Store:
        """``$FXREMAT_CACHE``, else ``fxremat`` in the user's cache folder."""
        wish = os.environ.get(VARIABLE)
        if wish == "0":
            return Store(None)
        if wish:
            return Store(Path(wish).absolute())
        home = os.environ.get("XDG_CACHE_HOME", "")
        if Path(home).is_absolute():  # any other is to be ignored
            return Store(Path(home) / "fxremat")
        try:
            return Store(Path.home() / ".cache" / "fxremat")
        except RuntimeError:  # a user without a home
            return Store(None)

    def get(self, name: str, key: str, kind: Callable[..., T]) -> T | None:
        """The entry of type ``kind`` that was kept as ``name`` under ``key``, if there is one."""
        if self.folder is None:
            return None
        file = self._file(name, key)
        try:
            data = file.read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:
            _warn_once(f"the cache folder {self.folder} cannot be read ({error})")
            return None
        try:
            contents = unpack(name, data)
            if contents.get("key") != key:
                raise FormatError("it is of another key")
            value = contents.get("value")
            if contents.get("digest") != _digest(key, value):
                raise FormatError("it was changed")
            found = decode(kind, value)
        except FormatError as error:
            LOG.warning("%s is ignored, and will be written again: %s", file, error)
            return None
        with contextlib.suppress(OSError):
            os.utime(file)  # it was used
        return found

    def put(self, name: str, key: str, kind: Callable[..., T], value: T) -> None:
        """Keep ``value``, in place of what is there."""
        if self.folder is None:
            return
        try:
            own = encode(kind, value)
            contents = {"key": key, "value": own, "digest": _digest(key, own)}
            data = pack(name, contents, packed=True)
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            write_whole(self._file(name, key), data)
            self._make_room()
        except (OSError, ValueError) as error:  # ValueError: a number that JSON does not have
            _warn_once(f"nothing is kept in the cache folder {self.folder} ({error})")

    def _file(self, name: str, key: str) -> Path:
        assert self.folder is not None
        return self.folder / f"{_PREFIX}{name}-{key}{_SUFFIX}"

    def _make_room(self) -> None:
        """Delete what was used longest ago, and what was never finished."""
        assert self.folder is not None
        found: list[tuple[float, int, Path]] = []
        for entry in os.scandir(self.folder):
            if not entry.name.startswith((_PREFIX, f".{_PREFIX}")):
                continue  # nothing of ours
            with contextlib.suppress(FileNotFoundError):  # another process was faster
                seen = entry.stat(follow_symlinks=False)
                if not entry.name.endswith(PARTIAL):
                    found.append((seen.st_mtime, seen.st_size, Path(entry.path)))
                elif time.time() - seen.st_mtime > ABANDONED_S:
                    Path(entry.path).unlink()
        total = sum(size for _, size, _ in found)
        if total <= MOST_BYTES:
            return
        for _, size, path in sorted(found):
            with contextlib.suppress(OSError):  # gone already, or a folder
                path.unlink()
                total -= size
            if total <= LEFT_SHARE * MOST_BYTES:
                break


def _digest(key: str, value: object) -> str:
    """Of an entry: nobody checks whether the numbers in one go together."""
    return hashlib.sha256(json.dumps([key, value], allow_nan=False).encode()).hexdigest()


@functools.cache
def _warn_once(message: str) -> None:
    LOG.warning("%s: set %s to a folder of your own, or to 0", message, VARIABLE)


def origin_of_costs(
    digests: Digests,
    device: torch.device,
    executor: str,
    target: Device | None = None,
    constraints: tuple[str, ...] = (),
) -> Origin:
    """What costs of a traced step hold for that are measured now, or estimated for ``target``."""
    settings = {"executor": executor, **measuring_settings()}
    if device.type != "cpu":
        del settings[THREADS]
    if constraints:
        digest = hashlib.sha256("\n".join(constraints).encode()).hexdigest()[:12]
        settings["policy"] = f"{digest} of {len(constraints)} operations"
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
    effort: float,
    generators: tuple[str, ...],
    allocator: AllocatorSettings | None,
) -> Origin:
    """What a plan holds for that rests on ``costs``, at a call with these ``context_bytes``."""
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
    if effort != 1.0:
        options["effort"] = effort
    if generators != DEFAULT_GENERATORS:
        options["generators"] = ", ".join(generators)
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
