r"""Steps of a Llama of 8 billion parameters, really run on a card of 80 GB that is not there.

Over the stand-in for CUDA, which computes nothing and touches no memory then: torch's own allocator
answers every request of the forward, the backward and the optimizer. In bfloat16; all parameters
with AdamW's state, or adapters of rank 16 alone. A row compares what a plan promised with what was
allocated, requested and pinned. Each row is a process of its own:

    tests/cuda_stand_in/run.sh .venv-cuda python -m benchmarks.large_step [full | lora …]
        [--layers N] [--budget BYTES] [--tokens N | --longest] [--placement NAME …] [--seconds N]
        [--no-mask]

The longest sequence is what ``max_batch`` answers for a step that was captured for a short one; 8
tokens more are refused. What an operation requests in pieces was measured at the short length then,
so requests are compared for stated lengths only. Without values no kernel can show that it computes
the same without a mask, so long sequences are run with ``--no-mask``: attention is told that it is
causal. Seconds are those of planning here.
"""

from __future__ import annotations

import argparse
import json
import resource
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

import fxremat
from benchmarks.common import show
from benchmarks.longest import H100_BUDGET, ids, large
from benchmarks.rows import Row, Rows, append, failure, run_part
from fxremat.costs.estimated.devices import read_device
from fxremat.costs.link.bandwidth import link_key, record_link
from fxremat.ir import MeasuredLink
from fxremat.planner.allocator import allocations
from fxremat.planner.allocator.allocations import Allocated, Requests
from fxremat.planner.allocator.allocator import AllocatorSettings
from fxremat.planner.allocator.blocks import LEAST_BLOCK_BYTES
from fxremat.planner.allocator.footprints import WORKSPACE
from fxremat.units import format_bytes

SETTINGS: Mapping[str, str | None] = {
    "STAND_IN_VALUES": "0",
    "STAND_IN_MEMORY": "80g",
    "STAND_IN_HOST_MEMORY": "256g",
    "STAND_IN_FLOPS": "5e14",
    "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
}
"""An H100 that computes at half of its peak, with as much host memory as its host may have."""

HOST = "240 GiB"
PLACEMENTS: dict[str, dict[str, Any]] = {
    "device": {},
    "activations": {"offload": fxremat.HostMemory("auto", limit=HOST)},
    "state": {"offload": fxremat.HostMemory("auto", limit=HOST, state=True)},
    "all state": {"offload": fxremat.HostMemory("auto", limit=HOST, state="all")},
}
"""Options of ``fxremat.compile`` by what may live in host memory."""

