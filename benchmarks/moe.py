"""Mixtures of experts, whose sizes depend on data: peaks and seconds, compared with ``aot_eager``.

Four layers of eight experts of width 256, top 2, 2 048 tokens, written as in public models: a loop
in which each expert looks its tokens up, tokens sorted by expert and split into lists, and one
grouped product. Each step has other data. By torch's profiler: the peak of ``aot_eager``'s step,
and those of steps within budgets that are shares of the peak with everything kept; seconds are
medians of interleaved rounds, over those of ``aot_eager`` with the same capture (operations on such
sizes in its graph), and bits of outputs and gradients are compared in every round.

Run: OMP_NUM_THREADS=1 FXREMAT_CACHE=0 python -m benchmarks.moe [way …] [--rounds N]
"""

from __future__ import annotations

import argparse
import gc
import hashlib
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import fxremat
from benchmarks.common import interleave, keep_freed_memory, ratios, save, show
from fxremat.units import format_bytes

WIDTH, HIDDEN, EXPERTS, LAYERS, TOKENS, TOP = 256, 1024, 8, 4, 2048, 2

BUDGETS: tuple[float | str, ...] = (1.0, 0.6, "min")

WARM = 6
"""Steps before any is timed."""

CAPTURE = {"capture_dynamic_output_shape_ops": True, "capture_scalar_outputs": True}


class Experts(nn.Module):
    """A residual layer of experts; the subclass says how tokens get to them."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.router = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.up = nn.Parameter(torch.randn(EXPERTS, WIDTH, HIDDEN) * 0.02)
        self.down = nn.Parameter(torch.randn(EXPERTS, HIDDEN, WIDTH) * 0.02)

    def routed(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the weights and indices of the experts of each token."""
        weights, chosen = self.router(x).softmax(-1).topk(TOP)
        return weights / weights.sum(-1, keepdim=True), chosen

    def expert(self, index: int, x: Tensor) -> Tensor:
        """Return what one expert makes of its tokens."""
        return nn.functional.silu(x @ self.up[index]) @ self.down[index]

    def sorted_by_expert(self, chosen: Tensor) -> tuple[Tensor, Tensor]:
        """Return the order of pairs of token and expert, and how many tokens each expert has."""
        flat = chosen.flatten()
        counts = torch.histc(flat.float(), EXPERTS, 0, EXPERTS - 1)
        return flat.argsort(stable=True), counts

    def forward(self, x: Tensor) -> Tensor:
        """Return ``x`` plus what the experts make of it."""
        return x + self.mixed(self.norm(x))

    def mixed(self, x: Tensor) -> Tensor:
        """Return the weighted sum of what the experts make of ``x``."""
        raise NotImplementedError


class Loop(Experts):
    """As in Hugging Face's Mixtral: each expert looks its tokens up."""

    def mixed(self, x: Tensor) -> Tensor:
        """Return the weighted sum of what the experts make of ``x``."""
        weights, chosen = self.routed(x)
        mixed = torch.zeros_like(x)
        mask = nn.functional.one_hot(chosen, EXPERTS).permute(2, 1, 0)
        for index in range(EXPERTS):
            place, token = torch.where(mask[index])
            made = self.expert(index, x[token]) * weights[token, place, None]
            mixed.index_add_(0, token, made)
        return mixed


