"""Devices that a step can be estimated for: what their data sheets promise, or what was measured.

Figures of the table are those of the makers' data sheets, without sparsity, for the board named;
``float32`` is without TF32. Memory is what the driver tells, a link is one direction of PCIe. What
a launch takes is of torch without CUDA graphs, some 5 µs on today's hosts.

* B200: NVIDIA HGX B200 data sheet, an eighth of the board's figures.
* H100, H100-PCIe, H200: NVIDIA H100 Tensor Core GPU data sheet (SXM5, 80 GB HBM3; PCIe, 80 GB
  HBM2e), H200 data sheet.
* A100: NVIDIA A100 Tensor Core GPU data sheet (SXM4).
* L40S, L4, T4, V100: NVIDIA's data sheets of these names (V100: SXM2, 32 or 16 GB).
* 4090: NVIDIA Ada GPU architecture white paper, appendix A.
* cpu: no data sheet, a machine of a few cores. Measure yours: :meth:`Device.calibrated`.

Library workspaces are cuBLAS's, one for the thread that runs forwards and one for autograd's, as
torch sizes them (``getChosenWorkspaceSize`` in ``aten/src/ATen/cuda/CublasHandlePool.cpp``).
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from fxremat import torch_compat
from fxremat.costs.measure import fastest_s
from fxremat.errors import ArgumentError
from fxremat.report.codec import FormatError, decode, encode, pack, unpack, write_whole

FILE = "device"
"""Kind of a file that holds one."""

TF32 = "tf32"
"""Products of float32 that are computed in less: where torch is told to."""


@dataclass(frozen=True, slots=True)
class Device:
    """Figures of a device, from which :func:`fxremat.estimate` tells seconds and bytes.

    Attributes:
        name: the name that it is shown under.
        kind: torch's type of device, ``"cpu"`` or ``"cuda"``.
        bytes_per_s: bandwidth of its memory, in bytes a second.
        flops_per_s: floating-point operations a second of matrix products, by dtype, as
            ``"bfloat16"``, and ``"tf32"``; a product of a dtype that is not listed is taken to be
            one of ``"float32"``.
        launch_s: the least seconds that an operation takes.
        link_bytes_per_s: bandwidth to host memory in each direction, in bytes a second.
        memory_bytes: memory that the device has; ``None``: it is not known.
        library_bytes: memory that libraries such as cuBLAS hold from their first call on.

    Raises:
        ArgumentError: a number is none, or not positive, or the kind is another.
    """

    name: str
    kind: str
    bytes_per_s: float
    flops_per_s: tuple[tuple[str, float], ...]
    launch_s: float
    link_bytes_per_s: float
    memory_bytes: int | None = None
    library_bytes: int = 0

    def __post_init__(self) -> None:
        if self.kind not in ("cpu", "cuda"):
            raise self._refuse("kind", self.kind, "'cpu' or 'cuda'")
        if "float32" not in dict(self.flops_per_s):
            raise self._refuse("flops_per_s", self.flops_per_s, "pairs, one of them of 'float32'")
        for name in ("bytes_per_s", "launch_s", "link_bytes_per_s"):
            if not 0 < getattr(self, name) < math.inf:
                raise self._refuse(name, getattr(self, name), "positive")
        for dtype, rate in self.flops_per_s:
            if not 0 < rate < math.inf:
                raise self._refuse("flops_per_s", (dtype, rate), "positive")
        for name, least in (("memory_bytes", 1), ("library_bytes", 0)):
            nbytes = getattr(self, name)
            if nbytes is not None and nbytes < least:
                raise self._refuse(name, nbytes, f"at least {least}")

    def _refuse(self, name: str, value: object, must_be: str) -> ArgumentError:
        message = f"{name} of device {self.name!r} is {value!r}: must be {must_be}"
        return ArgumentError(message, argument=name, value=value)

    @property
    def workspaces_bytes(self) -> tuple[int, ...]:
        """Bytes of each workspace of ``library_bytes``: of the caller's thread and autograd's."""
        half = self.library_bytes // 2
        return tuple(filter(None, (self.library_bytes - half, half)))

    def flop_s(self, dtype: str) -> float:
        """Seconds of one floating-point operation of a product."""
        rates = dict(self.flops_per_s)
        return 1 / rates.get(dtype, rates["float32"])

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the figures into a file of JSON, which ``device=`` of ``fxremat.estimate`` takes.

        Raises:
            OSError: the file cannot be written.
        """
        write_whole(Path(path), pack(FILE, {"device": encode(Device, self)}, packed=False))

    @staticmethod
    def load(path: str | os.PathLike[str]) -> Device:
        """Read the device from a file that :meth:`save` wrote.

        Raises:
            ArgumentError: the file cannot be read, or holds none.
        """
        try:
            return decode(Device, unpack(FILE, Path(path).read_bytes()).get("device"))
        except (OSError, FormatError) as error:
            message = f"no device can be read from {os.fspath(path)}: {error}"
            raise ArgumentError(message, argument="device", value=path) from error

    @staticmethod
    def calibrated(device: str | torch.device = "cpu") -> Device:
        """The figures of this machine's own device, measured in a few seconds.

        What cannot be measured so is taken from the table: the bandwidth of the link, and, on
        CUDA, the memory that libraries hold.

        Args:
            device: ``"cpu"`` or ``"cuda"``.

        Raises:
            ArgumentError: torch has no such device here.
        """
        found = torch.device(device)
        if found.type not in ("cpu", "cuda") or (
            found.type == "cuda" and not torch.cuda.is_available()
        ):
            message = f"device {str(device)!r} is not here: measure 'cpu' or a CUDA device"
            raise ArgumentError(message, argument="device", value=device)
        with torch_compat.real_execution(), torch.no_grad(), torch.random.fork_rng():
            return _measured(found)


