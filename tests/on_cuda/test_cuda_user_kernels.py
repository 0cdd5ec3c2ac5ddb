"""Kernels that a user has written for Triton, under a budget, over the stand-in for CUDA.

Its kernels compute nothing: asserted is what they take, how often they run, and on what.
"""

from __future__ import annotations

import collections
import contextlib
import importlib.util
import json
import os
import re
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxremat
from fxremat import torch_compat
from fxremat.errors import PlanError
from tests.cuda import CUDA, forget
from tests.efforts import WHOLE
from tests.on_cuda.happens_before import check
from tests.on_cuda.stood_in import needs_stand_in

pytest.importorskip("triton")

from tests.on_cuda import user_kernels as kernels

pytestmark = needs_stand_in

needs_liger = pytest.mark.skipif(
    importlib.util.find_spec("liger_kernel") is None, reason="no liger-kernel"
)

PLANNED = tuple(kind for kind in kernels.KINDS if kind != "atomic")
FEW = (("operator", "eager"), ("function", "inductor"), ("tuned", "eager"), ("plain", "eager"))
PAIRS = pytest.mark.parametrize(
    ("kind", "executor"),
    [
        pytest.param(kind, executor, marks=() if (kind, executor) in FEW else pytest.mark.slow)
        for kind in PLANNED
        for executor in ("eager", "inductor")
    ],
)
"""Each way to launch a kernel, and who makes the kernels of all else."""

FLUSH_BYTES = 64 << 20
"""Less than Triton's tuner takes to empty caches, more than a step of these models takes."""


@pytest.fixture(autouse=True)
def _nothing_left() -> Iterator[None]:
    """No model of another test is there, and no kernel is tuned."""
    forget(CUDA)
    for kernel in kernels.TUNED:
        kernel.cache.clear()
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*data pointer of FakeTensor.*")
        warnings.simplefilter("error", fxremat.BudgetWarning)
        yield
    forget(CUDA)


class Run:
    """A model that is trained under a budget.

    Args:
        model: on the device.
        batch: its arguments, on the device.
        budget: of the step.
        loss: of the model's outputs; ``"own"``: the model returns it.
        entry: ``compile`` or ``backend``.
        options: of either.
    """

    def __init__(
        self,
        model: nn.Module,
        batch: tuple[Tensor, ...],
        budget: int | str | float,
        *,
        loss: Callable[[Any], Tensor] | str = torch.sum,
        entry: str = "compile",
        **options: Any,
    ) -> None:
        self.model, self.batch = model, batch
        self.loss: Callable[[Any], Tensor] = loss if callable(loss) else lambda out: out
        if entry == "compile":
            sample = fxremat.Sample(batch, {})
            self.call = fxremat.compile(model, sample, budget, loss=loss, **options)
        else:
            self.call = torch.compile(
                model, backend="fxremat", options={"budget": budget, **options}
            )

    def step(self, batch: tuple[Tensor, ...] | None = None) -> int:
        """One step; the bytes that it takes."""
        self.model.zero_grad()
        torch.cuda.reset_peak_memory_stats()
        self.loss(self.call(*(batch or self.batch))).backward()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated()

    def peaks(self, count: int = 3) -> list[int]:
        """What some steps take, after the first, in which ``backend`` captures and measures."""
        self.step()
        return [self.step() for _ in range(count)]


def run(kind: str, budget: int | str | float, **options: Any) -> Run:
    return Run(kernels.model_of(kind).to(CUDA), (kernels.batch().to(CUDA),), budget, **options)


def ends(kind: str, **options: Any) -> tuple[int, int]:
    """The least budget of the usual loop, and what the step takes with everything kept."""
    plan = run(kind, "min", **options).call.plan
    both = plan.budget_bytes, plan.baseline_peak_bytes
    del plan
    forget(CUDA)
    return both