WORDS, SAMPLE_TOKENS, MORE_TOKENS, STEPS = 128_256, 2048, 8, 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A step to run.

    Attributes:
        trained: ``"full"`` or ``"lora"``.
        placement: in :data:`PLACEMENTS`.
        layers: of 32.
        budget: of ``fxremat.compile``.
        tokens: length of the sequence; ``None``: the longest that ``max_batch`` answers.
        effort: of ``fxremat.compile``.
        mask: whether attention gets a mask, or is told that it is causal.
    """

    trained: str
    placement: str = "device"
    layers: int = 32
    budget: str = H100_BUDGET
    tokens: int | None = None
    effort: float = 1.0
    mask: bool = True

    @property
    def options(self) -> dict[str, Any]:
        """Of ``fxremat.compile``; without values no bits can be compared, so parts may round."""
        return {
            **PLACEMENTS[self.placement],
            "loss": "own",
            "bits": "rounding",
            "effort": self.effort,
        }


def run(case: Case) -> Iterator[Row]:
    """Plan and run steps, and yield rows: how it went, and what a longer sequence is answered."""
    begun_s = time.perf_counter()
    row: Row = asdict(case)
    model = large(adapters=case.trained == "lora", mask=case.mask, layers=case.layers)
    model.to_empty(device="cuda")
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, fused=True)
    options = {**case.options, "optimizer": optimizer}
    _record_h100_link(options.get("offload"))
    short = ids(case.tokens or SAMPLE_TOKENS, WORDS, "cuda")
    tokens = case.tokens
    if tokens is None:
        options["assume"] = "strict"  # the steps here clear gradients after the optimizer's step
        answer = fxremat.max_batch(model, short, case.budget, dim=1, **options)
        tokens = answer.largest.size
        row["longest_s"] = time.perf_counter() - begun_s
        torch._dynamo.reset()
    row["tokens"], row["is_longest"] = tokens, case.tokens is None
    with noted_requests() as replayed:
        options |= {"dynamic": case.tokens is None, "strict": True}
        call = fxremat.compile(model, short, case.budget, **options)
        del short
        row["measuring_bytes"] = torch.cuda.max_memory_allocated()
        row["compiled_s"] = time.perf_counter() - begun_s
        row |= _steps(call, optimizer, ids(tokens, WORDS, "cuda"), replayed)
    row["seconds"] = time.perf_counter() - begun_s
    row["touched_bytes"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
    yield row
    if case.tokens is None:
        yield {**asdict(case), **_refusal(call, tokens + MORE_TOKENS)}


def _steps(
    call: Any, optimizer: torch.optim.Optimizer, given: torch.Tensor, replayed: Replayed
) -> Row:
    """Run steps of one length; return what was promised and measured of the last one."""
    import cuda_stand_in

    row: Row = {}
    for _ in range(STEPS):
        begun_s = time.perf_counter()
        torch.cuda.reset_peak_memory_stats()
        torch.cuda.memory._record_memory_history(context=None)
        try:
            loss = call(given)
            loss.backward()
            asked = requested_bytes()
        finally:
            torch.cuda.memory._record_memory_history(enabled=None)
        torch.cuda.synchronize()
        plan = call.plan
        kept = plan.training_state
        hosted = kept.state_bytes + kept.gradient_bytes if kept else 0
        row = {
            "budget_bytes": plan.budget_bytes,
            "promised_bytes": plan.predicted_peak_bytes,
            "allocated_bytes": torch.cuda.max_memory_allocated(),
            "promised_reserved_bytes": plan.predicted_reserved_bytes,
            "promised_host_bytes": plan.host_bytes + hosted,
            "pinned_bytes": cuda_stand_in.pinned_bytes(),
            "predicted_s": plan.predicted_s,
            "loss": loss.item(),
            "step_s": time.perf_counter() - begun_s,
            "requests": len(asked),
            **asdict(Asked.of(asked, replayed[plan.predicted_peak_bytes])),
        }
        torch.cuda.reset_peak_memory_stats()
        optimizer.step()
        optimizer.zero_grad()
        torch.cuda.synchronize()
        row["optimizer_bytes"] = torch.cuda.max_memory_allocated()
        del loss
    row["faults"] = cuda_stand_in.faults()
    return row


def _refusal(call: Any, tokens: int) -> Row:
    """Return what a step of ``tokens`` is answered, which should not fit."""
    try:
        call(ids(tokens, WORDS, "cuda"))
    except fxremat.BudgetError as error:
        return {"tokens": tokens, "refused": True, "least_bytes": error.least_budget_bytes}
    return {"tokens": tokens, "refused": False}


def _record_h100_link(offload: object) -> None:
    """Let copies take an H100's seconds: the stand-in's own take this machine's."""
    rate = read_device("H100").link_bytes_per_s
    limit = offload.limit if isinstance(offload, fxremat.HostMemory) else None
    assert limit is None or isinstance(limit, int)
    link = MeasuredLink(rate, rate, 2 * rate, 1.0, False)
    record_link(link_key("cuda", host_limit_bytes=limit), link)


Replayed = Mapping[int, Sequence[Requests]]


@contextmanager
def noted_requests() -> Iterator[Replayed]:
    """Note what planning takes steps to request, by the most bytes that they are handed out."""
    replayed: defaultdict[int, list[Requests]] = defaultdict(list)
    replay = allocations.replay_requests

    def noted(requests: Requests, settings: AllocatorSettings) -> Allocated:
        taken = replay(requests, settings)
        replayed[taken.allocated_bytes].append(requests)
        return taken

    allocations.replay_requests = noted
    try:
        yield replayed
    finally:
        allocations.replay_requests = replay


def requested_bytes() -> list[int]:
    """Bytes of each request since the history began but single numbers, rounded as all are."""
    traces: Any = torch.cuda.memory._snapshot()["device_traces"][0]
    sizes = (event["size"] for event in traces if event["action"] == "alloc")
    return [_rounded(nbytes) for nbytes in sizes if nbytes > LEAST_BLOCK_BYTES]


