"""Fine-tune a Llama by LoRA with transformers' Trainer, within a byte budget.

    python -m examples.lora

The callback is all that differs from the training without a budget. The plan is made at the first
step, of the batch as the trainer collates it; the optimizer's state is counted. ``loss=`` says
that the trainer reads nothing of the outputs but the loss, so the logits get no gradient.

The model is small and random, the text is what Python's ``help("topics")`` shows: nothing is
downloaded. With your own, replace ``make_model`` and ``Passages``.
"""

from __future__ import annotations

import tempfile
from pydoc_data.topics import topics

import peft
import torch
import transformers
from torch import Tensor, nn
from torch.utils.data import Dataset

from examples.compare import Run, main, measure
from fxremat.integrations.transformers import FxrematCallback

LENGTH, BATCH = 128, 8


class Passages(Dataset[dict[str, Tensor]]):
    """Passages of ``LENGTH`` characters as token ids; the labels are the same."""

    def __init__(self) -> None:
        text = "\n\n".join(topics[name] for name in sorted(topics))
        codes = torch.tensor(list(text.encode("ascii", "replace")))
        self.rows = codes[: len(codes) // LENGTH * LENGTH].view(-1, LENGTH)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input_ids": self.rows[index], "labels": self.rows[index]}


def make_model() -> nn.Module:
    """A Llama of 4 layers with adapters at its attention; always the same one."""
    transformers.set_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=128,
        hidden_size=128,
        intermediate_size=344,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=LENGTH,
    )
    adapters = peft.LoraConfig(
        target_modules=["q_proj", "k_proj", "v_proj", "o_proj"], r=8, lora_dropout=0.05
    )
    return peft.get_peft_model(transformers.LlamaForCausalLM(config), adapters)


def train(name: str, steps: int, callback: FxrematCallback | None) -> Run:
    """Train the model; with a callback, within its budget."""
    with tempfile.TemporaryDirectory() as folder:
        arguments = transformers.TrainingArguments(
            output_dir=folder,
            max_steps=steps,
            per_device_train_batch_size=BATCH,
            learning_rate=1e-3,
            logging_steps=1,
            report_to=[],
            disable_tqdm=True,
            use_cpu=True,
            save_strategy="no",
        )
        trainer = transformers.Trainer(
            model=make_model(),
            args=arguments,
            train_dataset=Passages(),
            callbacks=[callback] if callback else [],
        )
        trainer.remove_callback(transformers.trainer_callback.PrinterCallback)
        trainer.train()
    losses = [row["loss"] for row in trainer.state.log_history if "loss" in row]
    # One more step, to measure it: after training the trainer's model runs without a plan again.
    model = callback.model if callback and callback.model else trainer.model
    batches = iter(trainer.get_train_dataloader())
    (batch, *_), count = trainer.get_batch_samples(batches, 1, trainer.args.device)
    optimizer = trainer.optimizer

    def step() -> None:
        trainer.training_step(model, batch, count)
        optimizer.zero_grad()

    return measure(name, losses, model, step)


def run(steps: int, budget: str) -> tuple[Run, Run]:
    """The same training without a budget and within one."""
    plain = train("plain", steps, None)
    callback = FxrematCallback(budget, loss="own")
    return plain, train("within a budget", steps, callback)


if __name__ == "__main__":
    main(run, __doc__, steps=30, budget="32 MiB")
