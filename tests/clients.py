"""Models of others' trainers, and what a training with those leaves behind."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning
import peft
import torch
import transformers
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

from tests.models.zoo import seeded

VOCABULARY, LENGTH = 97, 24


class Tokens(Dataset[dict[str, Tensor]]):
    def __init__(self, count: int, seed: int) -> None:
        with seeded(seed):
            self.rows = torch.randint(0, VOCABULARY, (count, LENGTH))

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input_ids": self.rows[index], "labels": self.rows[index]}


def gpt2() -> nn.Module:
    transformers.set_seed(0)
    config = transformers.GPT2Config(
        vocab_size=VOCABULARY, n_positions=32, n_embd=32, n_layer=1, n_head=2,
        bos_token_id=0, eos_token_id=0, loss_type="ForCausalLM",
    )  # fmt: skip
    return transformers.GPT2LMHeadModel(config)


def lora() -> nn.Module:
    transformers.set_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=2, max_position_embeddings=64,
    )  # fmt: skip
    adapters = peft.LoraConfig(target_modules=["q_proj", "v_proj"], r=4, lora_dropout=0.1)
    return peft.get_peft_model(transformers.LlamaForCausalLM(config), adapters)


def trained(
    model: nn.Module,
    folder: Path,
    *,
    count: int = 102,
    callbacks: Sequence[Any] = (),
    **settings: Any,
) -> dict[str, Any]:
    """What four epochs of a Trainer leave behind; it is stopped once, and resumed.

    With ``count`` rows of data, those are 52 steps.
    """
    torch._dynamo.reset()
    arguments = {
        "output_dir": str(folder), "per_device_train_batch_size": 4, "num_train_epochs": 2,
        "gradient_accumulation_steps": 2, "max_grad_norm": 0.5, "logging_steps": 1,
        "eval_strategy": "epoch", "save_strategy": "epoch", "report_to": [], "use_cpu": True,
        "seed": 1, "disable_tqdm": True, **settings,
    }  # fmt: skip

    def trainer(epochs: int) -> Any:
        return transformers.Trainer(
            model=model,
            args=transformers.TrainingArguments(**{**arguments, "num_train_epochs": epochs}),
            train_dataset=Tokens(count, 0),
            eval_dataset=Tokens(10, 1),
            callbacks=list(callbacks),
        )

    trainer(2).train()
    resumed = trainer(4)
    resumed.train(resume_from_checkpoint=True)
    told = ("loss", "eval_loss", "grad_norm", "epoch")
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {
        "log": resumed.state.log_history,
        "history": [{k: row[k] for k in told if k in row} for row in resumed.state.log_history],
        "state": model.state_dict(),
        "names": [str(path.relative_to(folder)) for path in files],
        "files": {
            str(path.relative_to(folder)): path.read_bytes()
            for path in files
            if path.suffix == ".safetensors" or path.name.endswith("config.json")
        },
    }


class Net(nn.Module):
    def __init__(self, *, norm: bool = True) -> None:
        super().__init__()
        with seeded(0):
            self.layers = nn.Sequential(
                nn.Linear(8, 8), nn.BatchNorm1d(8) if norm else nn.LayerNorm(8), nn.Tanh(),
                nn.Dropout(0.1), nn.Linear(8, 8),
            )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


def rows(count: int, seed: int) -> Tensor:
    with seeded(seed):
        return torch.randn(count, 8)


class Lit(lightning.LightningModule):
    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)

    def training_step(self, batch: list[Tensor], _index: int) -> Tensor:
        loss = self(batch[0]).square().mean()
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: list[Tensor], _index: int) -> None:
        self.log("valid", self(batch[0]).square().mean())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), 1e-2)


def fitted(
    model: lightning.LightningModule,
    folder: Path,
    *,
    epochs: tuple[int, ...] = (2, 4),
    **settings: Any,
) -> dict[str, Any]:
    """What epochs of 13 steps leave behind, stopped and resumed between ``epochs``."""
    torch._dynamo.reset()
    arguments = {
        "accelerator": "cpu", "devices": 1, "logger": False, "enable_progress_bar": False,
        "enable_model_summary": False, "default_root_dir": folder, "accumulate_grad_batches": 2,
        "gradient_clip_val": 0.5, **settings,
    }  # fmt: skip
    data = DataLoader(TensorDataset(rows(196, 0)), batch_size=8)
    path = None
    for most in epochs:
        trainer = lightning.Trainer(max_epochs=most, **arguments)
        lightning.seed_everything(0, verbose=False)
        trainer.fit(model, data, data, ckpt_path=path, weights_only=False)
        path = trainer.checkpoint_callback.best_model_path
    return {
        "state": model.state_dict(),
        "saved": torch.load(path, weights_only=False)["state_dict"],
        "metrics": dict(trainer.callback_metrics),
    }