def read_device(written: object) -> Device:
    """A device, its name, or the path of a file that holds one.

    A name is one of the table, or as shops and drivers write it: ``"RTX 4090"``, ``"A100 40GB"``,
    ``"H100 PCIe"``, ``"NVIDIA H100 80GB HBM3"``.

    Raises:
        ArgumentError: none of these.
    """
    if isinstance(written, Device):
        return written
    if isinstance(written, str):
        found = _named(written)
        if found is not None:
            return found
    if isinstance(written, (str, os.PathLike)) and Path(written).is_file():
        return Device.load(written)
    message = (
        f"device is {written!r}: must be one of {', '.join(DEVICES)}, a fxremat.Device, or the "
        "path of a file that Device.save wrote"
    )
    raise ArgumentError(message, argument="device", value=written)


_MAKERS = re.compile(r"^(nvidia|geforce|rtx|tesla|sxm\d?|hbm\d?e?)")
"""How words of a name begin that tell no two boards of the table apart."""


def _named(written: str) -> Device | None:
    """A device of the table, by its name there, or as shops and drivers write it."""
    name, size = _name_and_size(written)
    for device in DEVICES.values():
        if name == _name_and_size(device.name)[0] and _is_of(device, size):
            return device
    return None


def _name_and_size(written: str) -> tuple[str, str | None]:
    """``"a100"`` and ``"40gb"`` of ``"NVIDIA A100-SXM4-40GB"``."""
    words = [_MAKERS.sub("", word) for word in re.split(r"[\W_]+", written.lower())]
    size = next((word for word in words if re.fullmatch(r"\d+gi?b", word)), None)
    return "".join(word for word in words if word != size), size


def _is_of(device: Device, size: str | None) -> bool:
    """Whether its memory is of a size as it is sold: drivers tell up to a tenth less."""
    if size is None or device.memory_bytes is None:
        return size is None
    sold_bytes = int(size.rstrip("gib")) << 30
    return 0.9 * sold_bytes < device.memory_bytes <= sold_bytes


def _gpu(
    name: str,
    *,
    tera_flops: tuple[float, float, float, float],
    giga_bytes: float,
    link: float,
    mib: int,
    hopper: bool = False,
    bfloat16: bool = True,
) -> Device:
    """A GPU of the table.

    Args:
        name: its name in the table.
        tera_flops: a second, of float64, float32, TF32 and numbers of 16 bits.
        giga_bytes: bandwidth of its memory a second, and ``link``: of one direction of its link.
        mib: its memory.
        hopper: cuBLAS takes the workspaces of that architecture, or a later one.
        bfloat16: is as fast as float16.
    """
    float64, float32, tf32, halves = (1e12 * rate for rate in tera_flops)
    return Device(
        name,
        "cuda",
        1e9 * giga_bytes,
        (
            ("float64", float64),
            ("float32", float32),
            (TF32, tf32),
            ("float16", halves),
            ("bfloat16", halves if bfloat16 else float32),
        ),
        5e-6,
        1e9 * link,
        mib << 20,
        2 * (32 << 20 if hopper else 8320 << 10),
    )


