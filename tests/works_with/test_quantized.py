"""Quantized weights: frozen ones under adapters, and layers that train in few bits."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import nn

from tests.works_with.subjects import BLOCKS, ROWS, WIDTH, adapted, blocks, rows
from tests.works_with.training import BUDGETS, Subject, check, reference

torchao = pytest.importorskip("torchao")
bitsandbytes = pytest.importorskip("bitsandbytes")

from torchao import quantization  # noqa: E402
from torchao.float8 import Float8LinearConfig, convert_to_float8_training  # noqa: E402
from torchao.optim import _AdamW  # noqa: E402
from torchao.prototype import quantized_training  # noqa: E402
from torchao.quantization import qat  # noqa: E402
from torchao.quantization.quantize_.workflows.nf4 import nf4_tensor  # noqa: E402

pytestmark = [
    pytest.mark.slow,
    pytest.mark.usefixtures("fresh_dynamo", "quick_search"),
    pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning"),
]


def quantized(linear: nn.Linear, config: Any) -> nn.Linear:
    quantization.quantize_(linear, config)
    return linear


class FourBits(nn.Module):
    """The layer of a recipe for QLoRA: a weight of type NF4."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        weight = nf4_tensor.to_nf4(linear.weight.detach())
        self.weight, self.bias = nn.Parameter(weight, requires_grad=False), linear.bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nf4_tensor.linear_nf4(x, self.weight) + self.bias


def four_bits(linear: nn.Linear) -> nn.Module:
    made = bitsandbytes.nn.Linear4bit(
        linear.in_features,
        linear.out_features,
        bias=linear.bias is not None,
        compute_dtype=torch.float32,
        quant_type="nf4",
    )
    made.load_state_dict(linear.state_dict())
    return made.requires_grad_(False).to("cpu")


def eight_bits(linear: nn.Linear) -> nn.Module:
    made = bitsandbytes.nn.Linear8bitLt(
        linear.in_features,
        linear.out_features,
        bias=linear.bias is not None,
        has_fp16_weights=False,
    )
    made.load_state_dict(linear.state_dict())
    return made.requires_grad_(False).to("cpu")


FROZEN = {
    "torchao NF4": FourBits,
    "torchao int8": lambda own: quantized(own, quantization.Int8WeightOnlyConfig()),
    "torchao int4 in int8": lambda own: quantized(
        own, quantization.IntxWeightOnlyConfig(weight_dtype=torch.int4)
    ),
    "torchao float8": lambda own: quantized(own, quantization.Float8WeightOnlyConfig()),
    "bitsandbytes 4-bit": four_bits,
    "bitsandbytes 8-bit": eight_bits,
}


CHANGES_AT_FIRST = ("bitsandbytes 8-bit",)
"""Their first forward moves what they hold, so that the step is captured twice."""


@functools.cache
def frozen(name: str) -> Any:
    return lambda: Subject(lambda: adapted(FROZEN[name]), rows)


@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize("name", FROZEN)
def test_a_frozen_base_in_few_bits_under_adapters(name: str, budget: Any):
    check(frozen(name), budget, learns=name in CHANGES_AT_FIRST)


@pytest.mark.parametrize("name", FROZEN)
def test_a_frozen_base_counts_in_its_bits(name: str):
    """Of a budget for everything, only the outputs of the previous step are not used."""
    found = check(frozen(name), 1.0, learns=name in CHANGES_AT_FIRST)
    kept_bytes = ROWS * WIDTH * 4
    recomputed_bytes = reference(frozen(name)).peak_bytes - found.peak_bytes
    weight_bytes = BLOCKS * 2 * 4 * WIDTH * WIDTH * 4
    assert found.budget_bytes - found.peak_bytes - max(0, recomputed_bytes) < (
        kept_bytes + weight_bytes // 4
    )


def float8() -> nn.Module:
    return convert_to_float8_training(blocks(), config=Float8LinearConfig(emulate=True))


def int8() -> nn.Module:
    model = blocks()
    quantization.quantize_(model, quantized_training.int8_weight_only_quantized_training())
    return model


def int8_products() -> nn.Module:
    model = blocks().bfloat16()
    quantization.quantize_(model, quantized_training.Int8MixedPrecisionTrainingConfig())
    return model


def fake_quantized() -> nn.Module:
    activations = qat.IntxFakeQuantizeConfig(torch.int8, "per_token", is_symmetric=False)
    weights = qat.IntxFakeQuantizeConfig(torch.int4, group_size=32)
    model = blocks()
    config = qat.QATConfig(activation_config=activations, weight_config=weights, step="prepare")
    quantization.quantize_(model, config)
    return model


def halves(number: int) -> tuple[torch.Tensor]:
    return (rows(number)[0].bfloat16(),)


TRAINED = {
    "float8": lambda: Subject(float8, rows),
    "int8 weights": lambda: Subject(int8, rows, optimizer=lambda own: _AdamW(own, lr=1e-3)),
    "int8 products": lambda: Subject(int8_products, halves),
    "QAT": lambda: Subject(fake_quantized, rows),
}


@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize("name", TRAINED)
def test_layers_that_train_in_few_bits(name: str, budget: Any):
    check(TRAINED[name], budget)
