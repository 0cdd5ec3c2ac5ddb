"""The table of devices, files of them, and what is measured."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from fxremat.costs.estimated.devices import DEVICES, Device, read_device
from fxremat.errors import ArgumentError


@pytest.mark.parametrize("name", DEVICES)
def test_figures_are_of_one_device(name: str) -> None:
    device = DEVICES[name]
    assert read_device(name.lower()) is device
    rates = dict(device.flops_per_s)
    assert rates["float32"] >= rates["float64"]
    if device.kind == "cuda":
        assert device.library_bytes > 0
        assert device.memory_bytes is not None and device.memory_bytes > 10 << 30
        assert device.link_bytes_per_s < device.bytes_per_s
        assert rates["float16"] >= rates["tf32"] >= rates["float32"]


@pytest.mark.parametrize(
    ("written", "name"),
    [
        ("RTX 4090", "4090"),
        ("rtx4090", "4090"),
        ("NVIDIA GeForce RTX 4090", "4090"),
        ("b200", "B200"),
        ("NVIDIA B200", "B200"),
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA A100-SXM4-40GB", "A100-40GB"),
        ("NVIDIA A100-SXM4-80GB", "A100"),
        ("A100 40GB", "A100-40GB"),
        ("a100_80gb", "A100"),
        ("H100", "H100"),
        ("H100 PCIe", "H100-PCIe"),
        ("NVIDIA H100 PCIe", "H100-PCIe"),
        ("h100-pcie-80gb", "H100-PCIe"),
        ("V100", "V100"),
        ("V100 16GB", "V100-16GB"),
        ("Tesla V100-SXM2-16GB", "V100-16GB"),
        ("Tesla V100-SXM2-32GB", "V100"),
        ("Tesla T4", "T4"),
        ("NVIDIA L40S", "L40S"),
    ],
)
def test_names_are_as_people_and_drivers_write_them(written: str, name: str) -> None:
    assert read_device(written) is DEVICES[name]


@pytest.mark.parametrize(
    "written",
    [
        "H100 94GB",
        "RTX 4090 Laptop",
        "RTX 6000",
        "V100 PCIe",
        "GB200",
        "RTX",
        "",
    ],
)
def test_another_board_is_not_taken_for_one_of_the_table(written: str) -> None:
    with pytest.raises(ArgumentError, match="must be one of"):
        read_device(written)


def test_a_dtype_that_is_not_listed_is_float32() -> None:
    device = DEVICES["A100"]
    assert device.flop_s("float8_e4m3fn") == device.flop_s("float32") > device.flop_s("bfloat16")


def test_a_file_gives_back_what_was_saved(tmp_path: Path) -> None:
    device = replace(DEVICES["L4"], name="mine", launch_s=1 / 3)
    device.save(tmp_path / "mine.json")
    assert Device.load(tmp_path / "mine.json") == device
    assert read_device(tmp_path / "mine.json") == device
    assert read_device(str(tmp_path / "mine.json")) == device


def test_another_file_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "other.json"
    with pytest.raises(ArgumentError):
        Device.load(file)
    file.write_text("{}")
    with pytest.raises(ArgumentError):
        read_device(file)


@pytest.mark.parametrize("written", ["abacus", 7, None, "no/such.json"])
def test_what_is_no_device_is_refused(written: object) -> None:
    with pytest.raises(ArgumentError):
        read_device(written)


@pytest.mark.parametrize(
    "change",
    [
        {"kind": "tpu"},
        {"bytes_per_s": 0.0},
        {"launch_s": float("nan")},
        {"link_bytes_per_s": float("inf")},
        {"flops_per_s": ()},
        {"flops_per_s": (("float32", -1.0),)},
        {"memory_bytes": 0},
        {"library_bytes": -1},
    ],
)
def test_figures_that_cannot_be_are_refused(change: dict[str, object]) -> None:
    with pytest.raises(ArgumentError) as caught:
        replace(DEVICES["H100"], **change)  # type: ignore[arg-type]
    assert caught.value.argument in change


def test_what_is_here_is_measured() -> None:
    found = Device.calibrated("cpu")
    assert found.kind == "cpu"
    assert found.name not in DEVICES
    assert found.flop_s("float64") > found.flop_s("float32") / 4
    assert found.launch_s < 1e-3


def test_what_is_not_here_is_refused() -> None:
    with pytest.raises(ArgumentError):
        Device.calibrated("meta")
