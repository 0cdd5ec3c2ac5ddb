"""Trainers and wrappers of others leave behind what they leave with the plain model."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

import fxremat
from tests.models.bits import assert_bitwise_equal
from tests.models.zoo import seeded

transformers = pytest.importorskip("transformers")
accelerate = pytest.importorskip("accelerate")
lightning = pytest.importorskip("lightning")
peft = pytest.importorskip("peft")

pytestmark = [
    pytest.mark.usefixtures("fresh_dynamo"),
    pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning"),
]

BUDGET = "24 MiB"
Make = Callable[[nn.Module], nn.Module]

VOCABULARY, LENGTH = 97, 24


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    transformers.logging.set_verbosity_error()
    yield


def plain(model: nn.Module) -> nn.Module:
    return model


def planned(model: nn.Module) -> fxremat.CompiledModule:
    """At the first training call, of the batch that the client makes."""
    return fxremat.compile(model, budget=BUDGET)


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


def trained(model: nn.Module, folder: Path, **settings: Any) -> dict[str, Any]:
    """What 52 steps of a Trainer leave behind; it is stopped once, and resumed."""
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
            train_dataset=Tokens(102, 0),
            eval_dataset=Tokens(10, 1),
        )

    trainer(2).train()
    resumed = trainer(4)
    resumed.train(resume_from_checkpoint=True)
    told = ("loss", "eval_loss", "grad_norm", "epoch")
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {
        "history": [{k: row[k] for k in told if k in row} for row in resumed.state.log_history],
        "state": model.state_dict(),
        "names": [str(path.relative_to(folder)) for path in files],
        "files": {
            str(path.relative_to(folder)): path.read_bytes()
            for path in files
            if path.suffix == ".safetensors" or path.name.endswith("config.json")
        },
    }


@pytest.mark.parametrize(
    ("build", "settings"),
    [(gpt2, {}), (gpt2, {"label_smoothing_factor": 0.1}), (lora, {})],
    ids=["defaults", "label smoothing", "LoRA"],
)
def test_trainer(build: Callable[[], nn.Module], settings: dict[str, Any], tmp_path: Path):
    expected = trained(build(), tmp_path / "plain", **settings)
    model = planned(build())
    found = trained(model, tmp_path / "planned", **settings)
    assert found["history"] == expected["history"]
    assert any("eval_loss" in row for row in found["history"])
    assert found["names"] == expected["names"]
    assert found["files"] == expected["files"] and found["files"]
    assert_bitwise_equal(found["state"], expected["state"])
    assert all(plan.counted_bytes <= plan.budget_bytes for plan in model.plans)


def test_trainer_in_bf16(tmp_path: Path):
    """Eager keeps casts of weights over a step, a graph need not: both round as the graph does."""
    least = trained(fxremat.compile(gpt2(), budget="min"), tmp_path / "least", bf16=True)
    roomy = trained(planned(gpt2()), tmp_path / "roomy", bf16=True)
    assert_bitwise_equal(least["state"], roomy["state"])


def test_a_planned_model_generates_and_is_saved_as_its_own_class(tmp_path: Path):
    model = planned(gpt2())
    prompt = torch.tensor([[1, 2, 3]])
    wanted = gpt2().eval().generate(input_ids=prompt, max_new_tokens=5, do_sample=False)
    assert torch.equal(
        model.eval().generate(input_ids=prompt, max_new_tokens=5, do_sample=False), wanted
    )
    model.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["architectures"] == ["GPT2LMHeadModel"]
    again = transformers.GPT2LMHeadModel.from_pretrained(tmp_path)
    assert_bitwise_equal(again.state_dict(), model.state_dict())


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


def accelerated(order: str, precision: str, folder: Path) -> dict[str, Any]:
    """What 50 steps leave behind; half way what was saved is read again."""
    torch._dynamo.reset()
    accelerate.state.AcceleratorState._reset_state(True)
    client = accelerate.Accelerator(
        mixed_precision=precision, cpu=True, gradient_accumulation_steps=2
    )
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    if order == "compiled first":
        model = fxremat.compile(model, rows(16, 0), BUDGET)
    model, optimizer = client.prepare(model, optimizer)
    if order == "prepared first":
        model = fxremat.compile(model, rows(16, 0), BUDGET)
    torch.manual_seed(0)
    for seed in range(100):
        if seed == 50:
            client.save_state(folder)
            with torch.no_grad():
                next(model.parameters()).zero_()
            client.load_state(folder)
        with client.accumulate(model):
            loss = model(rows(16 if seed < 99 else 5, seed)).float().square().mean()
            client.backward(loss)
            if client.sync_gradients:
                client.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    outputs = model.eval()(rows(16, 9)).detach()
    unwrapped = client.unwrap_model(model)
    assert isinstance(unwrapped, Net)
    assert torch.isfinite(unwrapped(rows(4, 9))).all()
    return {"state": model.state_dict(), "outputs": outputs}


@pytest.mark.parametrize("order", ["compiled first", "prepared first"])
def test_accelerate(order: str, tmp_path: Path):
    expected = accelerated("plain", "no", tmp_path / "plain")
    assert_bitwise_equal(accelerated(order, "no", tmp_path / "planned"), expected)
    assert accelerated(order, "bf16", tmp_path / "bf16")["outputs"].dtype == torch.float32


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
    """What 13 steps an epoch leave behind, stopped and resumed between ``epochs``."""
    torch._dynamo.reset()
    data = DataLoader(TensorDataset(rows(196, 0)), batch_size=8)
    path = None
    for most in epochs:
        trainer = lightning.Trainer(
            max_epochs=most, accelerator="cpu", devices=1, logger=False, enable_progress_bar=False,
            enable_model_summary=False, default_root_dir=folder, accumulate_grad_batches=2,
            gradient_clip_val=0.5, **settings,
        )  # fmt: skip
        lightning.seed_everything(0, verbose=False)
        trainer.fit(model, data, data, ckpt_path=path, weights_only=False)
        path = trainer.checkpoint_callback.best_model_path
    return {
        "state": model.state_dict(),
        "saved": torch.load(path, weights_only=False)["state_dict"],
        "metrics": dict(trainer.callback_metrics),
    }


def compiled_net(**options: Any) -> Lit:
    return Lit(planned(Net(**options)))


def compiled_whole(**options: Any) -> nn.Module:
    return fxremat.compile(Lit(Net(**options)), budget=BUDGET)


@pytest.mark.parametrize("build", [compiled_net, compiled_whole])
def test_lightning(build: Callable[[], Any], tmp_path: Path):
    assert_bitwise_equal(fitted(build(), tmp_path / "ours"), fitted(Lit(Net()), tmp_path / "plain"))


@pytest.mark.parametrize("build", [compiled_net, compiled_whole])
def test_lightning_averages(build: Callable[..., Any], tmp_path: Path):
    def averaged(model: Any, folder: Path) -> dict[str, Any]:
        callback = lightning.pytorch.callbacks.StochasticWeightAveraging(swa_lrs=1e-2)
        return fitted(model, folder, epochs=(4,), callbacks=[callback])

    expected = averaged(Lit(Net(norm=False)), tmp_path / "plain")
    assert_bitwise_equal(averaged(build(norm=False), tmp_path / "ours"), expected)
