"""trl's trainer for supervised fine-tuning leaves behind what it does without a plan."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

import fxremat
from fxremat.integrations.transformers import FxrematCallback
from tests.models.bits import assert_bitwise_equal
from tests.works_with.subjects import VOCABULARY, llama, tokens

trl = pytest.importorskip("trl")
datasets = pytest.importorskip("datasets")
tokenizers = pytest.importorskip("tokenizers")
peft = pytest.importorskip("peft")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.usefixtures("fresh_dynamo", "quick_search"),
    pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning"),
]

STEPS = 8


def tokenizer() -> Any:
    words = {f"w{number}": number for number in range(VOCABULARY - 2)}
    words |= {"<pad>": VOCABULARY - 2, "<eos>": VOCABULARY - 1}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<pad>"))
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="<pad>", eos_token="<eos>"
    )


def sentences() -> Any:
    rows: list[Tensor] = [row for number in range(4) for row in tokens(number)[0]]
    return datasets.Dataset.from_dict({"input_ids": [row.tolist() for row in rows]})


def fine_tuned(model: nn.Module, folder: Path, **given: Any) -> tuple[dict[str, Tensor], list[Any]]:
    torch._dynamo.reset()
    settings = trl.SFTConfig(
        output_dir=str(folder), per_device_train_batch_size=6, max_steps=STEPS, report_to=[],
        use_cpu=True, disable_tqdm=True, logging_steps=1, save_strategy="no", seed=1, bf16=False,
        gradient_checkpointing=False, learning_rate=1e-3,
    )  # fmt: skip
    trainer = trl.SFTTrainer(
        model=model,
        args=settings,
        train_dataset=sentences(),
        processing_class=tokenizer(),
        **given,
    )
    trainer.train()
    losses = [row["loss"] for row in trainer.state.log_history if "loss" in row]
    return trainer.model.state_dict(), losses


def adapters() -> Any:
    return peft.LoraConfig(target_modules=["q_proj", "v_proj"], r=4)


@pytest.mark.parametrize("options", [{}, {"peft_config": adapters}], ids=["all", "LoRA"])
@pytest.mark.parametrize("budget", ["1 GiB", "min"])
def test_supervised_fine_tuning(budget: str, options: dict[str, Any], tmp_path: Path):
    expected, losses = fine_tuned(
        llama(), tmp_path / "plain", **{name: make() for name, make in options.items()}
    )
    assert len(losses) == STEPS
    callback = FxrematCallback(budget)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = fine_tuned(
            llama(),
            tmp_path / "planned",
            callbacks=[callback],
            **{name: make() for name, make in options.items()},
        )
    assert found[1] == losses
    assert_bitwise_equal(found[0], expected)
    assert callback.model is not None and callback.model.plans
    over = [w for w in caught if issubclass(w.category, fxremat.BudgetWarning)]
    if budget != "min":
        assert not over, over[0].message
