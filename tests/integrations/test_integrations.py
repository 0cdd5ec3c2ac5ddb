"""Callbacks and prepare for trainers of others: their trainings, within a budget."""

from __future__ import annotations

import copy
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import accelerate
import lightning
import pytest
import torch
import transformers
from lightning.pytorch.loggers.logger import Logger
from torch import Tensor, nn

import fxremat
from fxremat.integrations.accelerate import check_state, prepare
from fxremat.integrations.lightning import FxrematCallback as LightningCallback
from fxremat.integrations.transformers import FxrematCallback
from tests.clients import Lit, Net, Tokens, fitted, gpt2, lora, rows, trained
from tests.models.bits import assert_bitwise_equal

pytestmark = [
    pytest.mark.usefixtures("fresh_dynamo"),
    pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning"),
]

BUDGET = "24 MiB"


def test_a_missing_library_is_named_with_its_remedy() -> None:
    code = (
        "import importlib, sys, fxremat, fxremat.api, fxremat.integrations\n"
        "for library in ('accelerate', 'lightning', 'transformers'):\n"
        "    assert library not in sys.modules\n"
        "    sys.modules[library] = None\n"
        "    try:\n"
        "        importlib.import_module('fxremat.integrations.' + library)\n"
        "    except ImportError as error:\n"
        "        assert 'fxremat[' + library + ']' in str(error), error\n"
        "    else:\n"
        "        sys.exit(library + ' was imported')\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_trainer_with_a_callback_leaves_behind_what_it_does_without(tmp_path: Path) -> None:
    expected = trained(lora(), tmp_path / "plain", count=26)
    model, callback = lora(), FxrematCallback(BUDGET)
    found = trained(model, tmp_path / "planned", count=26, callbacks=[callback])
    assert found["history"] == expected["history"]
    assert found["names"] == expected["names"]
    assert found["files"] == expected["files"] and found["files"]
    assert_bitwise_equal(found["state"], expected["state"])
    planned = callback.model
    assert planned is not None
    assert all(plan.counted_bytes <= plan.budget_bytes for plan in planned.plans)
    losses = [row for row in found["log"] if "loss" in row]
    assert len(losses) == 16
    for row in losses:
        assert row["budget_bytes"] == 24 << 20
        assert 0 < row["predicted_peak_bytes"] <= row["budget_bytes"]
        assert "measured_peak_bytes" not in row  # nobody tells it on a CPU
    assert not any("budget_bytes" in row for row in found["log"] if "loss" not in row)


def trainer(model: nn.Module, folder: Path, callback: Any, **settings: Any) -> Any:
    arguments = {
        "output_dir": str(folder), "per_device_train_batch_size": 4, "max_steps": 2,
        "report_to": [], "use_cpu": True, "disable_tqdm": True, "logging_steps": 1,
        "save_strategy": "no", **settings,
    }  # fmt: skip
    arguments = transformers.TrainingArguments(**arguments)
    return transformers.Trainer(
        model=model, args=arguments, train_dataset=Tokens(8, 0), callbacks=[callback]
    )


@pytest.mark.parametrize(
    ("settings", "argument"),
    [
        ({"torch_compile": True}, "torch_compile"),
        ({"gradient_checkpointing": True}, "checkpointing"),
    ],
)
def test_what_recomputes_or_compiles_as_well_is_refused_at_once(
    settings: dict[str, Any], argument: str, tmp_path: Path
) -> None:
    with pytest.raises(fxremat.ArgumentError) as caught:
        trainer(gpt2(), tmp_path, FxrematCallback(BUDGET), **settings)
    assert argument in caught.value.argument


def test_a_model_that_checkpoints_already_is_refused(tmp_path: Path) -> None:
    model = gpt2()
    model.gradient_checkpointing_enable()
    with pytest.raises(fxremat.ArgumentError, match="checkpointing"):
        trainer(model, tmp_path, FxrematCallback(BUDGET)).train()


def test_a_trainer_takes_a_section_of_a_file(tmp_path: Path) -> None:
    callback = FxrematCallback.from_dict({"budget": "24MiB", "loss": "own", "optimizer": "none"})
    trainer(gpt2(), tmp_path, callback).train()
    assert callback.model is not None
    assert callback.model.plan.budget_bytes == 24 << 20
    counted = FxrematCallback(BUDGET, loss="own")
    trainer(gpt2(), tmp_path, counted).train()
    assert counted.model is not None
    plans = callback.model.plan, counted.model.plan
    assert plans[0].least_budget_bytes == plans[1].least_budget_bytes  # by now the state exists
    beyond = "state of optimizers beyond what optimizer= says"
    assert [beyond in dict(plan.also_held) for plan in plans] == [True, False]
    with pytest.raises(fxremat.ArgumentError) as caught:
        FxrematCallback.from_dict({"budget": "24MiB", "budgte": 1})
    assert caught.value.argument == "budgte"


def test_options_are_read_when_the_callback_is_made() -> None:
    for make in (FxrematCallback, LightningCallback):
        with pytest.raises(fxremat.BudgetError):
            make("many")
        with pytest.raises(fxremat.ArgumentError) as caught:
            make(BUDGET, sample=torch.zeros(1))
        assert caught.value.argument == "sample"
        with pytest.raises(fxremat.ArgumentError):
            make(BUDGET, offload="sometimes")


def test_too_small_a_budget_leaves_the_model_as_it_was(tmp_path: Path) -> None:
    model = gpt2()
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(fxremat.BudgetError) as caught:
        trainer(model, tmp_path, FxrematCallback("64 KiB")).train()
    assert caught.value.least_budget_bytes is not None
    assert_bitwise_equal(model.state_dict(), before)
    ids = torch.zeros(2, 8, dtype=torch.long)
    model.train()(input_ids=ids, labels=ids).loss.backward()  # without a plan
    assert all(p.grad is not None for p in model.parameters())


def test_what_is_compiled_already_is_left_alone(tmp_path: Path) -> None:
    model = fxremat.compile(gpt2(), budget=BUDGET)
    callback = FxrematCallback("20 GiB")
    done = trainer(model, tmp_path, callback)
    done.train()
    assert callback.model is model
    assert [row["budget_bytes"] for row in done.state.log_history[:2]] == [24 << 20] * 2
    with pytest.raises(fxremat.ArgumentError, match="compiled by torch"):
        inner = gpt2()
        inner.compile(backend="eager")
        trainer(inner, tmp_path, FxrematCallback(BUDGET)).train()


def test_plans_are_kept_while_a_trainer_trains_on(tmp_path: Path) -> None:
    model, callback = gpt2(), FxrematCallback(BUDGET)
    done = trainer(model, tmp_path, callback)
    done.train()
    first = callback.model
    assert first is not None and len(first.plans) == 1
    assert "BudgetError" not in repr(model)
    done.train()
    assert callback.model is first and len(first.plans) == 1
    assert type(copy.deepcopy(model)) is type(model)


class Replaces(transformers.TrainerCallback):
    """Has something else run for the model's forward, from the second step on."""

    def on_step_end(self, _args: Any, _state: Any, _control: Any, *, model: Any, **_: Any) -> None:
        forward = type(model).forward
        model.forward = lambda **inputs: forward(model, **inputs)


def test_a_forward_replaced_while_training_is_told(tmp_path: Path) -> None:
    done = trainer(gpt2(), tmp_path, FxrematCallback(BUDGET))
    done.add_callback(Replaces())
    with pytest.raises(fxremat.ArgumentError, match=r"(?s)forward.*FXR409"):
        done.train()
    assert done.state.global_step == 1


class Recorder(Logger):
    name, version = "recorder", 0

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[dict[str, float]] = []

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        self.rows.append({**metrics, "step": step})

    def log_hyperparams(self, *_args: Any, **_kwargs: Any) -> None:
        pass


@pytest.fixture
def no_process_group() -> Iterator[None]:
    """What a test makes of one is gone after it."""
    environment = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(environment)
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


@pytest.mark.usefixtures("no_process_group")
@pytest.mark.parametrize("settings", [{}, {"strategy": "ddp"}], ids=["one process", "DDP"])
@pytest.mark.parametrize("module", [None, "net"])
def test_lightning_fits_as_without(
    module: str | None, settings: dict[str, Any], tmp_path: Path
) -> None:
    expected = fitted(Lit(Net()), tmp_path / "plain", **settings)
    logger, callback = Recorder(), LightningCallback(BUDGET, module=module)
    model = Lit(Net())
    found = fitted(model, tmp_path / "ours", logger=logger, callbacks=[callback], **settings)
    assert_bitwise_equal(found, expected)
    (row, *_) = [row for row in logger.rows if "fxremat/budget_bytes" in row]
    assert row["fxremat/budget_bytes"] == 24 << 20
    assert 0 < row["fxremat/predicted_peak_bytes"] <= 24 << 20
    planned = callback.model
    assert planned is not None and planned.plans
    assert type(planned).__name__ == ("Net" if module else "Lit")


def test_lightning_averages_a_planned_module(tmp_path: Path) -> None:
    def averaged(folder: Path, *callbacks: Any) -> dict[str, Any]:
        swa = lightning.pytorch.callbacks.StochasticWeightAveraging(swa_lrs=1e-2)
        return fitted(Lit(Net(norm=False)), folder, epochs=(4,), callbacks=[*callbacks, swa])

    found = averaged(tmp_path / "ours", LightningCallback(BUDGET))
    assert_bitwise_equal(found, averaged(tmp_path / "plain"))


def test_too_small_a_budget_leaves_a_lightning_module_as_it_was(tmp_path: Path) -> None:
    model = Lit(Net())
    with pytest.raises(fxremat.BudgetError):
        fitted(model, tmp_path, callbacks=[LightningCallback("1 KiB")])
    model.train()(rows(16, 0)).sum().backward()  # without a plan
    assert all(p.grad is not None for p in model.parameters())


class Direct(Lit):
    """Its training step passes its forward by."""

    def training_step(self, batch: list[Tensor], _index: int) -> Tensor:
        return self.net(batch[0]).square().mean()


def test_a_step_that_passes_the_plan_by_is_told(tmp_path: Path) -> None:
    with pytest.raises(fxremat.ArgumentError, match="module="):
        fitted(Direct(Net()), tmp_path, callbacks=[LightningCallback(BUDGET)])
    fitted(Direct(Net()), tmp_path, callbacks=[LightningCallback(BUDGET, module="net")])
    with pytest.raises(fxremat.ArgumentError, match="net"):
        fitted(Lit(Net()), tmp_path, callbacks=[LightningCallback(BUDGET, module="tower")])


def accelerated(order: str) -> dict[str, Any]:
    accelerate.state.AcceleratorState._reset_state(True)
    torch._dynamo.reset()
    client = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    if order != "ours":
        model, optimizer = client.prepare(model, optimizer)
    if order != "plain":
        optimizer, model = prepare(client, optimizer, model, budget=BUDGET)
    assert len(client._models) == len(client._optimizers) == 1
    torch.manual_seed(0)
    for seed in range(4):
        with client.accumulate(model):
            client.backward(model(rows(16, seed)).square().mean())
            optimizer.step()
            optimizer.zero_grad()
    return model.state_dict()


@pytest.mark.parametrize("order", ["ours", "prepared before"])
def test_prepare_in_either_order_trains_as_without(order: str) -> None:
    assert_bitwise_equal(accelerated(order), accelerated("plain"))


def test_prepare_tells_the_plan_what_the_accelerator_knows() -> None:
    accelerate.state.AcceleratorState._reset_state(True)
    client = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters())
    model, optimizer = prepare(client, model, optimizer, budget=BUDGET, sample=rows(16, 0))
    told = fxremat.plan(Net(), rows(16, 0), BUDGET, optimizer=torch.optim.AdamW, accumulate=True)
    untold = fxremat.plan(Net(), rows(16, 0), BUDGET)
    assert model.plan.predicted_peak_bytes == told.predicted_peak_bytes
    assert model.plan.predicted_peak_bytes > untold.predicted_peak_bytes