def plain_peak(model: nn.Module, batch: tuple[Tensor, ...], loss: Callable[[Any], Tensor]) -> int:
    """What a step of a model takes without a plan."""
    for _ in range(2):
        model.zero_grad()
        torch.cuda.reset_peak_memory_stats()
        loss(model(*batch)).backward()
    model.zero_grad()
    return torch.cuda.max_memory_allocated()


@contextlib.contextmanager
def launches(*, copied: bool = False) -> Iterator[collections.Counter[str]]:
    """How often each kernel is launched inside, by its name; none of them races.

    ``copied``: tensors that nobody has written may be copied, as torch does for a kernel that
    writes to one.
    """
    import cuda_stand_in

    counted: collections.Counter[str] = collections.Counter()
    torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "log"
        cuda_stand_in.log_to(str(path))
        try:
            yield counted
        finally:
            cuda_stand_in.log_to("")
            torch.cuda.synchronize()
        lines = list(map(json.loads, path.read_text().splitlines()))
    races = [race for race in check(lines).races if not (copied and "nobody has" in race)]
    assert not races, races
    counted.update(line["accesses"] for line in lines if "accesses" in line)


@PAIRS
def test_a_step_keeps_to_its_budget(kind: str, executor: str):
    least, full = ends(kind, executor=executor)
    peaks = []
    for budget in (least, (least + full) // 2, full):
        trained = run(kind, budget, executor=executor)
        peaks.append(max(trained.peaks()))
        assert peaks[-1] <= budget
        with launches() as counted:
            trained.step()
        assert counted[kernels.FORWARDS[kind]] >= kernels.BLOCKS
        del trained
        forget(CUDA)
    assert peaks[0] < peaks[-1]


@PAIRS
def test_a_step_keeps_to_its_budget_as_a_backend(kind: str, executor: str):
    least, full = ends(kind, executor=executor)
    budget = (least + full) // 2
    trained = run(kind, budget, entry="backend", executor=executor)
    assert max(trained.peaks()) <= budget


@pytest.mark.parametrize(
    ("kind", "mode"),
    [
        ("function", "late"),
        ("plain", "random"),
        pytest.param("function", "early", marks=pytest.mark.slow),
        pytest.param("function", "random", marks=pytest.mark.slow),
        pytest.param("plain", "late", marks=pytest.mark.slow),
    ],
)
def test_no_order_of_streams_shows_what_is_gone(kind: str, mode: str):
    import cuda_stand_in

    trained = run(kind, "min", offload="only")
    trained.peaks(1)
    cuda_stand_in.mode(mode, seed=1)
    try:
        with launches():
            assert trained.step() <= trained.call.plan.budget_bytes
    finally:
        torch.cuda.synchronize()
        cuda_stand_in.mode(os.environ.get("STAND_IN_MODE", "eager"))


@pytest.mark.parametrize("kind", ["function", "plain"])
def test_a_kernel_makes_what_it_writes(kind: str):
    """torch copies the user's empty tensor; everything kept takes no more than without a copy."""
    _, full = ends(kind)
    kept = max(run(kind, full).peaks())
    forget(CUDA)
    model, batch = kernels.model_of(kind).to(CUDA), (kernels.batch().to(CUDA),)
    assert kept <= plain_peak(model, batch, torch.sum)


@pytest.mark.parametrize("kind", ["function", pytest.param("tuned", marks=pytest.mark.slow)])
def test_a_recomputation_launches_the_kernel_again(kind: str):
    trained = run(kind, "min")
    trained.peaks(1)
    with launches() as counted:
        trained.step()
    assert counted[kernels.FORWARDS[kind]] > kernels.BLOCKS
    assert counted[kernels.BACKWARDS[kind]] == kernels.BLOCKS


def test_a_sum_in_any_order_is_not_computed_again():
    trained = run("atomic", "min", effort=WHOLE)
    trained.peaks(1)
    with launches() as counted:
        trained.step()
    assert counted["column_sum_kernel"] == kernels.BLOCKS


@pytest.mark.parametrize(
    ("kernel", "dtype", "same"),
    [
        (kernels.whole_sum_kernel, torch.int32, True),
        (kernels.whole_sum_kernel, torch.float32, False),
        (kernels.ticket_kernel, torch.int32, False),
        (kernels.exchange_kernel, torch.int32, False),
        (kernels.calling_kernel, torch.int32, True),
        (kernels.calling_kernel, torch.float16, False),
    ],
)
def test_which_kernels_give_the_same_bits_again(kernel: Any, dtype: torch.dtype, same: bool):
    numbers = torch.zeros(65, dtype=dtype, device=CUDA)
    arguments = {"source": numbers, "target": numbers, "BLOCK": 64}
    launch = torch_compat.UserLaunch(kernel, {}, [(1, 1, 1)], {}, arguments, ("target",))
    assert torch_compat.gives_same_bits(launch) is same


def test_a_tuned_kernel_is_tuned_before_the_first_step():
    trained = run("tuned", "min")
    with launches() as counted:
        peak = trained.step()
    assert peak <= trained.call.plan.budget_bytes < FLUSH_BYTES
    assert counted["tuned_kernel"] < 2 * kernels.BLOCKS
    assert counted["tuned_backward_kernel"] == kernels.BLOCKS


def test_a_tuned_kernel_of_the_loss_is_no_part_of_the_budget():
    trained = run("operator", "min", loss=lambda out: kernels.Tuned.apply(out).sum())
    assert trained.call.plan.budget_bytes < FLUSH_BYTES
    assert max(trained.peaks()) <= trained.call.plan.budget_bytes


@pytest.mark.parametrize("kind", ["operator", "tuned"])
def test_other_sizes(kind: str):
    trained = run(kind, 0.9, dynamic=True)
    for rows in (kernels.ROWS // 2, kernels.ROWS + 176):
        other = (torch.randn(rows, kernels.WIDTH, device=CUDA),)
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always", fxremat.BudgetWarning)
            first_bytes = trained.step(other)  # in which a tuned kernel is tuned for this size
        told = [n for w in warned for n in re.findall(r"at least (\d+) bytes", str(w.message))]
        assert len(told) == len(warned) == (kind == "tuned")
        assert all(FLUSH_BYTES < int(nbytes) <= first_bytes for nbytes in told)
        assert trained.step(other) <= trained.call.plan.budget_bytes


def test_a_digest_is_of_all_that_decides_what_a_kernel_does():
    triton = pytest.importorskip("triton")

    def chosen(value: int) -> Any:
        return triton.heuristics({"BLOCK": lambda _arguments: value})(kernels.sine_kernel)

    least = triton.heuristics({"BLOCK": lambda _arguments: min(64, 128)})(kernels.sine_kernel)
    most = triton.heuristics({"BLOCK": lambda _arguments: max(64, 128)})(kernels.sine_kernel)
    every = (kernels.sine_kernel, least, most, chosen(64), chosen(128))
    assert len({torch_compat.kernel_digest(kernel, {}) for kernel in every}) == len(every)
    assert torch_compat.kernel_digest(chosen(64), {}) == torch_compat.kernel_digest(every[3], {})


def test_another_kernel_at_the_same_place_is_another_step(tmp_path: Path):
    """Each process numbers kernels as they come: the number says nothing."""
    path = tmp_path / "plan.json"
    run("operator", "min").call.plan.save(path)
    forget(CUDA)
    with pytest.raises(PlanError):
        run("other_operator", "min", plan=path)
    forget(CUDA)
    trained = run("other_operator", "min")  # which has the number of the first now
    trained.peaks(1)
    with launches() as counted:
        trained.step()
    assert not counted["sine_kernel"]
    assert counted["other_kernel"] >= kernels.BLOCKS
    del trained
    followed = run("operator", "min", plan=path)
    with launches() as counted:
        followed.step()
    assert not counted["other_kernel"]


PROGRAM = """
import torch, fxremat
from tests.on_cuda import user_kernels as kernels
from tests.on_cuda.test_cuda_user_kernels import launches, run
if {first!r}:
    run({first!r}, "min")
    torch._dynamo.reset()
trained = run("tuned", "min")
with launches() as counted:
    peak = trained.step()
assert peak <= trained.call.plan.budget_bytes < {flush}, peak
print(trained.call.plan.budget_bytes, counted["tuned_kernel"], counted["tuned_backward_kernel"])
"""


def _in_a_process(first: str, cache: Path) -> str:
    code = PROGRAM.format(first=first, flush=FLUSH_BYTES)
    environment = {**os.environ, "FXREMAT_CACHE": str(cache)}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()[-1]


@pytest.mark.slow
def test_another_process_has_the_same_costs_and_tunes_before_the_first_step(tmp_path: Path):
    """It measures nothing, and numbers kernels otherwise."""
    first = _in_a_process("", tmp_path)
    assert _in_a_process("operator", tmp_path) == first


def liger(*, fused_loss: bool) -> tuple[nn.Module, tuple[Tensor, ...]]:
    """A model of Liger's layers, and its batch."""
    model = kernels.liger_model(fused_loss=fused_loss).to(CUDA)
    draw = torch.Generator().manual_seed(1)
    x = torch.randn(kernels.ROWS, kernels.WIDTH, generator=draw).to(CUDA)
    if not fused_loss:
        return model, (x,)
    return model, (x, torch.randint(0, kernels.WORDS, (kernels.ROWS,), generator=draw).to(CUDA))


@needs_liger
@pytest.mark.parametrize("executor", ["eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_layers_of_liger(executor: str):
    plan = Run(*liger(fused_loss=False), "min", executor=executor).call.plan
    least, full = plan.budget_bytes, plan.baseline_peak_bytes
    del plan
    for budget in (least, (least + full) // 2):
        forget(CUDA)
        trained = Run(*liger(fused_loss=False), budget, executor=executor)
        assert max(trained.peaks()) <= budget
        with launches() as counted:
            trained.step()
        assert counted["_swiglu_forward_kernel"] >= kernels.LIGER_BLOCKS


@needs_liger
@pytest.mark.parametrize("entry", ["compile", pytest.param("backend", marks=pytest.mark.slow)])
def test_the_fused_loss_of_liger(entry: str):
    """It reads a number of the device, so Dynamo runs it as it is, between regions."""
    model, batch = liger(fused_loss=True)
    budget = plain_peak(model, batch, lambda out: out)
    unseen = model.head.weight.nbytes if entry == "backend" else 0  # which is not captured
    del model, batch
    trained = Run(*liger(fused_loss=True), budget, entry=entry, loss="own")
    assert max(trained.peaks(6)[2:]) <= budget + unseen
    with launches(copied=True) as counted:
        trained.step()
    assert counted["liger_cross_entropy_kernel"]


@pytest.mark.parametrize("kind", ["function", "tuned"])
def test_nothing_is_launched_without_data(kind: str):
    """A launch would write to address 0."""
    with torch.device("meta"):
        model, x = kernels.model_of(kind), torch.empty(kernels.ROWS, kernels.WIDTH)
    with launches() as counted:
        estimate = fxremat.estimate(model, x, device="H100", budget=0.9, loss=torch.sum)
    assert estimate.least_budget_bytes
    assert not counted


@pytest.mark.slow
def test_tuned_kernels_between_regions():
    torch.manual_seed(0)
    sides = [nn.Linear(kernels.WIDTH, kernels.WIDTH) for _ in range(6)]
    layers = [layer for side in sides for layer in (side, nn.GELU())]
    model = nn.Sequential(*layers[:6], kernels.NotCaptured(), *layers[6:]).to(CUDA)
    batch = (kernels.batch().to(CUDA),)
    budget = plain_peak(model, batch, torch.sum)
    for kernel in kernels.TUNED:
        kernel.cache.clear()
    trained = Run(model, batch, budget)
    assert max(trained.peaks(6)) <= budget < FLUSH_BYTES  # after the first, which tunes
