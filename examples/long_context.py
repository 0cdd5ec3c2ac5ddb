"""Find the longest context that a Llama can be trained on within a byte budget, then train on it.

    python -m examples.long_context

``max_batch`` captures the step once, at a short sample, and finds how long sequences may be: of
dimension 1 of ``input_ids``, which the labels follow. Nothing of any other length is run. What it
finds is then planned and trained, beside the same training without a budget. Give it ``dim=0`` for
the largest batch.

The model is small and random, the text is what Python's ``help("topics")`` shows.
"""

from __future__ import annotations

from pydoc_data.topics import topics
from typing import Any

import torch
import transformers
from torch import Tensor, nn

import fxremat
from examples.compare import Run, main, measure

SHORT, MOST, BATCH = 96, 4096, 2


def make_model() -> nn.Module:
    """A Llama of 4 layers; always the same one."""
    transformers.set_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=128,
        hidden_size=128,
        intermediate_size=344,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=MOST,
        use_cache=False,
    )
    return transformers.LlamaForCausalLM(config).train()


def loss_of(outputs: Any) -> Tensor:
    """What the loop below reads of the outputs: without it, the logits get a gradient as well."""
    loss: Tensor = outputs.loss
    return loss


def draw(length: int, seed: int) -> dict[str, Tensor]:
    """Passages of the text, ``(BATCH, length)`` characters; the labels are the same."""
    text = "\n\n".join(topics[name] for name in sorted(topics)).encode("ascii", "replace")
    generator = torch.Generator().manual_seed(seed)
    starts = torch.randint(len(text) - length, (BATCH,), generator=generator).tolist()
    ids = torch.tensor([list(text[start : start + length]) for start in starts])
    return {"input_ids": ids, "labels": ids.clone()}


def train(name: str, steps: int, length: int, budget: str | None) -> Run:
    """Train on sequences of that length, within a budget if there is one."""
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    if budget is not None:
        sample = draw(length, 0)
        model = fxremat.compile(model, sample, budget, optimizer=optimizer, loss=loss_of)
    losses = []
    for seed in range(steps):
        batch = draw(length, seed)
        loss = loss_of(model(**batch))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))

    def step() -> None:
        loss_of(model(**batch)).backward()
        optimizer.zero_grad()

    return measure(name, losses, model, step)


def longest(budget: str) -> int:
    """The longest context that fits."""
    sizes = fxremat.max_batch(
        make_model(),
        draw(SHORT, 0),
        budget,
        dim=("input_ids", 1),
        most=MOST,
        optimizer=torch.optim.AdamW,
        loss=loss_of,
    )
    sizes.show()
    return sizes.largest.size


def run(steps: int, budget: str) -> tuple[Run, Run]:
    """The same training without a budget and within one, on the longest context for that."""
    length = longest(budget)
    plain = train("plain", steps, length, None)
    return plain, train("within a budget", steps, length, budget)


if __name__ == "__main__":
    main(run, __doc__, steps=4, budget="32 MiB")