def test_prepare_refuses_what_it_cannot_plan() -> None:
    accelerate.state.AcceleratorState._reset_state(True)
    client = accelerate.Accelerator(cpu=True)
    with pytest.raises(fxremat.ArgumentError, match="2 models"):
        prepare(client, Net(), Net(), budget=BUDGET)
    accelerate.state.AcceleratorState._reset_state(True)
    client = accelerate.Accelerator(cpu=True, dynamo_backend="eager")
    with pytest.raises(fxremat.ArgumentError, match="dynamo_backend"):
        prepare(client, Net(), budget=BUDGET)
    accelerate.state.AcceleratorState._reset_state(True)


def test_what_shards_a_model_is_refused() -> None:
    plugin = SimpleNamespace(backend=accelerate.utils.DynamoBackend.NO)
    for kind in (accelerate.DistributedType.FSDP, accelerate.DistributedType.DEEPSPEED):
        with pytest.raises(fxremat.ArgumentError, match=kind.value):
            check_state(SimpleNamespace(dynamo_plugin=plugin, distributed_type=kind))
    with pytest.raises(fxremat.ArgumentError, match="Sharding"):
        LightningCallback(BUDGET).setup(SimpleNamespace(strategy=Sharding()), Lit(Net()), "fit")


class Sharding:
    """A strategy of somebody else."""


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_peaks_are_measured_on_a_device_that_tells_them(tmp_path: Path) -> None:
    done = trainer(gpt2(), tmp_path, FxrematCallback(BUDGET), use_cpu=False, max_steps=4)
    done.train()
    first, _second, *others = [row for row in done.state.log_history if "loss" in row]
    assert "measured_peak_bytes" not in first  # it was planned meanwhile
    assert len(others) == 2
    assert all(0 < row["measured_peak_bytes"] <= row["budget_bytes"] for row in others)
    logger = Recorder()
    settings = {"accelerator": "cuda", "logger": logger}
    fitted(Lit(Net()), tmp_path, callbacks=[LightningCallback(BUDGET)], **settings)
    row = [row for row in logger.rows if "fxremat/budget_bytes" in row][-1]
    assert 0 < row["fxremat/measured_peak_bytes"] <= row["fxremat/budget_bytes"]