DEVICES: dict[str, Device] = {
    device.name: device
    for device in (
        Device(
            "cpu",
            "cpu",
            2e10,
            (("float64", 1e11), ("float32", 2e11), ("float16", 2e10), ("bfloat16", 1e11)),
            3e-6,
            5e9,
        ),
        _gpu("B200", tera_flops=(37, 75, 1125, 2250), giga_bytes=7700, link=64, mib=183359,
             hopper=True),
        _gpu("H100", tera_flops=(67, 67, 494.7, 989.4), giga_bytes=3350, link=64, mib=81559,
             hopper=True),
        _gpu("H100-PCIe", tera_flops=(51, 51, 378, 756.5), giga_bytes=2000, link=64, mib=81559,
             hopper=True),
        _gpu("H200", tera_flops=(67, 67, 494.7, 989.4), giga_bytes=4800, link=64, mib=143771,
             hopper=True),
        _gpu("A100", tera_flops=(19.5, 19.5, 156, 312), giga_bytes=2039, link=32, mib=81920),
        _gpu("A100-40GB", tera_flops=(19.5, 19.5, 156, 312), giga_bytes=1555, link=32, mib=40960),
        _gpu("L40S", tera_flops=(1.4, 91.6, 183, 362), giga_bytes=864, link=32, mib=46068),
        _gpu("L4", tera_flops=(0.5, 30.3, 60, 121), giga_bytes=300, link=32, mib=23034),
        _gpu("4090", tera_flops=(1.3, 82.6, 82.6, 165.2), giga_bytes=1008, link=32, mib=24564),
        _gpu("V100", tera_flops=(7.8, 15.7, 15.7, 125), giga_bytes=900, link=16, mib=32768,
             bfloat16=False),
        _gpu("V100-16GB", tera_flops=(7.8, 15.7, 15.7, 125), giga_bytes=900, link=16, mib=16384,
             bfloat16=False),
        _gpu("T4", tera_flops=(0.25, 8.1, 8.1, 65), giga_bytes=320, link=16, mib=15360,
             bfloat16=False),
    )
}  # fmt: skip
"""By name."""

_COPIED_BYTES = {"cpu": 64 << 20, "cuda": 512 << 20}
_SIDE = {"cpu": 768, "cuda": 8192}
_LAUNCHES = 2000
"""Empty kernels that are launched to find what one launch takes."""
_RUNS = 5
"""Runs of which the fastest counts."""


def _measured(device: torch.device) -> Device:
    """Figures of this machine's device: memory, products and launches are timed."""
    bases = {"cpu": DEVICES["cpu"], "cuda": DEVICES["A100"]}
    base = bases[device.type]
    source = torch.ones(_COPIED_BYTES[device.type], dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    copied_s = _warm_s(lambda: target.copy_(source), device)
    rates = []
    for dtype, _ in base.flops_per_s:
        if dtype != TF32:
            side = _SIDE[device.type]
            a = torch.ones(side, side, dtype=getattr(torch, dtype), device=device)
            product_s = _warm_s(lambda a=a: torch.mm(a, a), device)  # type: ignore[misc]
            rates.append((dtype, 2 * side**3 / product_s))
    small = torch.ones(16, device=device)

    def launch() -> None:
        for _ in range(_LAUNCHES):
            torch.neg(small)

    made = replace(
        base,
        name=f"this {device.type}",
        bytes_per_s=2 * source.numel() / copied_s,
        flops_per_s=tuple(rates),
        launch_s=_warm_s(launch, device) / _LAUNCHES,
        memory_bytes=None,
    )
    if device.type == "cuda":
        found = torch.cuda.get_device_properties(device)
        made = replace(made, name=found.name, memory_bytes=found.total_memory)
    return made


def _warm_s(run: Callable[[], object], device: torch.device) -> float:
    """Seconds of the fastest of a few runs, after one that is not counted."""
    run()
    return fastest_s(run, device=device, runs=_RUNS)
