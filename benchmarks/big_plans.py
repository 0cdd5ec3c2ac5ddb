r"""Plans for 80 GiB, made and followed in torch's own allocator, where there is no such device.

Of Llama-3 8B's shapes (bfloat16, one sequence of 8 192 tokens), all trained and with LoRA:
predicted peaks beside what was allocated and reserved. Over the stand-in for CUDA, which computes
nothing then:

    STAND_IN_VALUES=0 STAND_IN_POISON_NEW=0 STAND_IN_MEMORY=200g \
        tests/cuda_stand_in/run.sh .venv-cuda python -m benchmarks.big_plans
"""

from __future__ import annotations

import argparse

import torch
import transformers
from torch import nn

import fxremat
from benchmarks.common import show
from benchmarks.rows import Row, Rows
from fxremat.errors import BudgetError

BUDGETS = ("72 GiB", "48 GiB", "min")


def llama(layers: int, tokens: int, *, lora: bool) -> nn.Module:
    """Of Llama-3 8B's widths, without data."""
    config = transformers.LlamaConfig(
        vocab_size=128256,
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=layers,
        num_attention_heads=32,
        num_key_value_heads=8,
        max_position_embeddings=tokens,
        use_cache=False,
    )
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config).bfloat16().train()
        if not lora:
            return model
        import peft

        adapted = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
        return peft.get_peft_model(model, peft.LoraConfig(r=16, target_modules=list(adapted)))


def row_of(layers: int, tokens: int, budget: str, *, lora: bool) -> Row:
    """Plan and follow one step."""
    model = llama(layers, tokens, lora=lora)
    ids = torch.zeros(1, tokens, dtype=torch.long, device="meta")
    sample = fxremat.Sample((), {"input_ids": ids, "labels": ids})
    row: Row = {"trained": "LoRA" if lora else "all", "layers": layers, "budget": budget}
    try:
        found = fxremat.estimate(
            model,
            sample,
            device="H100",
            budget=budget,
            loss="own",
            verify=True,
        ).verified
    except BudgetError as error:
        return {**row, "least_bytes": error.least_budget_bytes}
    assert found is not None
    return {
        **row,
        "budget_bytes": found.plan.budget_bytes,
        "full_bytes": found.plan.baseline_peak_bytes,
        "predicted_bytes": found.plan.predicted_peak_bytes,
        "allocated_bytes": found.allocated_bytes,
        "predicted_reserved_bytes": found.plan.predicted_reserved_bytes,
        "reserved_bytes": found.reserved_bytes,
        "planned_s": found.planned_s,
        "seconds": found.seconds,
        "holds": found.holds,
    }


def main() -> None:
    """Print the table and save ``results/big_plans.json``."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=8192)
    asked = parser.parse_args()
    # Half-precision attention would be cuDNN's, which the stand-in does not run.
    torch.backends.cuda.enable_cudnn_sdp(False)
    rows = Rows("big_plans", {"tokens": asked.tokens})
    for lora in (False, True):
        for budget in BUDGETS:
            torch._dynamo.reset()
            rows.add(row_of(asked.layers, asked.tokens, budget, lora=lora))
    show(
        "Plans for 80 GiB, followed",
        ["trained", "budget", "everything kept", "predicted", "allocated", "reserved", "s"],
        [
            [
                row["trained"],
                row["budget"],
                f"{row['full_bytes']:,}",
                f"{row['predicted_bytes']:,}",
                f"{row['allocated_bytes']:,}",
                f"{row['reserved_bytes']:,}",
                f"{row['planned_s']:.0f}",
            ]
            for row in rows.rows
            if "holds" in row
        ],
    )
    rows.save()


if __name__ == "__main__":
    main()
