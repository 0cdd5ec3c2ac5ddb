"""Networks of timm, for images, and of transformers, open_clip and segmentation_models_pytorch."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.wild_models.registry import Case, add, own, square, wild

_VIT = {"img_size": 64, "patch_size": 8, "embed_dim": 64, "depth": 4, "num_heads": 4}

TIMM: dict[str, tuple[str, int, dict[str, Any]]] = {
    "timm_resnet": ("resnet18", 64, {
        "stem_width": 16, "channels": (16, 32, 48, 64), "drop_path_rate": 0.1}),
    "timm_convnext": ("convnext_atto", 64, {
        "depths": (1, 1, 3, 1), "dims": (24, 32, 48, 64), "drop_path_rate": 0.1}),
    "timm_vit": ("vit_tiny_patch16_224", 64, {**_VIT, "drop_path_rate": 0.1}),
    "timm_swin": ("swin_tiny_patch4_window7_224", 64, {
        "img_size": 64, "window_size": 4, "embed_dim": 24, "depths": (2, 2), "num_heads": (2, 4)}),
    "timm_efficientnet": ("test_efficientnet", 96, {"drop_path_rate": 0.2}),
    "timm_byobnet": ("test_byobnet", 96, {}),
    "timm_nfnet": ("test_nfnet", 96, {}),
    "timm_mambaout": ("test_mambaout", 96, {}),
    "timm_mobilenet": ("mobilenetv3_small_100", 96, {}),
    "timm_densenet": ("densenet121", 64, {"block_config": (3, 4, 4), "growth_rate": 12}),
    "timm_maxvit": ("maxvit_rmlp_pico_rw_256", 64, {
        "img_size": 64, "embed_dim": (32, 32, 64, 64), "depths": (1, 1, 1, 1)}),
    "timm_mixer": ("mlp_mixer:MlpMixer", 64, {
        "img_size": 64, "patch_size": 8, "num_blocks": 4, "embed_dim": 64}),
    "timm_regnet": ("regnety_002", 96, {}),
    "timm_cait": ("cait_xxs24_224", 64, {
        "img_size": 64, "patch_size": 8, "embed_dim": 48, "depth": 4, "num_heads": 4}),
    "timm_metaformer": ("metaformer:MetaFormer", 64, {
        "depths": (1, 1, 2, 1), "dims": (16, 32, 48, 64), "drop_path_rate": 0.1}),
    "timm_coatnet": ("coatnet_pico_rw_224", 64, {
        "img_size": 64, "embed_dim": (32, 32, 64, 64), "depths": (1, 1, 1, 1)}),
    "timm_ghostnet": ("ghostnet_050", 96, {}),
}  # fmt: skip
"""Name or class, size of images, options."""


def _timm(name: str) -> Case:
    import timm

    kind, size, options = TIMM[name]
    if ":" in kind:
        module, found = kind.split(":")
        model = getattr(getattr(timm.models, module), found)(num_classes=10, **options)
    else:
        model = timm.create_model(kind, pretrained=False, num_classes=10, **options)
    return Case(model.train(), (torch.randn(8, 3, size, size),), {}, _all)


def _all(outputs: Any) -> Tensor:
    return square(outputs if isinstance(outputs, Tensor) else sum(outputs))


for _name in TIMM:
    add(_name, "timm", lambda name=_name: _timm(name))


@wild("timm")
def timm_vit_checkpointed() -> Case:
    """What recomputes by itself."""
    import timm

    model = timm.create_model("vit_tiny_patch16_224", pretrained=False, num_classes=10, **_VIT)
    model.set_grad_checkpointing(True)
    return Case(model.train(), (torch.randn(4, 3, 64, 64),), {}, square)


@wild("timm")
def timm_vit_patch_dropout() -> Case:
    import timm

    model = timm.create_model("vit_tiny_patch16_224", pretrained=False, num_classes=10, **_VIT,
                              patch_drop_rate=0.25)  # fmt: skip
    return Case(model.train(), (torch.randn(4, 3, 64, 64),), {}, square)


_TOWER = {"hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4,
          "intermediate_size": 256}  # fmt: skip


@wild("transformers")
def hf_vit() -> Case:
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(**_TOWER, image_size=64, patch_size=8, num_labels=10)
    model = ViTForImageClassification(config).train()
    labels = torch.randint(0, 10, (4,))
    return Case(model, (torch.randn(4, 3, 64, 64),), {"labels": labels}, own)


@wild("transformers")
def hf_swin() -> Case:
    from transformers import SwinConfig, SwinForImageClassification

    config = SwinConfig(image_size=64, patch_size=4, embed_dim=24, depths=[2, 2], num_heads=[2, 4],
                        window_size=4, num_labels=10)  # fmt: skip
    model = SwinForImageClassification(config).train()
    labels = torch.randint(0, 10, (4,))
    return Case(model, (torch.randn(4, 3, 64, 64),), {"labels": labels}, own)


@wild("transformers")
def segformer() -> Case:
    from transformers import SegformerConfig, SegformerForSemanticSegmentation

    config = SegformerConfig(
        depths=[1, 1, 1, 1], hidden_sizes=[16, 24, 32, 48], num_attention_heads=[1, 2, 2, 4],
        decoder_hidden_size=48, num_labels=5,
    )  # fmt: skip
    model = SegformerForSemanticSegmentation(config).train()
    labels = torch.randint(0, 5, (2, 128, 128))
    return Case(model, (torch.randn(2, 3, 128, 128),), {"labels": labels}, own)


@wild("transformers")
def vit_mae() -> Case:
    """Which patches are seen is drawn."""
    from transformers import ViTMAEConfig, ViTMAEForPreTraining

    config = ViTMAEConfig(
        **_TOWER, image_size=64, patch_size=8, decoder_hidden_size=48, decoder_num_hidden_layers=2,
        decoder_num_attention_heads=4, decoder_intermediate_size=96,
    )  # fmt: skip
    return Case(ViTMAEForPreTraining(config).train(), (torch.randn(4, 3, 64, 64),), {}, own)


@wild("transformers")
def upernet_segmentation() -> Case:
    from transformers import ConvNextConfig, UperNetConfig, UperNetForSemanticSegmentation

    back = ConvNextConfig(hidden_sizes=[16, 24, 32, 48], depths=[1, 1, 1, 1],
                          out_features=["stage1", "stage2", "stage3", "stage4"])  # fmt: skip
    config = UperNetConfig(
        backbone_config=back, hidden_size=32, num_labels=5, auxiliary_channels=16,
        auxiliary_in_channels=32,
    )  # fmt: skip
    model = UperNetForSemanticSegmentation(config).train()
    labels = torch.randint(0, 5, (2, 96, 96))
    return Case(model, (torch.randn(2, 3, 96, 96),), {"labels": labels}, own)


def _pair_loss(outputs: Any) -> Tensor:
    images, texts, scale = outputs[:3]
    logits = scale * images @ texts.t()
    return torch.nn.functional.cross_entropy(logits, torch.arange(len(images)))


@wild("open_clip")
def open_clip_vit() -> Case:
    from open_clip.model import CLIP

    model = CLIP(
        embed_dim=32, vision_cfg={"image_size": 64, "layers": 3, "width": 64, "head_width": 16,
                                  "patch_size": 8, "patch_dropout": 0.25},
        text_cfg={"context_length": 48, "vocab_size": 200, "width": 64, "heads": 4, "layers": 3},
    )  # fmt: skip
    args = torch.randn(8, 3, 64, 64), torch.randint(1, 200, (8, 48))
    return Case(model.train(), args, {}, _pair_loss)


@wild("open_clip")
def open_clip_coca() -> Case:
    from open_clip.coca_model import CoCa

    tower = {"context_length": 47, "vocab_size": 200, "width": 64, "heads": 4, "layers": 2}
    image = {"image_size": 64, "layers": 2, "width": 64, "head_width": 16, "patch_size": 8}
    pooler = {"attentional_pool": True, "attn_pooler_queries": 16, "attn_pooler_heads": 4}
    model = CoCa(
        embed_dim=64,
        multimodal_cfg={**tower, "dim_head": 16},
        text_cfg={**tower, "embed_cls": True, "output_tokens": True},
        vision_cfg={**image, **pooler, "output_tokens": True},
    )
    nn.init.normal_(model.text_decoder.text_projection, std=0.1)  # the library leaves it as it lies
    args = torch.randn(8, 3, 64, 64), torch.randint(1, 200, (8, 47))

    def loss(outputs: Any) -> Tensor:
        pair = outputs["image_features"], outputs["text_features"], outputs["logit_scale"]
        return _pair_loss(pair) + square(outputs["logits"])

    return Case(model.train(), args, {}, loss)


_CHANNELS = {"decoder_channels": (48, 32, 24, 16, 8)}

SMP: dict[str, tuple[str, dict[str, Any]]] = {
    "smp_unet": ("Unet", _CHANNELS),
    "smp_unet_plus": ("UnetPlusPlus", _CHANNELS),
    "smp_fpn": ("FPN", {"decoder_pyramid_channels": 48, "decoder_segmentation_channels": 32}),
    "smp_deeplab": ("DeepLabV3Plus", {"decoder_channels": 48}),
    "smp_linknet": ("Linknet", {}),
    "smp_pspnet": ("PSPNet", {"psp_out_channels": 64}),
}


def _segmentation(name: str) -> Case:
    import segmentation_models_pytorch as smp

    kind, options = SMP[name]
    model = getattr(smp, kind)("mobilenet_v2", encoder_weights=None, classes=3, **options)
    return Case(model.train(), (torch.randn(2, 3, 96, 96),), {}, square)


for _name in SMP:
    add(_name, "segmentation_models_pytorch", lambda name=_name: _segmentation(name))
