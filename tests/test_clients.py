"""Trainers and wrappers of others leave behind what they leave with the plain model."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import accelerate
import lightning
import pytest
import torch
import transformers
from torch import nn

import fxremat
from tests.clients import Lit, Net, fitted, gpt2, lora, rows, trained
from tests.models.bits import assert_bitwise_equal

pytestmark = [
    pytest.mark.usefixtures("fresh_dynamo"),
    pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning"),
]

BUDGET = "24 MiB"
Make = Callable[[nn.Module], nn.Module]


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    transformers.logging.set_verbosity_error()
    yield


def plain(model: nn.Module) -> nn.Module:
    return model


def planned(model: nn.Module) -> fxremat.CompiledModule:
    """At the first training call, of the batch that the client makes."""
    return fxremat.compile(model, budget=BUDGET)


@pytest.mark.parametrize(
    ("build", "settings"),
    [
        pytest.param(gpt2, {"count": 26}, id="defaults"),
        pytest.param(gpt2, {}, id="longer", marks=pytest.mark.slow),
        pytest.param(lora, {}, id="LoRA", marks=pytest.mark.slow),
        pytest.param(
            gpt2,
            {"label_smoothing_factor": 0.1, "count": 26},
            id="label smoothing",
            marks=pytest.mark.slow,
        ),
    ],
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


@pytest.mark.slow
def test_trainer_in_bf16(tmp_path: Path):
    """Eager keeps casts of weights over a step, a graph need not: both round as the graph does."""
    least = trained(fxremat.compile(gpt2(), budget="min"), tmp_path / "least", count=26, bf16=True)
    roomy = trained(planned(gpt2()), tmp_path / "roomy", count=26, bf16=True)
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


def test_a_backend_that_accelerate_does_not_know_is_never_taken_silently(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("ACCELERATE_DYNAMO_BACKEND", "no")  # transformers sets it, for good
    arguments = {"output_dir": str(tmp_path), "use_cpu": True, "report_to": []}
    with pytest.raises(ValueError, match="DynamoBackend"):
        arguments = transformers.TrainingArguments(**arguments, torch_compile_backend="fxremat")
        transformers.Trainer(model=gpt2(), args=arguments)
