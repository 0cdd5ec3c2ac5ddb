"""What the stand-in's assembler says a Triton kernel reads and writes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.cuda import CUDA
from tests.on_cuda.stood_in import needs_stand_in

triton = pytest.importorskip("triton")
tl = pytest.importorskip("triton.language")

pytestmark = needs_stand_in

COUNT = 1000
BLOCK = 256


@triton.jit
def copies(x, y, z, count, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y + at, tl.load(x + at, mask=at < count), mask=at < count)


@triton.jit
def doubles_in_place(x, y, z, count, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(x + at, 2 * tl.load(x + at, mask=at < count), mask=at < count)


@triton.jit
def adds_atomically(x, y, z, count, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.atomic_add(y + at % 8, tl.load(x + at, mask=at < count), mask=at < count)


@triton.jit
def reads_what_it_wrote(x, y, z, count, BLOCK: tl.constexpr):
    total = tl.zeros([BLOCK], tl.float32)
    for begin in range(0, count, BLOCK):
        at = begin + tl.arange(0, BLOCK)
        row = tl.load(x + at, mask=at < count, other=0.0)
        tl.store(y + at, row * row, mask=at < count)
        total += row
    for begin in range(0, count, BLOCK):
        at = begin + tl.arange(0, BLOCK)
        tl.store(z + at, tl.load(y + at, mask=at < count) * tl.sum(total), mask=at < count)


@triton.jit
def chooses(x, y, z, count, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    source = tl.where(at % 2 == 0, x + at, y + at)
    tl.store(z + at, tl.load(source, mask=at < count), mask=at < count)


EXPECTED = {
    copies: ("r", "w", ""),
    doubles_in_place: ("rw", "", ""),
    adds_atomically: ("r", "rw", ""),
    reads_what_it_wrote: ("r", "w", "w"),
    chooses: ("r", "r", "w"),
}


@pytest.fixture
def log(tmp_path: Path) -> Iterator[Path]:
    import cuda_stand_in

    cuda_stand_in.log_to(str(tmp_path / "log"))
    yield tmp_path / "log"
    cuda_stand_in.log_to("")


@pytest.mark.parametrize("kernel", EXPECTED, ids=lambda kernel: kernel.fn.__name__)
def test_accesses_of_a_kernel(kernel: Any, log: Path):
    import cuda_stand_in

    given = [torch.ones(COUNT, device=CUDA) for _ in range(3)]
    before = cuda_stand_in.counts()["triton"]
    kernel[(triton.cdiv(COUNT, BLOCK),)](*given, COUNT, BLOCK=BLOCK)
    torch.cuda.synchronize()
    assert cuda_stand_in.counts()["triton"] == before + 1
    cuda_stand_in.log_to("")
    lines = map(json.loads, log.read_text().splitlines())
    (line,) = (own for own in lines if own.get("accesses") == kernel.fn.__name__)
    for tensor, uses in zip(given, EXPECTED[kernel], strict=True):
        span = [tensor.data_ptr(), 4 * COUNT]
        assert (span in line["reads"]) == ("r" in uses)
        assert (span in line["writes"]) == ("w" in uses)


def test_a_kernel_reaches_no_further_than_its_tensor():
    import cuda_stand_in

    x = torch.full((COUNT,), 3.0, device=CUDA)
    y, after = (torch.full((COUNT,), 5.0, device=CUDA) for _ in range(2))
    copies[(4,)](x, y[100:], x, COUNT - 100, BLOCK=BLOCK)
    torch.cuda.synchronize()
    assert not cuda_stand_in.faults()
    assert y[:100].eq(5).all()
    assert y[100:].eq(0).all(), "what it only writes is zeros"
    assert after.eq(5).all()
    assert x.eq(3).all()
