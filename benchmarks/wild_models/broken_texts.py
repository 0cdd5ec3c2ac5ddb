"""Models of transformers and trl whose steps are known to break the graph, or once were."""

from __future__ import annotations

from typing import Any

import torch

from benchmarks.wild_models.registry import Case, own, wild

SMALL: dict[str, Any] = {
    "vocab_size": 200,
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 256,
}


def ids_of(batch: int = 4, length: int = 128, vocabulary: int = 200) -> torch.Tensor:
    """Tokens, none of them a special one."""
    return torch.randint(5, vocabulary, (batch, length))


def labelled(model: Any, ids: torch.Tensor, **others: Any) -> Case:
    """A model that computes its loss of its own tokens."""
    model.train()
    return Case(model, (), {"input_ids": ids, "labels": ids.clone(), **others}, own)


@wild("transformers")
def longformer() -> Case:
    from transformers import LongformerConfig, LongformerForMaskedLM

    config = LongformerConfig(**SMALL, attention_window=32, max_position_embeddings=300)
    return labelled(LongformerForMaskedLM(config), ids_of(2, 256))


@wild("transformers")
def whisper_specaugment() -> Case:
    from transformers import WhisperConfig, WhisperForConditionalGeneration

    config = WhisperConfig(
        vocab_size=200, num_mel_bins=80, d_model=64, encoder_layers=3, decoder_layers=3,
        encoder_attention_heads=4, decoder_attention_heads=4, encoder_ffn_dim=256,
        decoder_ffn_dim=256, max_source_positions=96, max_target_positions=64,
        apply_spec_augment=True, mask_time_prob=0.5, mask_feature_prob=0.3, pad_token_id=0,
        bos_token_id=1, eos_token_id=2, decoder_start_token_id=1,
    )  # fmt: skip
    model = WhisperForConditionalGeneration(config).train()
    return Case(
        model, (), {"input_features": torch.randn(4, 80, 192), "labels": ids_of(4, 32)}, own
    )


@wild("transformers")
def big_bird() -> Case:
    from transformers import BigBirdConfig, BigBirdForMaskedLM

    config = BigBirdConfig(**SMALL, block_size=16, num_random_blocks=2,
                           max_position_embeddings=256, attention_type="block_sparse")  # fmt: skip
    return labelled(BigBirdForMaskedLM(config), ids_of(2, 256))


@wild("transformers")
def reformer() -> Case:
    from transformers import ReformerConfig, ReformerModelWithLMHead

    config = ReformerConfig(
        vocab_size=200, hidden_size=64, attn_layers=["local", "lsh", "local"],
        num_attention_heads=4, attention_head_size=16, feed_forward_size=256, is_decoder=True,
        axial_pos_shape=(16, 16), axial_pos_embds_dim=(16, 48), max_position_embeddings=256,
        num_buckets=8, local_attn_chunk_length=32, lsh_attn_chunk_length=32, hash_seed=None,
    )  # fmt: skip
    return labelled(ReformerModelWithLMHead(config), ids_of(2, 256))


@wild("transformers")
def led() -> Case:
    from transformers import LEDConfig, LEDForConditionalGeneration

    config = LEDConfig(
        vocab_size=200, d_model=64, encoder_layers=3, decoder_layers=3, encoder_attention_heads=4,
        decoder_attention_heads=4, encoder_ffn_dim=256, decoder_ffn_dim=256, attention_window=32,
        max_encoder_position_embeddings=256, max_decoder_position_embeddings=128,
        encoder_layerdrop=0.2, decoder_layerdrop=0.2,
    )  # fmt: skip
    model = LEDForConditionalGeneration(config).train()
    return Case(model, (), {"input_ids": ids_of(2, 256), "labels": ids_of(2, 64)}, own)


def _speech(config: Any, model: Any) -> Case:
    model.train()
    labels = torch.randint(3, 30, (2, 12))
    return Case(model, (torch.randn(2, 6400),), {"labels": labels}, own)


