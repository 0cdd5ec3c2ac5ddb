"""The longest sequence that one step of a Llama takes within a budget, with and without parts.

A small one within 2 GiB of this machine, compiled for 2 048 tokens, then trained for a step of the
length that is said to fit; and one of 8 billion parameters on an H100 of 80 GiB, by estimate: in
bfloat16, all parameters with AdamW's state, or adapters of rank 16 alone. The mask of transformers
takes a byte for each pair of tokens; without it, attention is told that it is causal. With
``--host``, gradients, optimizer state and what the backward needs may be in that much host memory.
``--tokens`` plans steps of these lengths instead, and compares their predicted seconds with those
of their products at half of the card's peak.
Run: OMP_NUM_THREADS=1 python -m benchmarks.longest [small | full | lora …] [--splits NAME …]
[--no-mask] [--host "256 GiB"] [--tokens N …]
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Collection, Iterator
from typing import Any

import torch
from torch import Tensor, nn

import fxremat
from benchmarks.common import SPLITS, rows_but, save, show
from fxremat.units import format_bytes

SMALL_BUDGET, H100_BUDGET = "2 GiB", "79 GiB"
H100_FLOPS = 989.4e12
"""In bfloat16, without sparsity."""
LAYERS, WIDTH = 32, 4096
SAMPLE = 65_536
"""Tokens of the sample: parts at other lengths have the rows that its parts have."""


def llama(length: int, *, mask: bool, **sizes: int) -> nn.Module:
    """A Llama of transformers whose loss is its own.

    With its ``mask``, or an attention that is told that it is causal.
    """
    from transformers import AttentionInterface, LlamaConfig, LlamaForCausalLM
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from transformers.masking_utils import AttentionMaskInterface

    AttentionInterface.register("causal", sdpa_attention_forward)
    AttentionMaskInterface.register("causal", lambda *_args, **_kwargs: None)
    attention = "sdpa" if mask else "causal"
    config = LlamaConfig(
        max_position_embeddings=length, use_cache=False, attn_implementation=attention, **sizes
    )
    return LlamaForCausalLM(config).train()


class Loss(nn.Module):
    """A model that returns its loss alone."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: Tensor) -> Tensor:
        """Of the next words."""
        loss: Tensor = self.model(input_ids=ids, labels=ids).loss
        return loss


class Adapted(nn.Module):
    """A linear layer that stays, and a low-rank one beside it."""

    def __init__(self, inner: nn.Linear, rank: int = 16) -> None:
        super().__init__()
        self.inner = inner
        like: dict[str, Any] = {"device": inner.weight.device, "dtype": inner.weight.dtype}
        self.down = nn.Linear(inner.in_features, rank, bias=False, **like)
        self.up = nn.Linear(rank, inner.out_features, bias=False, **like)

    def forward(self, x: Tensor) -> Tensor:
        """Both, added."""
        added: Tensor = self.inner(x) + self.up(self.down(x))
        return added


