"""Hugging Face models from random configurations, called with kwargs, returning ModelOutput.

``transformers`` is imported inside the builders: it takes seconds, and most tests need none.
``use_cache=False`` throughout, as in any training run: a key-value cache among the outputs
would keep every block's keys and values alive and be returned to the caller.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from tests.models.images import images, labels
from tests.models.zoo import Args, Kwargs, ZooModel, drawn_once, seeded


def _token_ids(seed: int, *, vocabulary: int, batch: int, length: int) -> Tensor:
    with seeded(seed):
        return torch.randint(3, vocabulary, (batch, length))


def _loss(outputs: Any) -> Tensor:
    return outputs.loss


def _entry(
    name: str,
    build: Callable[[], nn.Module],
    kwargs: Callable[[int], Kwargs],
    *,
    draws: bool = False,
) -> ZooModel:
    def sample(seed: int) -> tuple[Args, Kwargs]:
        return (), kwargs(seed)

    return ZooModel(
        name=name,
        build=drawn_once(build),
        sample=sample,
        loss=_loss,
        loss_inside=True,
        draws=draws,
    )


def gpt2(name: str, *, vocabulary: int, width: int, layers: int, batch: int, length: int):
    """GPT-2 with its default dropout of 0.1 (embeddings, attention, residuals)."""

    def build() -> nn.Module:
        from transformers import GPT2Config, GPT2LMHeadModel

        config = GPT2Config(
            vocab_size=vocabulary,
            n_positions=length,
            n_embd=width,
            n_layer=layers,
            n_head=4,
            use_cache=False,
            bos_token_id=0,
            eos_token_id=0,
        )
        return GPT2LMHeadModel(config).train()

    def kwargs(seed: int) -> Kwargs:
        ids = _token_ids(seed, vocabulary=vocabulary, batch=batch, length=length)
        return {"input_ids": ids, "labels": ids.clone()}

    return _entry(name, build, kwargs, draws=True)


def llama(
    name: str,
    *,
    vocabulary: int,
    width: int,
    inner: int,
    layers: int,
    batch: int,
    length: int,
    heads: int = 8,
    key_value_heads: int | None = None,
    **flags: bool,
):
    """Llama: RMSNorm, rotary positions, gated MLP."""

    def build() -> nn.Module:
        from transformers import LlamaConfig, LlamaForCausalLM

        config = LlamaConfig(
            vocab_size=vocabulary,
            hidden_size=width,
            intermediate_size=inner,
            num_hidden_layers=layers,
            num_attention_heads=heads,
            num_key_value_heads=key_value_heads or heads,
            max_position_embeddings=max(256, length),
            use_cache=False,
        )
        return LlamaForCausalLM(config).train()

    def kwargs(seed: int) -> Kwargs:
        ids = _token_ids(seed, vocabulary=vocabulary, batch=batch, length=length)
        return {"input_ids": ids, "labels": ids.clone(), **flags}

    return _entry(name, build, kwargs)


def qwen(name: str, *, vocabulary: int, width: int, layers: int, batch: int, length: int):
    """Qwen3: norms of queries and keys, grouped queries; the loss is outside, on the logits."""

    def build() -> nn.Module:
        from transformers import Qwen3Config, Qwen3ForCausalLM

        config = Qwen3Config(
            vocab_size=vocabulary,
            hidden_size=width,
            intermediate_size=3 * width,
            num_hidden_layers=layers,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=width // 4,
            max_position_embeddings=length,
            use_cache=False,
        )
        return Qwen3ForCausalLM(config).train()

    def sample(seed: int) -> tuple[Args, Kwargs]:
        ids = _token_ids(seed, vocabulary=vocabulary, batch=batch, length=length)
        return (), {"input_ids": ids}

    return ZooModel(name=name, build=drawn_once(build), sample=sample, loss=logits_loss)


def logits_loss(outputs: Any) -> Tensor:
    """Cross entropy of the logits with fixed classes, outside the model."""
    logits = outputs.logits.flatten(0, -2)
    classes = torch.arange(len(logits), device=logits.device) % logits.shape[-1]
    return nn.functional.cross_entropy(logits, classes)


def t5(name: str, *, width: int, layers: int, batch: int, length: int):
    """T5: an encoder whose output every decoder block reads; dropout 0.1."""
    vocabulary = 96

    def build() -> nn.Module:
        from transformers import T5Config, T5ForConditionalGeneration

        config = T5Config(
            vocab_size=vocabulary,
            d_model=width,
            d_kv=width // 4,
            d_ff=4 * width,
            num_layers=layers,
            num_decoder_layers=layers,
            num_heads=4,
            dropout_rate=0.1,
            use_cache=False,
            decoder_start_token_id=0,
        )
        return T5ForConditionalGeneration(config).train()

    def kwargs(seed: int) -> Kwargs:
        source = _token_ids(seed, vocabulary=vocabulary, batch=batch, length=length)
        target = _token_ids(seed + 1, vocabulary=vocabulary, batch=batch, length=length // 2)
        mask = torch.ones_like(source)
        mask[0, -length // 4 :] = 0  # padding, so that the mask is a real one
        return {"input_ids": source, "attention_mask": mask, "labels": target}

    return _entry(name, build, kwargs, draws=True)


def clip(name: str, *, width: int, layers: int, batch: int, size: int):
    """CLIP: two towers that meet in the loss."""
    vocabulary, length = 99, 16

    def build() -> nn.Module:
        from transformers import CLIPConfig, CLIPModel

        shared = {
            "hidden_size": width,
            "intermediate_size": 4 * width,
            "num_hidden_layers": layers,
            "num_attention_heads": 4,
        }
        config = CLIPConfig(
            text_config={
                **shared,
                "vocab_size": vocabulary,
                "max_position_embeddings": length,
                "bos_token_id": 0,
                "eos_token_id": 1,
                "pad_token_id": 2,
            },
            vision_config={**shared, "image_size": size, "patch_size": 8},
            projection_dim=width,
        )
        return CLIPModel(config).train()

    def kwargs(seed: int) -> Kwargs:
        ids = _token_ids(seed, vocabulary=vocabulary, batch=batch, length=length)
        ids[:, -1] = 1  # the text feature is read at the end-of-text token
        return {
            "input_ids": ids,
            "pixel_values": images(seed, batch=batch, size=size),
            "return_loss": True,
        }

    return _entry(name, build, kwargs)


def vit(name: str, *, width: int, layers: int, batch: int, size: int, patch: int):
    """ViT for image classification, labels given."""
    classes = 10

    def build() -> nn.Module:
        from transformers import ViTConfig, ViTForImageClassification

        config = ViTConfig(
            hidden_size=width,
            intermediate_size=4 * width,
            num_hidden_layers=layers,
            num_attention_heads=4,
            image_size=size,
            patch_size=patch,
            num_labels=classes,
        )
        return ViTForImageClassification(config).train()

    def kwargs(seed: int) -> Kwargs:
        return {
            "pixel_values": images(seed, batch=batch, size=size),
            "labels": labels(seed, batch=batch, classes=classes),
        }

    return _entry(name, build, kwargs)


def convnext(name: str, *, widths: tuple[int, ...], depths: tuple[int, ...], batch: int, size: int):
    """ConvNeXt for image classification, labels given."""
    classes = 10

    def build() -> nn.Module:
        from transformers import ConvNextConfig, ConvNextForImageClassification

        config = ConvNextConfig(
            hidden_sizes=list(widths), depths=list(depths), image_size=size, num_labels=classes
        )
        return ConvNextForImageClassification(config).train()

    def kwargs(seed: int) -> Kwargs:
        return {
            "pixel_values": images(seed, batch=batch, size=size),
            "labels": labels(seed, batch=batch, classes=classes),
        }

    return _entry(name, build, kwargs)


ZOO = [
    gpt2("hf_gpt2", vocabulary=96, width=64, layers=4, batch=2, length=64),
    llama("hf_llama", vocabulary=96, width=64, inner=172, layers=4, batch=2, length=64),
    replace(
        llama(
            "hf_llama_states",
            vocabulary=96,
            width=64,
            inner=172,
            layers=4,
            batch=2,
            length=64,
            output_hidden_states=True,
        ),
        hooks_at_first_call=True,
    ),
    t5("hf_t5", width=64, layers=4, batch=2, length=48),
    clip("hf_clip", width=64, layers=4, batch=4, size=48),
    vit("hf_vit", width=64, layers=4, batch=4, size=48, patch=8),
]
BENCH = [
    convnext("convnext", widths=(48, 96, 192, 384), depths=(2, 2, 6, 2), batch=8, size=96),
    llama("llama8", vocabulary=1024, width=256, inner=688, layers=8, batch=8, length=256),
    llama("llama16", vocabulary=512, width=128, inner=344, layers=16, batch=4, length=512, heads=4),
    qwen("qwen8", vocabulary=512, width=128, layers=8, batch=4, length=256),
    clip("bench_clip", width=128, layers=8, batch=8, size=128),
    vit("vit", width=256, layers=8, batch=8, size=128, patch=8),
]
