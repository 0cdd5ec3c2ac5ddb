"""Networks for volumes and slices, of MONAI."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from benchmarks.wild_models.registry import Case, add, square


def first(outputs: Any) -> Tensor:
    """Loss of the output, or of all of them."""
    if isinstance(outputs, Tensor):
        return square(outputs)
    return sum((first(x) for x in outputs if x is not None), torch.zeros(()))


_DEEP = (1, 1, 32, 32, 32)

NETS: dict[str, tuple[str, tuple[int, ...], dict[str, Any]]] = {
    "monai_unet": ("UNet", (4, 1, 64, 64), {
        "spatial_dims": 2, "in_channels": 1, "out_channels": 2, "channels": (16, 32, 64),
        "strides": (2, 2), "num_res_units": 2, "dropout": 0.1}),
    "monai_unet3d": ("UNet", _DEEP, {
        "spatial_dims": 3, "in_channels": 1, "out_channels": 2, "channels": (8, 16, 32),
        "strides": (2, 2), "num_res_units": 2}),
    "monai_segresnet": ("SegResNet", _DEEP, {
        "spatial_dims": 3, "in_channels": 1, "out_channels": 2, "init_filters": 8,
        "blocks_down": (1, 2), "blocks_up": (1,)}),
    "monai_swin_unetr": ("SwinUNETR", (2, 1, 64, 64), {
        "in_channels": 1, "out_channels": 2, "feature_size": 12, "spatial_dims": 2,
        "depths": (1, 1, 1, 1), "num_heads": (1, 2, 2, 4), "drop_rate": 0.1}),
    "monai_unetr": ("UNETR", (1, 1, 32, 32, 32), {
        "in_channels": 1, "out_channels": 2, "img_size": (32, 32, 32), "feature_size": 8,
        "hidden_size": 48, "mlp_dim": 96, "num_heads": 4, "dropout_rate": 0.1}),
    "monai_dynunet": ("DynUNet", (2, 1, 64, 64), {
        "spatial_dims": 2, "in_channels": 1, "out_channels": 2, "kernel_size": [3, 3, 3],
        "strides": [1, 2, 2], "upsample_kernel_size": [2, 2], "filters": [16, 32, 48],
        "deep_supervision": True, "deep_supr_num": 1}),
    "monai_attention_unet": ("AttentionUnet", (2, 1, 64, 64), {
        "spatial_dims": 2, "in_channels": 1, "out_channels": 2, "channels": (16, 32, 64),
        "strides": (2, 2), "dropout": 0.1}),
    "monai_basic_unet_plus": ("BasicUNetPlusPlus", (2, 1, 64, 64), {
        "spatial_dims": 2, "in_channels": 1, "out_channels": 2,
        "features": (8, 8, 16, 32, 32, 8), "deep_supervision": True}),
    "monai_highresnet": ("HighResNet", (2, 1, 32, 32), {
        "spatial_dims": 2, "in_channels": 1, "out_channels": 2, "dropout_prob": 0.1}),
    "monai_vit_autoencoder": ("ViTAutoEnc", (1, 1, 32, 32, 32), {
        "in_channels": 1, "img_size": (32, 32, 32), "patch_size": (4, 4, 4), "hidden_size": 48,
        "mlp_dim": 96, "num_layers": 4, "num_heads": 4}),
    "monai_densenet": ("DenseNet", (4, 1, 64, 64), {
        "spatial_dims": 2, "in_channels": 1, "out_channels": 5, "init_features": 16,
        "growth_rate": 8, "block_config": (3, 4, 4), "dropout_prob": 0.1}),
    "monai_dints": ("DiNTS", (1, 1, 32, 32, 32), {}),
}  # fmt: skip


def _make(name: str) -> Case:
    from monai.networks import nets

    kind, shape, options = NETS[name]
    if kind == "DiNTS":
        space = nets.TopologySearch(
            channel_mul=0.1, num_blocks=4, num_depths=3, use_downsample=True
        )
        model = nets.DiNTS(space, in_channels=1, num_classes=2, use_downsample=True)
    else:
        model = getattr(nets, kind)(**options)
    return Case(model.train(), (torch.randn(shape),), {}, first)


for _name in NETS:
    add(_name, "monai", lambda name=_name: _make(name))
