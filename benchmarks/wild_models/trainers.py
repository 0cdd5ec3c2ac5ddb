"""Models that a trainer of another library trains, with the callback of transformers."""

from __future__ import annotations

import gc
import tempfile
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from benchmarks.rows import Row
from benchmarks.wild_models.broken_texts import SMALL, ids_of, labelled
from benchmarks.wild_models.registry import Case, add
from benchmarks.wild_row import MEASURED, STEPS, aside, peak_of, resident_bytes, seed, told
from tests.models.bits import first_difference

BATCH, LENGTH = 2, 128


def _llama() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    layers = {"num_hidden_layers": 8, "intermediate_size": 512, "num_key_value_heads": 2}
    others = {"attention_dropout": 0.1, "vocab_size": 2000}
    ids = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    return LlamaForCausalLM(LlamaConfig(**{**SMALL, **layers, **others, **ids}))


def _lora() -> Any:
    from peft import LoraConfig, get_peft_model

    lora = LoraConfig(
        r=4, target_modules=["q_proj", "v_proj"], lora_dropout=0.1, task_type="CAUSAL_LM"
    )
    return get_peft_model(_llama(), lora)


def _tokenizer() -> Any:
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    words = {"<pad>": 0, "<s>": 1, "</s>": 2, "<unk>": 3, **{f"w{i}": i for i in range(4, 2000)}}
    tokens = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    names = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    return PreTrainedTokenizerFast(tokenizer_object=tokens, **names)


def _trainer_class() -> Any:
    from trl import SFTTrainer

    class Watched(SFTTrainer):
        """Notes peaks of steps (forward and backward), and the gradients that each leaves."""

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            self.peaks: list[int] = []
            self.left: list[Any] = []
            super().__init__(*args, **kwargs)

        def training_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Tensor:
            train = super().training_step
            state = [t for t in tree_leaves(self.optimizer.state_dict()) if torch.is_tensor(t)]
            resident = resident_bytes(self.model, inputs, state)
            loss: list[Tensor] = []

            def step() -> None:
                loss.append(train(model, inputs, *args, **kwargs))

            if len(self.left) >= STEPS - MEASURED:
                self.peaks.append(resident + peak_of(step))
            else:
                step()
            named = self.model.named_parameters()
            self.left.append({name: aside(p.grad) for name, p in named})
            return loss[0]

    return Watched


def _compiling(backend: Any) -> Any:
    """Has the model run through ``torch.compile``."""
    from transformers import TrainerCallback

    class Compiling(TrainerCallback):  # type: ignore[misc]
        def on_train_begin(self, *_: Any, model: Any, **_others: Any) -> None:
            torch._dynamo.reset()
            model.compile(backend=backend)

    return Compiling()


def train(make: Callable[[], Any], *callbacks: Any) -> Any:
    """A trainer that has trained a model of a seed."""
    from datasets import Dataset
    from trl import SFTConfig

    torch._dynamo.reset()
    gc.collect()
    seed(0)
    model = make()
    rows = [{"input_ids": ids} for ids in ids_of(BATCH * STEPS, LENGTH, 2000).tolist()]
    with tempfile.TemporaryDirectory() as folder:
        options: dict[str, Any] = {
            "output_dir": folder, "per_device_train_batch_size": BATCH, "max_steps": STEPS,
            "report_to": "none", "gradient_checkpointing": False, "save_strategy": "no",
            "use_cpu": True, "bf16": False, "max_length": LENGTH, "disable_tqdm": True,
            "logging_steps": 1,
        }  # fmt: skip
        trainer = _trainer_class()(
            model,
            args=SFTConfig(**options),
            train_dataset=Dataset.from_list(rows),
            processing_class=_tokenizer(),
            callbacks=list(callbacks),
        )
        trainer.train()
    return trainer


def _as_it_is(make: Callable[[], Any]) -> Row:
    from torch._dynamo.utils import counters

    trainer = train(make)
    found: list[torch.fx.GraphModule] = []

    def counting(graph: torch.fx.GraphModule, _inputs: object) -> Any:
        found.append(graph)
        return graph.forward

    row: Row = {
        "peak_bytes": max(trainer.peaks),
        "resident_bytes": resident_bytes(trainer.model),
        "step_s": trainer.state.log_history[-1]["train_runtime"] / STEPS,
        "repeats": True,
    }
    counters.clear()
    train(make, _compiling(counting))
    breaks = {" ".join(why.split())[:160]: n for why, n in counters["graph_break"].items()}
    kind = "whole" if len(found) == 1 and not breaks else "pieces"
    return {**row, "kind": kind, "graphs": len(found), "breaks": breaks}


def _within(make: Callable[[], Any], budget: int | str, expected: list[Any]) -> Row:
    from fxremat.integrations.transformers import FxrematCallback

    row: Row = {"budget": budget}
    with told(row):
        callback = FxrematCallback(budget)
        trainer = train(make, callback)
        assert callback.model is not None
        nbytes = callback.model._training.loop.budget.nbytes
        differs = [first_difference(*pair) for pair in zip(trainer.left, expected, strict=True)]
        row |= {
            "untouched": {},
            "budget_bytes": nbytes,
            "peaks_bytes": trainer.peaks,
            "used": max(trainer.peaks) / nbytes,
            "same_bits": not any(differs),
            "differs": next((d for d in differs if d), None),
            "differing_steps": [n for n, d in enumerate(differs) if d],
            "plans": len(callback.model.plans),
        }
    return row


def measure(make: Callable[[], Any], budget: str, eager_bytes: int) -> Row:
    """A row, as of any other model; without seconds."""
    if budget == "eager":
        return _as_it_is(make)
    row: Row = {"reference": "aot_eager"}
    try:
        expected = train(make, _compiling("aot_eager")).left
    except Exception as error:
        row = {"reference": "eager", "aot_eager": f"{type(error).__name__}: {error}"[:300]}
        expected = train(make).left
    asked: int | str = "min" if budget == "min" else int(float(budget) * eager_bytes)
    row |= _within(make, asked, expected)
    least = row.get("least_budget_bytes")
    if "refused" in row and least is not None:
        row["least"] = _within(make, least, expected)
    return row


def _case(make: Callable[[], Any]) -> Case:
    return labelled(make(), ids_of(BATCH, LENGTH, 2000))


for _name, _make in {"sft_llama": _llama, "sft_lora": _lora}.items():
    add(
        _name,
        "trl",
        lambda make=_make: _case(make),
        trainer=lambda budget, nbytes, make=_make: measure(make, budget, nbytes),
    )
