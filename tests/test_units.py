"""Byte counts and durations, from and for people."""

from __future__ import annotations

import pytest

from fxremat.units import format_bytes, format_seconds, parse_bytes


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("0", 0),
        ("1048576", 1048576),
        ("7 B", 7),
        ("6 GiB", 6 * 2**30),
        ("6GiB", 6 * 2**30),
        (" 6  gib ", 6 * 2**30),
        ("512 MB", 512 * 10**6),
        ("1.5 KiB", 1536),
        (".5 KiB", 512),
        ("3 TB", 3 * 10**12),
        ("6G", 6 * 10**9),
        ("6GB", 6 * 10**9),
        ("6 Gi", 6 * 2**30),
        ("1.5k", 1500),
        ("2 TiB", 2 * 2**40),
        ("1.0009 KiB", 1024),  # rounded down: a budget is never more than was written
    ],
)
def test_parse(text, nbytes):
    assert parse_bytes(text) == nbytes


@pytest.mark.parametrize(
    "text",
    [
        "", "GiB", "6 GiBB", "-1 GiB", "6,5 GiB", "1e9", "0x10", "nan", "inf", "1 2", ".",
        "\u0661 GiB", "9" * 5000, "6 I", "6 BI", "6%",
    ],
)  # fmt: skip
def test_text_that_is_no_number_of_bytes(text):
    assert parse_bytes(text) is None


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (1536, "1.5 KiB"),
        (5 * 2**20, "5.0 MiB"),
        (6 * 2**30, "6.0 GiB"),
        (3 * 2**40, "3.0 TiB"),
        (5000 * 2**40, "5000.0 TiB"),
    ],
)
def test_format_bytes(nbytes, text):
    assert format_bytes(nbytes) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0, "0 µs"),
        (2e-7, "0.2 µs"),
        (1.5e-5, "15 µs"),
        (0.001, "1 ms"),
        (0.01234, "12.3 ms"),
        (1.0, "1 s"),
        (75.25, "75.2 s"),
    ],
)
def test_format_seconds(seconds, text):
    assert format_seconds(seconds) == text
