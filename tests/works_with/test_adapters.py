"""Adapters of peft on a Llama, over a base in floats and over quantized ones."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from tests.works_with.subjects import language, llama, replaced
from tests.works_with.test_quantized import eight_bits, four_bits, quantized
from tests.works_with.training import BUDGETS, Subject, check

peft = pytest.importorskip("peft")
quantization = pytest.importorskip("torchao.quantization")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.usefixtures("fresh_dynamo", "quick_search"),
    pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning"),
]


def with_adapters(model: nn.Module) -> nn.Module:
    torch.manual_seed(0)
    names = ["q_proj", "v_proj", "up_proj"]
    config = peft.LoraConfig(target_modules=names, r=4, lora_dropout=0.1)
    return peft.get_peft_model(model, config)


def in_bits(bits: int) -> nn.Module:
    model = replaced(llama(), four_bits if bits == 4 else eight_bits)
    model.is_loaded_in_4bit, model.is_loaded_in_8bit = bits == 4, bits == 8
    return model


def in_int8() -> nn.Module:
    config = quantization.Int8WeightOnlyConfig()
    return replaced(llama(), lambda linear: quantized(linear, config))


ADAPTED: dict[str, Callable[[], nn.Module]] = {
    "LoRA": lambda: with_adapters(llama()),
    "QLoRA, bitsandbytes 4-bit": lambda: with_adapters(in_bits(4)),
    "QLoRA, bitsandbytes 8-bit": lambda: with_adapters(in_bits(8)),
    "QLoRA, torchao int8": lambda: with_adapters(in_int8()),
}


@functools.cache
def subject(name: str) -> Callable[[], Subject]:
    return lambda: language(ADAPTED[name])


@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize("name", ADAPTED)
def test_adapters_train(name: str, budget: Any):
    check(
        subject(name),
        budget,
        learns="bitsandbytes 8-bit" in name,
        uncounted_bytes=64 * 14 if "bitsandbytes 4-bit" in name else 0,  # a table for each weight
    )