class Sorted(Experts):
    """Tokens sorted by expert, and split into lists."""

    def mixed(self, x: Tensor) -> Tensor:
        """Return the weighted sum of what the experts make of ``x``."""
        weights, chosen = self.routed(x)
        order, counts = self.sorted_by_expert(chosen)
        parts = x[order // TOP].split(counts.long().tolist())
        made = torch.cat([self.expert(i, part) for i, part in enumerate(parts)])
        weighted = made * weights.flatten()[order, None]
        return torch.zeros_like(x).index_add(0, order // TOP, weighted)


class Grouped(Experts):
    """Tokens sorted by expert, and one product for all, with offsets."""

    def mixed(self, x: Tensor) -> Tensor:
        """Return the weighted sum of what the experts make of ``x``."""
        weights, chosen = self.routed(x)
        order, counts = self.sorted_by_expert(chosen)
        ends = counts.cumsum(0).to(torch.int32)
        rows = x[order // TOP].bfloat16()
        up, down = self.up.bfloat16(), self.down.bfloat16()
        made = torch._grouped_mm(rows, up, offs=ends)
        made = torch._grouped_mm(nn.functional.silu(made), down, offs=ends)
        weighted = made.float() * weights.flatten()[order, None]
        return torch.zeros_like(x).index_add(0, order // TOP, weighted)


WAYS: dict[str, type[Experts]] = {"loop": Loop, "sorted": Sorted, "grouped": Grouped}


class Training:
    """A fresh model that trains in one way; its loss is inside."""

    def __init__(self, way: str, wrap: Callable[[nn.Module], Callable[..., Any]]) -> None:
        torch.manual_seed(0)
        layers = [WAYS[way]() for _ in range(LAYERS)]
        self.model = nn.Sequential(*layers, nn.Linear(WIDTH, WIDTH))
        self.call = wrap(self.model)

    def step(self, x: Tensor) -> str:
        """A step; returns a digest of the loss and of the gradients."""
        self.model.zero_grad(set_to_none=True)
        loss = self.call(x).square().mean()
        loss.backward()
        bits = hashlib.sha256(loss.detach().numpy().tobytes())
        for parameter in self.model.parameters():
            if parameter.grad is not None:
                bits.update(parameter.grad.numpy())
        return bits.hexdigest()

    def seconds(self, x: Tensor) -> float:
        """Seconds of a step."""
        self.model.zero_grad(set_to_none=True)
        begin = time.perf_counter()
        self.call(x).square().mean().backward()
        return time.perf_counter() - begin

    def peak_bytes(self, x: Tensor) -> int:
        """Most bytes of a step, to which gradients of the one before do not belong."""
        self.model.zero_grad(set_to_none=True)
        return fxremat.measure_step(self.model, lambda: self.seconds(x)).peak_bytes


def batch(seed: int) -> Tensor:
    """Tokens of one step."""
    return torch.randn(TOKENS, WIDTH, generator=torch.Generator().manual_seed(seed))


def measure(way: str, rounds: int) -> dict[str, Any]:
    """The figures of one way to write the experts."""
    torch._dynamo.reset()
    sample = batch(0)
    with torch._dynamo.config.patch(**CAPTURE):
        reference = Training(way, lambda model: torch.compile(model, backend="aot_eager"))
        expected = {seed: reference.step(batch(seed)) for seed in range(rounds)}
        found: dict[str, Any] = {"aot_eager_peak_bytes": reference.peak_bytes(sample)}
        for budget in BUDGETS:  # one planned model at a time: others would count
            found[str(budget)] = _within(way, budget, reference, expected, rounds)
    return found


def _within(
    way: str, budget: float | str, reference: Training, expected: dict[int, str], rounds: int
) -> dict[str, Any]:
    """The figures of one budget."""
    gc.collect()
    own = Training(way, lambda model: fxremat.compile(model, batch(0), budget))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for seed in range(WARM):
            own.step(batch(seed))
        same = all(own.step(batch(seed)) == bits for seed, bits in expected.items())
        plan = own.call.plan  # type: ignore[attr-defined]
        peaks = [own.peak_bytes(batch(seed)) for seed in range(20, 23)]
        x = batch(100)
        runs = {"aot_eager": lambda: reference.seconds(x), "fxremat": lambda: own.seconds(x)}
        times = interleave(runs, rounds=rounds)
    spread = ratios(times, "fxremat", "aot_eager")
    return {
        "budget_bytes": plan.budget_bytes,
        "peak_bytes": max(peaks),
        "same_bits": same,
        "over": sum("than its budget" in str(warning.message) for warning in caught),
        "graphs": len(getattr(plan, "regions", ()) or (1,)),
        "time": [spread.median, spread.low, spread.high],
        "aot_eager_s": sorted(times["aot_eager"])[rounds // 2],
    }


def main() -> None:
    """Measure, print a table, and write ``results/moe.json``."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("ways", nargs="*", default=[*WAYS])
    parser.add_argument("--rounds", type=int, default=7)
    asked = parser.parse_args()
    keep_freed_memory()
    found = {}
    for way in asked.ways:
        found[way] = measure(way, asked.rounds)
        print(way, found[way], flush=True)
    rows = [
        [
            way,
            budget,
            format_bytes(own["aot_eager_peak_bytes"]),
            format_bytes(own[budget]["budget_bytes"]),
            f"{own[budget]['peak_bytes'] / own[budget]['budget_bytes']:.3f}",
            "{:.2f} [{:.2f} … {:.2f}]".format(*own[budget]["time"]),
            "same" if own[budget]["same_bits"] else "DIFFERENT",
        ]
        for way, own in found.items()
        for budget in map(str, BUDGETS)
    ]
    columns = (
        "experts",
        "budget",
        "aot_eager",
        "bytes",
        "peak ÷ budget",
        "time ÷ aot_eager",
        "bits",
    )
    show("mixtures of experts", columns, rows)
    save("moe", found)


if __name__ == "__main__":
    main()