def _rounded(nbytes: int) -> int:
    return -(-nbytes // LEAST_BLOCK_BYTES) * LEAST_BLOCK_BYTES


def planned_bytes(requests: Requests) -> list[int]:
    """Bytes of each planned request as :func:`requested_bytes` has them.

    Those of a loss outside the model are left out.
    """
    calls = [*requests.calls]
    loss_point = tuple(r for r in requests.loss_point if r[0] != WORKSPACE)
    calls.insert(requests.loss_point_index, loss_point)
    sizes = (nbytes for call in (*calls, requests.end) for _, nbytes in call)
    return [_rounded(nbytes) for nbytes in sizes if nbytes > LEAST_BLOCK_BYTES]


@dataclass(frozen=True, slots=True)
class Asked:
    """The requests of a step beside those that were planned.

    Attributes:
        missing: planned requests that the step did not make. A plan has room to compute gradients
            of a loss again, which a step does only where the loss's gradient is not the expected
            one. ``None``: the step made requests that were not planned.
        in_order: whether the step made all others in the planned order.
    """

    missing: tuple[int, ...] | None
    in_order: bool = False

    @staticmethod
    def of(asked: Sequence[int], planned: Sequence[Requests]) -> Asked:
        """Compare with the closest of several plans, of which one was followed."""
        found = (_compared(asked, planned_bytes(requests)) for requests in planned)
        closest = (own for own in found if own.missing is not None)
        best = min(
            closest, key=lambda own: (not own.in_order, len(own.missing or ())), default=None
        )
        return best or Asked(None)


def _compared(asked: Sequence[int], planned: Sequence[int]) -> Asked:
    if Counter(asked) - Counter(planned):
        return Asked(None)
    missing = tuple(sorted((Counter(planned) - Counter(asked)).elements()))
    rest = iter(planned)
    return Asked(missing, in_order=all(nbytes in rest for nbytes in asked))


def holds(row: Row) -> bool:
    """Return whether a row is as promised."""
    if "refused" in row:
        return bool(row["refused"])
    return (
        "failed" not in row
        and row["allocated_bytes"] <= row["promised_bytes"] <= row["budget_bytes"]
        and (row["is_longest"] or _as_planned(row))
        and row["promised_host_bytes"] <= row["pinned_bytes"]
        and not row["faults"]
    )


def _as_planned(row: Row) -> bool:
    """Return whether a step made all planned requests but those to compute gradients again.

    Copies from the host may be requested later than planned, so only steps without have an order.
    """
    if row["missing"] is None or len(row["missing"]) > MOST_MISSING:
        return False
    return bool(row["in_order"] or row["promised_host_bytes"])


MOST_MISSING = 3
"""Two gradients of the loss, of the hidden states and of the weights, and what computing takes."""


def measure(case: Case, *, seconds: float) -> list[Row]:
    """Return the rows of one case, which a process of its own makes."""
    rows: list[Row] = []
    arguments = ["-m", "benchmarks.large_step", "--inside", json.dumps(asdict(case))]
    why = run_part(arguments, settings=SETTINGS, seconds=seconds, add=rows.append)
    return rows if why is None else [*rows, {**asdict(case), "failed": why}]


def _inside(case: Case, path: Path) -> None:
    try:
        for row in run(case):
            append(path, row)
    except Exception as error:
        append(path, {**asdict(case), **failure(error)})
        raise


def main() -> None:
    """Print the table and save ``results/large_step.json``."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("trained", nargs="*", default=("full", "lora"))
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--budget", default=H100_BUDGET)
    parser.add_argument("--tokens", type=int, default=32_768)
    parser.add_argument("--longest", action="store_true")
    parser.add_argument("--no-mask", action="store_true")
    parser.add_argument("--placement", nargs="*", choices=PLACEMENTS, default=("device",))
    parser.add_argument("--effort", type=float, default=1.0)
    parser.add_argument("--seconds", type=float, default=7200)
    parser.add_argument("--inside")
    parser.add_argument("--rows", type=Path)
    asked = parser.parse_args()
    if asked.inside:
        _inside(Case(**json.loads(asked.inside)), asked.rows)
        return
    rows = Rows("large_step", {})
    for placement in asked.placement:
        for trained in asked.trained:
            case = Case(
                trained=trained,
                placement=placement,
                layers=asked.layers,
                budget=asked.budget,
                tokens=None if asked.longest else asked.tokens,
                effort=asked.effort,
                mask=not asked.no_mask,
            )
            for row in measure(case, seconds=asked.seconds):
                rows.add(row)
                print({**row, "holds": holds(row)}, flush=True)
    show(
        "Steps of a Llama with the widths of 8 billion parameters",
        ["trained", "placement", "layers", "tokens", "promised", "allocated", "host", "requests",
         "holds"],
        [
            [
                row["trained"],
                row["placement"],
                str(row["layers"]),
                str(row["tokens"]),
                f"{row['promised_bytes']:,}",
                f"{row['allocated_bytes']:,}",
                format_bytes(row["promised_host_bytes"]),
                str(row["requests"]),
                "yes" if holds(row) else "NO",
            ]
            for row in rows.rows
            if "allocated_bytes" in row
        ],
    )  # fmt: skip
    rows.save()


if __name__ == "__main__":
    main()
