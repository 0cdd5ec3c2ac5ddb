"""Memory while a step is planned: no more than the budget and what one stage needs."""

from __future__ import annotations

import gc
from collections import defaultdict
from collections.abc import Iterator
from itertools import accumulate
from types import TracebackType

import pytest
import torch
from torch.utils._pytree import tree_leaves

import fxremat
from fxremat import torch_compat
from fxremat.costs.measured import cache
from fxremat.costs.measured.cache import CostCache
from fxremat.costs.measured.cost import Measured, boundary_after, stage_blocks
from fxremat.costs.measured.measure import resident_bytes
from fxremat.costs.measured.stages import measure_line
from fxremat.passes.stages.block import BlockCache
from fxremat.planner.allocator.footprints import requests_of, steps_of
from fxremat.progress import silent
from fxremat.report.plan import Plan
from tests.harness import captured, search_quickly
from tests.models import ZOO
from tests.reference.plain_sweep import run

_AllocationLog = torch_compat.AllocationLog


class Watch:
    """The allocator's events while it is watched by others, too, who cannot watch at once.

    Attributes:
        peak_bytes: most bytes at any instant, less those at the start.
    """

    def __init__(self) -> None:
        self.peak_bytes = 0
        self._now_bytes = 0
        self._log: torch_compat.AllocationLog | None = None

    def resume(self) -> None:
        """Watch, as nobody else does."""
        self._log = _AllocationLog()
        self._log.__enter__()

    def pause(self) -> None:
        """Let others watch."""
        if self._log is not None:
            self._log.__exit__()
            self.add(self._log.events)
            self._log = None

    def add(self, events: list[tuple[str, int]]) -> None:
        """Count what others saw."""
        for now in accumulate((change for _, change in events), initial=self._now_bytes):
            self._now_bytes = now
            self.peak_bytes = max(self.peak_bytes, now)


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch) -> Iterator[Watch]:
    """Paused; between ``resume`` and ``pause`` logs of the package are part of what it sees."""
    gc.collect()  # what other tests have left would be freed while it watches
    watch = Watch()

    class Shared(_AllocationLog):
        def __enter__(self) -> Shared:
            watch.pause()
            super().__enter__()
            return self

        def __exit__(
            self,
            kind: type[BaseException] | None = None,
            error: BaseException | None = None,
            trace: TracebackType | None = None,
        ) -> None:
            super().__exit__(kind, error, trace)
            watch.add(self.events)
            watch.resume()

    monkeypatch.setattr(torch_compat, "AllocationLog", Shared)
    yield watch
    watch.pause()
    torch._dynamo.reset()


def test_logs_within_a_watch_are_part_of_it(watch: Watch):
    watch.resume()
    kept = torch.ones(1000)
    with torch_compat.AllocationLog() as log:
        inner = torch.ones(500)
        del inner
    more = torch.ones(250)
    del kept, more
    after = torch.ones(1100)
    watch.pause()
    assert log.peak_bytes == 4 * 500
    assert watch.peak_bytes == 4 * 1500
    assert after.numel() == 1100


def largest_stage_bytes(plan: Plan) -> int:
    """The most that one stage needs: boundaries, saved set, and what running it takes beside."""
    return max(
        plan.chain.nbytes({*plan.chain.boundaries[i], *plan.chain.saved_set(i)})
        + max(costs.keep_extra_bytes, costs.backward_extra_bytes)
        for i, costs in enumerate(plan.costs.stages)
    )


@pytest.mark.parametrize(
    "name",
    ["gpt", *(pytest.param(n, marks=pytest.mark.slow) for n in ("unet", "hf_llama", "resnet50"))],
)
def test_compiling_takes_the_budget_and_the_largest_stage(
    name: str, watch: Watch, monkeypatch: pytest.MonkeyPatch
):
    search_quickly(monkeypatch)
    monkeypatch.setattr(cache, "COSTS", defaultdict(CostCache))
    entry = ZOO[name]
    model = entry.build()
    args, kwargs = entry.sample(0)
    leaves = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
    before_bytes = resident_bytes(model, lambda: leaves)
    loss = None if entry.loss_inside else entry.loss
    watch.resume()
    with entry.context():
        call = fxremat.compile(model, fxremat.Sample(args, kwargs), "min", loss=loss)
    watch.pause()
    assert call.plan.budget_bytes < call.plan.baseline_peak_bytes
    largest_bytes = largest_stage_bytes(call.plan)
    assert watch.peak_bytes > largest_bytes / 4  # it was seen
    assert before_bytes + watch.peak_bytes <= call.plan.budget_bytes + largest_bytes


def measuring_bytes(measured: Measured, blocks: BlockCache) -> int:
    """The most that a walk along a line needs, which runs each block of each stage alone.

    Beside a block's inputs it holds what is pinned, the boundaries around the stage, and for
    its backward the saved set.
    """
    line, table = measured.line, measured.line.joint.storages
    given = table.of(line.joint.given)
    most = 0
    for index, stage in enumerate(line.stages):
        first, again, backward = stage_blocks(line, blocks, index)
        after = boundary_after(line, index)
        for block, beside in (
            (first, ()),
            (again, after),
            (backward, (*after, *stage.saved)),
        ):
            held = table.of((*stage.boundary, *line.pinned, *block.inputs, *beside)) - given
            steps = steps_of(block, table, measured.workspace_bytes)
            peak = run(requests_of(steps, table, kept=held | given)).peak_bytes
            most = max(most, table.total(held) + peak)
    return most + torch.get_rng_state().nbytes  # the state to go back to


@pytest.mark.parametrize(
    "name",
    ["gpt", "hf_llama", pytest.param("unet", marks=pytest.mark.slow), "inplace", "lora", "coca"],
)
def test_measuring_takes_what_one_stage_needs(name: str, watch: Watch):
    step = captured(name)
    blocks = BlockCache(step.line)
    real = dict(zip(step.joint.primals, step.primals, strict=True))
    watch.resume()
    measured = measure_line(step.line, blocks, real=real, cache=CostCache(), progress=silent)
    watch.pause()
    assert watch.peak_bytes <= measuring_bytes(measured, blocks)