def small(*, mask: bool) -> nn.Module:
    """Four layers of width 256, and 32 000 words."""
    torch.manual_seed(0)
    made = llama(
        1 << 20,
        mask=mask,
        vocab_size=32_000,
        hidden_size=256,
        intermediate_size=688,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    return Loss(made)


def large(*, adapters: bool, mask: bool, layers: int = LAYERS) -> nn.Module:
    """Llama 3 of 8 billion parameters, without data, or its first ``layers`` of 32."""
    with torch.device("meta"):
        made = llama(
            1 << 20,
            mask=mask,
            vocab_size=128_256,
            hidden_size=WIDTH,
            intermediate_size=14_336,
            num_hidden_layers=layers,
            num_attention_heads=32,
            num_key_value_heads=8,
        ).to(torch.bfloat16)
        if adapters:
            made.requires_grad_(False)
            for module in list(made.modules()):
                for name, inner in list(module.named_children()):
                    if isinstance(inner, nn.Linear) and name.endswith("_proj"):
                        setattr(module, name, Adapted(inner))
    return Loss(made)


def ids(length: int, words: int, device: str = "cpu") -> Tensor:
    """A sequence of words."""
    return torch.zeros(1, length, dtype=torch.int64, device=device) % words


def peak_of(model: nn.Module, call: Any, given: Tensor) -> int:
    """Of one step, with what is resident; no gradients exist before it."""

    def step() -> None:
        model.zero_grad(set_to_none=True)
        call(given).backward()

    step()  # the first of a size is planned, which nobody may watch
    model.zero_grad(set_to_none=True)
    return fxremat.measure_step(model, step).peak_bytes


def measure_small(splits: Collection[str], *, mask: bool) -> Iterator[dict[str, Any]]:
    """The small one, here."""
    for called in splits:
        options = SPLITS[called]
        torch._dynamo.reset()
        begin = time.perf_counter()
        found = fxremat.max_batch(
            small(mask=mask),
            ids(2048, 32_000),
            SMALL_BUDGET,
            dim=1,
            loss="own",
            most=1 << 19,
            **options,
        )
        length = found.largest.size
        row = {"model": "small", "mask": mask, "split": called, "tokens": length}
        row["planned_s"] = time.perf_counter() - begin
        print(row, flush=True)
        torch._dynamo.reset()
        model, given = small(mask=mask), ids(length, 32_000)
        call = fxremat.compile(
            model, ids(2048, 32_000), SMALL_BUDGET, loss="own", dynamic=True, **options
        )
        row["peak_bytes"] = peak_of(model, call, given)
        yield row


def options_of(split: str, host: str | None) -> dict[str, Any]:
    """Options of an estimate of the large one."""
    options: dict[str, Any] = {"device": "H100", "loss": "own", "optimizer": torch.optim.AdamW}
    if host is not None:
        options["offload"] = fxremat.HostMemory("auto", limit=host, state=True)
    return {**options, **SPLITS[split]}


def measure_large(
    name: str, splits: Collection[str], *, mask: bool, host: str | None
) -> Iterator[dict[str, Any]]:
    """The large one, by estimate."""
    for called in splits:
        if called == "same bits":  # nothing is known of the kernels of a device that is not here
            continue
        torch._dynamo.reset()
        model = large(adapters=name == "lora", mask=mask)
        begin = time.process_time()
        found = fxremat.estimate(
            model,
            ids(8192 if host is None else SAMPLE, 128_256, "meta"),
            budget=H100_BUDGET,
            dim=1,
            **options_of(called, host),
        )
        batches = found.batches
        yield {
            "model": name,
            "mask": mask,
            "split": called,
            "host": host,
            "tokens": batches.largest.size if batches else None,
            "least_bytes": found.least_budget_bytes,
            "planned_s": time.process_time() - begin,
        }


def flops_of(model: nn.Module, tokens: int) -> float:
    """Products of a step of one sequence, each counted once, as two operations a number.

    Those with weights: one in the forward, one for a gradient that is passed on, and one for each
    weight that is trained. Causal attention: two in the forward, five in the backward, halved.
    """
    weights = [p for n, p in model.named_parameters() if p.dim() == 2 and "embed" not in n]
    linear = sum(p.numel() * (3 if p.requires_grad else 2) for p in weights)
    return 2 * tokens * linear + 7 * tokens**2 * WIDTH * LAYERS


def measure_lengths(
    name: str, lengths: Collection[int], *, mask: bool, host: str | None
) -> Iterator[dict[str, Any]]:
    """Steps of the large one of given lengths, by estimate."""
    for tokens in lengths:
        torch._dynamo.reset()
        model = large(adapters=name == "lora", mask=mask)
        begin = time.process_time()
        found = fxremat.estimate(
            model,
            ids(tokens, 128_256, "meta"),
            budget=H100_BUDGET,
            **options_of("to rounding", host),
        )
        plan = found.plan
        yield {
            "model": name,
            "mask": mask,
            "split": "to rounding",
            "host": host,
            "at": tokens,
            "tokens": tokens if plan else None,
            "least_bytes": found.least_budget_bytes,
            "peak_bytes": plan.predicted_peak_bytes if plan else None,
            "host_bytes": plan.host_bytes if plan else None,
            "predicted_s": plan.predicted_s if plan else None,
            "waits_s": plan.timeline.idle.total_s if plan else None,
            "state_s": plan.training_state.added_s if plan and plan.training_state else None,
            "flop_s": flops_of(model, tokens) / (0.5 * H100_FLOPS),
            "planned_s": time.process_time() - begin,
        }


def key_of(row: dict[str, Any]) -> tuple[Any, ...]:
    """What tells rows apart."""
    return row["model"], row["split"], row["mask"], row.get("host"), row.get("at")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="*", default=("small", "lora", "full"))
    parser.add_argument("--splits", nargs="*", choices=SPLITS, default=tuple(SPLITS))
    parser.add_argument("--no-mask", action="store_true")
    parser.add_argument("--host")
    parser.add_argument("--tokens", nargs="*", type=int, default=())
    options = parser.parse_args()
    mask = not options.no_mask
    torch.set_num_threads(1)
    results: list[dict[str, Any]] = []
    for name in options.models:
        if name == "small":
            rows = measure_small(options.splits, mask=mask)
        elif options.tokens:
            rows = measure_lengths(name, options.tokens, mask=mask, host=options.host)
        else:
            rows = measure_large(name, options.splits, mask=mask, host=options.host)
        for row in rows:
            print(row, flush=True)
            results.append(row)
            done = list(map(key_of, results))
            others = rows_but("longest", lambda own, done=done: key_of(own) in done)
            save("longest", {"rows": [*others, *results]}, quiet=True)
    shown = [
        [
            found["model"],
            found["split"],
            "with it" if found["mask"] else "without",
            str(found["tokens"]),
            format_bytes(found.get("peak_bytes") or found.get("least_bytes", 0)),
            f"{found['planned_s']:.0f}",
            found.get("host") or "",
            _seconds(found.get("predicted_s")),
            _seconds(found.get("flop_s")),
            _seconds(found.get("waits_s"), digits=2),
            _seconds(found.get("state_s"), digits=2),
        ]
        for found in results
    ]
    head = ["model", "split", "mask", "tokens", "peak, or least", "s"]
    head += ["host", "step, s", "products at half the peak, s", "waits, s", "of state, s"]
    show("The longest sequence", head, shown)


def _seconds(value: float | None, *, digits: int = 1) -> str:
    return "" if value is None else f"{value:.{digits}f}"


if __name__ == "__main__":
    main()