_SPEECH: dict[str, Any] = {
    "vocab_size": 32,
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 256,
    "conv_dim": (32, 32, 32),
    "conv_kernel": (10, 3, 2),
    "conv_stride": (5, 2, 2),
    "num_conv_pos_embeddings": 16,
    "num_conv_pos_embedding_groups": 4,
    "mask_time_prob": 0.3,
    "mask_time_length": 4,
    "mask_feature_prob": 0.2,
    "mask_feature_length": 4,
    "layerdrop": 0.1,
}


@wild("transformers")
def wav2vec2_ctc() -> Case:
    from transformers import Wav2Vec2Config, Wav2Vec2ForCTC

    config = Wav2Vec2Config(**_SPEECH)
    return _speech(config, Wav2Vec2ForCTC(config))


@wild("transformers")
def hubert_ctc() -> Case:
    from transformers import HubertConfig, HubertForCTC

    config = HubertConfig(**_SPEECH)
    return _speech(config, HubertForCTC(config))


@wild("transformers")
def wavlm_ctc() -> Case:
    from transformers import WavLMConfig, WavLMForCTC

    config = WavLMConfig(**_SPEECH, num_buckets=32, max_bucket_distance=64)
    config.mask_feature_min_masks = 0  # it has no default for what its model reads
    return _speech(config, WavLMForCTC(config))


@wild("transformers")
def speecht5() -> Case:
    from transformers import SpeechT5Config, SpeechT5ForTextToSpeech

    config = SpeechT5Config(
        vocab_size=81, hidden_size=64, encoder_layers=3, decoder_layers=3,
        encoder_attention_heads=4, decoder_attention_heads=4, encoder_ffn_dim=256,
        decoder_ffn_dim=256, speech_decoder_prenet_units=64, speech_decoder_postnet_units=64,
        num_mel_bins=20, speaker_embedding_dim=32, reduction_factor=2, encoder_layerdrop=0.1,
        decoder_layerdrop=0.1,
    )  # fmt: skip
    model = SpeechT5ForTextToSpeech(config).train()
    mask = torch.ones(4, 48, dtype=torch.long)
    mask[1:, 40:] = 0
    kwargs = {
        "input_ids": torch.randint(5, 80, (4, 48)),
        "attention_mask": mask,
        "speaker_embeddings": torch.randn(4, 32),
        "labels": torch.randn(4, 128, 20),
    }
    return Case(model, (), kwargs, own)


@wild("transformers")
def mixtral() -> Case:
    from transformers import MixtralConfig, MixtralForCausalLM

    config = MixtralConfig(**SMALL, num_key_value_heads=2, num_local_experts=4,
                           num_experts_per_tok=2, output_router_logits=True,
                           experts_implementation="eager")  # fmt: skip
    return labelled(MixtralForCausalLM(config), ids_of())


@wild("transformers")
def switch_transformers() -> Case:
    from transformers import SwitchTransformersConfig, SwitchTransformersForConditionalGeneration

    config = SwitchTransformersConfig(
        vocab_size=200, d_model=64, d_kv=16, d_ff=256, num_layers=3, num_decoder_layers=3,
        num_sparse_encoder_layers=1, num_sparse_decoder_layers=1, num_heads=4, num_experts=4,
        decoder_start_token_id=0, experts_implementation="eager",
    )  # fmt: skip
    model = SwitchTransformersForConditionalGeneration(config).train()
    return Case(model, (), {"input_ids": ids_of(4, 96), "labels": ids_of(4, 48)}, own)


@wild("transformers")
def qwen3_moe() -> Case:
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    config = Qwen3MoeConfig(**SMALL, num_key_value_heads=2, head_dim=16, num_experts=4,
                            num_experts_per_tok=2, moe_intermediate_size=128,
                            experts_implementation="eager")  # fmt: skip
    return labelled(Qwen3MoeForCausalLM(config), ids_of())


@wild("transformers")
def bart_layerdrop() -> Case:
    from transformers import BartConfig, BartForConditionalGeneration

    config = BartConfig(
        vocab_size=200, d_model=64, encoder_layers=4, decoder_layers=4, encoder_attention_heads=4,
        decoder_attention_heads=4, encoder_ffn_dim=256, decoder_ffn_dim=256,
        max_position_embeddings=160, encoder_layerdrop=0.3, decoder_layerdrop=0.3,
    )  # fmt: skip
    model = BartForConditionalGeneration(config).train()
    return Case(model, (), {"input_ids": ids_of(), "labels": ids_of(4, 64)}, own)


