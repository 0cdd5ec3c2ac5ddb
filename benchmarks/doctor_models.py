"""Small models of transformers and timm with random weights, for ``benchmarks/doctor.py``.

Each function returns a model and a sample, as ``fxremat doctor MODULE:FUNCTION`` takes them.
"""

from __future__ import annotations

from typing import Any

import torch
import transformers
from torch import nn

Pair = tuple[nn.Module, Any]

VOCABULARY = 512


def _tokens(batch: int = 4, length: int = 128) -> torch.Tensor:
    torch.manual_seed(1)
    return torch.randint(0, VOCABULARY, (batch, length))


def _language(model: nn.Module) -> Pair:
    ids = _tokens()
    return model, {"input_ids": ids, "labels": ids.clone()}


_SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 128,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "use_cache": False,
}


def llama() -> Pair:
    """Llama."""
    config = transformers.LlamaConfig(**_SIZES, num_key_value_heads=2)
    return _language(transformers.LlamaForCausalLM(config))


def qwen3() -> Pair:
    """Qwen3."""
    config = transformers.Qwen3Config(**_SIZES, num_key_value_heads=2, head_dim=32)
    return _language(transformers.Qwen3ForCausalLM(config))


def gpt2() -> Pair:
    """GPT-2, with dropout."""
    config = transformers.GPT2Config(
        vocab_size=VOCABULARY, n_embd=128, n_layer=2, n_head=4, n_positions=128, use_cache=False
    )
    return _language(transformers.GPT2LMHeadModel(config))


def bert() -> Pair:
    """BERT, with dropout."""
    sizes = {name: value for name, value in _SIZES.items() if name != "use_cache"}
    return _language(transformers.BertForMaskedLM(transformers.BertConfig(**sizes)))


def t5() -> Pair:
    """T5, an encoder and a decoder, with dropout."""
    config = transformers.T5Config(
        vocab_size=VOCABULARY, d_model=128, d_ff=512, d_kv=32, num_layers=2, num_heads=4
    )
    config.use_cache, config.decoder_start_token_id = False, 0
    return _language(transformers.T5ForConditionalGeneration(config))


def vit() -> Pair:
    """ViT."""
    sizes = {n: v for n, v in _SIZES.items() if n not in ("use_cache", "vocab_size")}
    config = transformers.ViTConfig(**sizes, image_size=64, patch_size=8, num_labels=10)
    images, labels = torch.randn(8, 3, 64, 64), torch.arange(8)
    return transformers.ViTForImageClassification(config), {
        "pixel_values": images,
        "labels": labels,
    }


def whisper() -> Pair:
    """Whisper, an encoder and a decoder."""
    config = transformers.WhisperConfig(
        vocab_size=VOCABULARY,
        d_model=64,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=256,
        decoder_ffn_dim=256,
        max_source_positions=200,
        max_target_positions=64,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=1,
        use_cache=False,
    )
    return transformers.WhisperForConditionalGeneration(config), {
        "input_features": torch.randn(2, 80, 400),
        "labels": _tokens(2, 32),
    }


def mixtral() -> Pair:
    """Mixtral, whose experts choose tokens by data."""
    config = transformers.MixtralConfig(
        **_SIZES, num_key_value_heads=2, num_local_experts=4, experts_implementation="eager"
    )
    return _language(transformers.MixtralForCausalLM(config))


def _timm(name: str, size: int, **options: Any) -> Pair:
    import timm  # the others need only transformers

    torch.manual_seed(1)
    model = timm.create_model(name, pretrained=False, num_classes=10, **options)
    return model, torch.randn(8, 3, size, size)


def resnet50() -> Pair:
    """ResNet-50."""
    return _timm("resnet50", 64, stem_width=16, channels=(16, 32, 48, 64))


def convnext() -> Pair:
    """ConvNeXt, with dropped paths."""
    small = {"depths": (1, 1, 2, 1), "dims": (24, 32, 48, 64)}
    return _timm("convnext_atto", 64, drop_path_rate=0.1, **small)


def swin() -> Pair:
    """Swin."""
    return _timm(
        "swin_tiny_patch4_window7_224",
        64,
        img_size=64,
        window_size=4,
        embed_dim=24,
        depths=(2, 2),
        num_heads=(2, 4),
    )


def efficientnet() -> Pair:
    """EfficientNet, with dropped paths."""
    return _timm("test_efficientnet", 96, drop_path_rate=0.2)


NAMES = (
    "llama",
    "qwen3",
    "gpt2",
    "bert",
    "t5",
    "vit",
    "whisper",
    "mixtral",
    "resnet50",
    "convnext",
    "swin",
    "efficientnet",
)
