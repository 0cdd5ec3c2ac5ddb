"""Devices that a step can be estimated for, with figures of data sheets or measurements.

Figures of the table are those of the makers' data sheets, without sparsity, for the board named.
``float32`` is without TF32. Memory is what the driver reports, and a link is one direction of PCIe.
A launch takes as long as torch without CUDA graphs needs, about 5 µs on today's hosts.

* B200: NVIDIA HGX B200 data sheet, an eighth of the board's figures.
* H100, H100-PCIe, H200: NVIDIA H100 Tensor Core GPU data sheet (SXM5, 80 GB HBM3; PCIe, 80 GB
  HBM2e), H200 data sheet.
* A100: NVIDIA A100 Tensor Core GPU data sheet (SXM4).
* L40S, L4, T4, V100: NVIDIA's data sheets of these names (V100: SXM2, 32 or 16 GB).
* 4090: NVIDIA Ada GPU architecture white paper, appendix A.
* cpu: no data sheet, a machine of a few cores. Measure yours: :meth:`Device.calibrated`.

Library workspaces are cuBLAS's: one for the thread that runs forwards and one for autograd's
thread, as torch sizes them (``getChosenWorkspaceSize`` in
``aten/src/ATen/cuda/CublasHandlePool.cpp``).
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
from fxremat.costs.measured.measure import seconds_of
from fxremat.errors import ArgumentError
from fxremat.report.codec import FormatError, decode, encode, pack, unpack, write_whole

FILE = "device"
"""Kind of the files that store a device."""

TF32 = "tf32"
"""Name of products of float32 that torch is allowed to compute in TF32."""


@dataclass(frozen=True, slots=True)
class Device:
    """Figures of a device, from which :func:`fxremat.estimate` computes seconds and bytes.

    Attributes:
        name: name to display.
        kind: torch's type of device, ``"cpu"`` or ``"cuda"``.
        bytes_per_s: bandwidth of its memory, in bytes per second.
        flops_per_s: floating-point operations per second of matrix products, by dtype, such as
            ``"bfloat16"``, and ``"tf32"``. A product of a dtype that is not listed is treated as
            one of ``"float32"``.
        launch_s: least seconds that an operation takes.
        link_bytes_per_s: bandwidth to host memory in each direction, in bytes per second.
        memory_bytes: size of its memory; ``None`` if unknown.
        library_bytes: memory that libraries such as cuBLAS hold after their first call.

    Raises:
        ArgumentError: a number is missing or not positive, or the kind is unknown.
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
            raise self._refuse("flops_per_s", self.flops_per_s, "pairs with one for 'float32'")
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
        message = f"{name} of device {self.name!r} must be {must_be}, but got {value!r}"
        return ArgumentError(message, argument=name, value=value)

    @property
    def workspaces_bytes(self) -> tuple[int, ...]:
        """Bytes of the libraries' workspaces of the caller's thread and of autograd's thread.

        They add up to ``library_bytes``.
        """
        half = self.library_bytes // 2
        return tuple(filter(None, (self.library_bytes - half, half)))

    def flop_s(self, dtype: str) -> float:
        """Return the seconds of one floating-point operation of a matrix product.

        Args:
            dtype: name of the dtype, such as ``"bfloat16"``, or ``"tf32"``.
        """
        rates = dict(self.flops_per_s)
        return 1 / rates.get(dtype, rates["float32"])

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the figures to a JSON file, which ``device=`` of ``fxremat.estimate`` accepts.

        Raises:
            OSError: the file cannot be written.
        """
        write_whole(Path(path), pack(FILE, {"device": encode(Device, self)}, packed=False))

    @staticmethod
    def load(path: str | os.PathLike[str]) -> Device:
        """Read a device from a file that :meth:`save` wrote.

        Raises:
            ArgumentError: the file cannot be read, or does not contain a device.
        """
        try:
            return decode(Device, unpack(FILE, Path(path).read_bytes()).get("device"))
        except (OSError, FormatError) as error:
            message = f"cannot read a device from {os.fspath(path)}: {error}"
            raise ArgumentError(message, argument="device", value=path) from error

    @staticmethod
    def calibrated(device: str | torch.device = "cpu") -> Device:
        """Return a device of this machine with figures that are measured, in a few seconds.

        Two figures are not measured, but those of :data:`DEVICES`: the bandwidth of the link, and,
        on CUDA, the memory that libraries hold.

        Args:
            device: ``"cpu"`` or ``"cuda"``.

        Raises:
            ArgumentError: torch has no such device on this machine.
        """
        kind = torch.device(device).type
        if kind not in ("cpu", "cuda") or (kind == "cuda" and not torch.cuda.is_available()):
            message = f"this machine has no device {str(device)!r}: measure 'cpu' or a CUDA device"
            raise ArgumentError(message, argument="device", value=device)
        with torch_compat.real_execution(), torch.no_grad(), torch.random.fork_rng():
            return _measured(torch.device(device))


def read_device(written: object) -> Device:
    """Return the device that a user has written as ``device=``.

    That is a :class:`Device`, the path of a file that :meth:`Device.save` wrote, or a name of
    :data:`DEVICES`, possibly in the spelling of shops or drivers: ``"RTX 4090"``, ``"A100 40GB"``,
    ``"H100 PCIe"``, ``"NVIDIA H100 80GB HBM3"``.

    Raises:
        ArgumentError: ``written`` is none of these.
    """
    if isinstance(written, Device):
        return written
    if isinstance(written, str):
        device = _named(written)
        if device is not None:
            return device
    if isinstance(written, (str, os.PathLike)) and Path(written).is_file():
        return Device.load(written)
    message = (
        f"device must be one of {', '.join(DEVICES)}, a fxremat.Device, or the path of a file "
        f"that Device.save wrote, but got {written!r}"
    )
    raise ArgumentError(message, argument="device", value=written)


_MAKERS = re.compile(r"^(nvidia|geforce|rtx|tesla|sxm\d?|hbm\d?e?)")
"""Prefixes of words in a name that do not distinguish boards of the table."""


def _named(written: str) -> Device | None:
    """Return the device of :data:`DEVICES` with this name; ``None`` if there is none.

    The name may be in any spelling of shops or drivers.
    """
    name, size = _name_and_size(written)
    for device in DEVICES.values():
        if name == _name_and_size(device.name)[0] and _has_memory_size(device, size):
            return device
    return None


def _name_and_size(written: str) -> tuple[str, str | None]:
    """Split a name into board and memory size: ``"NVIDIA A100-SXM4-40GB"`` is ``("a100", "40gb")``.

    The size is ``None`` if the name has none.
    """
    words = [_MAKERS.sub("", word) for word in re.split(r"[\W_]+", written.lower())]
    size = next((word for word in words if re.fullmatch(r"\d+gi?b", word)), None)
    return "".join(word for word in words if word != size), size


def _has_memory_size(device: Device, size: str | None) -> bool:
    """Return whether the memory of ``device`` is sold as ``size``, such as ``"40gb"``.

    Drivers report up to a tenth less. ``None`` stands for any size.
    """
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
    """Return a GPU as an entry of :data:`DEVICES`, in the units of data sheets.

    Args:
        name: name in the table.
        tera_flops: 10^12 floating-point operations per second of float64, float32, TF32 and 16-bit
            products.
        giga_bytes: bandwidth of its memory, in GB/s.
        link: bandwidth of one direction of its link, in GB/s.
        mib: size of its memory, in MiB.
        hopper: whether cuBLAS's workspaces have the sizes of Hopper and later architectures.
        bfloat16: whether bfloat16 is as fast as float16.
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
"""Devices by name."""

_COPIED_BYTES = {"cpu": 64 << 20, "cuda": 512 << 20}
_SIDE = {"cpu": 768, "cuda": 8192}
_LAUNCHES = 2000
"""Number of small kernels that are launched to measure the time of a launch."""
_RUNS = 5
"""Number of runs, of which the fastest counts."""


def _measured(device: torch.device) -> Device:
    """Return a device of this machine, with measured bandwidth, matrix products and launches."""
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
        properties = torch.cuda.get_device_properties(device)
        made = replace(made, name=properties.name, memory_bytes=properties.total_memory)
    return made


def _warm_s(run: Callable[[], object], device: torch.device) -> float:
    """Return the seconds of the fastest of a few runs of ``run``, after one that is not counted."""
    run()
    return min(seconds_of(run, device=device) for _ in range(_RUNS))