def _targets(count: int = 4) -> list[dict[str, torch.Tensor]]:
    from benchmarks.wild_models.broken import boxes

    return [
        {"class_labels": t["labels"], "boxes": t["boxes"]} for t in (boxes(count), boxes(count - 1))
    ]


@wild("transformers")
def yolos() -> Case:
    from transformers import YolosConfig, YolosForObjectDetection

    config = YolosConfig(
        hidden_size=64, num_hidden_layers=3, num_attention_heads=4, intermediate_size=256,
        image_size=[96, 96], patch_size=8, num_detection_tokens=20, num_labels=10,
    )  # fmt: skip
    model = YolosForObjectDetection(config).train()
    return Case(model, (torch.randn(2, 3, 96, 96),), {"labels": _targets()}, own)


@wild("transformers")
def detr() -> Case:
    from transformers import DetrConfig, DetrForObjectDetection, ResNetConfig

    back = ResNetConfig(embedding_size=16, hidden_sizes=[16, 32, 64, 64], depths=[1, 1, 1, 1],
                        layer_type="basic", out_features=["stage4"])  # fmt: skip
    config = DetrConfig(
        backbone_config=back, use_timm_backbone=False, use_pretrained_backbone=False, d_model=64,
        encoder_layers=3, decoder_layers=3, encoder_attention_heads=4, decoder_attention_heads=4,
        encoder_ffn_dim=256, decoder_ffn_dim=256, num_queries=20, num_labels=10, backbone=None,
        auxiliary_loss=True,
    )  # fmt: skip
    model = DetrForObjectDetection(config).train()
    return Case(model, (torch.randn(2, 3, 192, 192),), {"labels": _targets()}, own)


@wild("transformers")
def rt_detr() -> Case:
    from transformers import RTDetrConfig, RTDetrForObjectDetection, RTDetrResNetConfig

    back = RTDetrResNetConfig(embedding_size=16, hidden_sizes=[16, 32, 32, 64],
                              depths=[1, 1, 1, 1], layer_type="basic",
                              out_features=["stage2", "stage3", "stage4"])  # fmt: skip
    config = RTDetrConfig(
        backbone_config=back, encoder_hidden_dim=32, encoder_in_channels=[32, 32, 64],
        encoder_ffn_dim=64, encoder_attention_heads=2, d_model=32, num_queries=20,
        decoder_in_channels=[32, 32, 32], decoder_ffn_dim=64, decoder_layers=2,
        decoder_attention_heads=2, num_denoising=10, num_labels=10, backbone=None,
        use_timm_backbone=False, use_pretrained_backbone=False,
    )  # fmt: skip
    model = RTDetrForObjectDetection(config).train()
    return Case(model, (torch.randn(2, 3, 128, 128),), {"labels": _targets()}, own)


@wild("transformers")
def mask2former() -> Case:
    from transformers import Mask2FormerConfig, Mask2FormerForUniversalSegmentation, SwinConfig

    back = SwinConfig(image_size=96, patch_size=4, embed_dim=16, depths=[1, 1, 1, 1],
                      num_heads=[2, 2, 2, 2], window_size=3,
                      out_features=["stage1", "stage2", "stage3", "stage4"])  # fmt: skip
    config = Mask2FormerConfig(
        backbone_config=back, feature_size=32, mask_feature_size=32, hidden_dim=32,
        encoder_feedforward_dim=64, dim_feedforward=64, num_attention_heads=2, encoder_layers=2,
        decoder_layers=3, num_queries=12, num_labels=10, train_num_points=256,
    )  # fmt: skip
    model = Mask2FormerForUniversalSegmentation(config).train()
    masks = [(torch.rand(3, 96, 96) > 0.5).float(), (torch.rand(2, 96, 96) > 0.5).float()]
    classes = [torch.randint(0, 10, (3,)), torch.randint(0, 10, (2,))]
    kwargs = {"mask_labels": masks, "class_labels": classes}
    return Case(model, (torch.randn(2, 3, 96, 96),), kwargs, own)
