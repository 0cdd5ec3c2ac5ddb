"""Diffusion models, of diffusers."""

from __future__ import annotations

import torch

from benchmarks.wild_models.registry import Case, sample_of, wild


@wild("diffusers")
def unet2d() -> Case:
    from diffusers import UNet2DModel

    model = UNet2DModel(
        sample_size=32, block_out_channels=(32, 64), layers_per_block=1, norm_num_groups=8,
        down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"), dropout=0.1,
    )  # fmt: skip
    args = torch.randn(4, 3, 32, 32), torch.randint(0, 1000, (4,))
    return Case(model.train(), args, {}, sample_of)


@wild("diffusers")
def unet2d_condition() -> Case:
    from diffusers import UNet2DConditionModel

    model = UNet2DConditionModel(
        sample_size=32, in_channels=4, out_channels=4, block_out_channels=(32, 64),
        layers_per_block=1, norm_num_groups=8, cross_attention_dim=48, attention_head_dim=8,
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
    )  # fmt: skip
    args = torch.randn(2, 4, 32, 32), torch.randint(0, 1000, (2,)), torch.randn(2, 16, 48)
    return Case(model.train(), args, {}, sample_of)


@wild("diffusers")
def autoencoder_kl() -> Case:
    from diffusers import AutoencoderKL

    model = AutoencoderKL(
        down_block_types=("DownEncoderBlock2D",) * 2, up_block_types=("UpDecoderBlock2D",) * 2,
        block_out_channels=(16, 32), layers_per_block=1, norm_num_groups=8, sample_size=64,
    )  # fmt: skip
    kwargs = {"sample_posterior": True}
    return Case(model.train(), (torch.randn(2, 3, 64, 64),), kwargs, sample_of)


@wild("diffusers")
def vq_model() -> Case:
    from diffusers import VQModel

    model = VQModel(
        down_block_types=("DownEncoderBlock2D",) * 2, up_block_types=("UpDecoderBlock2D",) * 2,
        block_out_channels=(16, 32), layers_per_block=1, norm_num_groups=8, num_vq_embeddings=64,
    )  # fmt: skip
    return Case(model.train(), (torch.randn(2, 3, 64, 64),), {}, sample_of)


@wild("diffusers")
def dit() -> Case:
    from diffusers import DiTTransformer2DModel

    model = DiTTransformer2DModel(
        num_attention_heads=4, attention_head_dim=16, in_channels=4, num_layers=3, sample_size=32,
        patch_size=2, num_embeds_ada_norm=1000, dropout=0.1,
    )  # fmt: skip
    kwargs = {
        "timestep": torch.randint(0, 1000, (2,)),
        "class_labels": torch.randint(0, 1000, (2,)),
    }
    return Case(model.train(), (torch.randn(2, 4, 32, 32),), kwargs, sample_of)


@wild("diffusers")
def sd3_transformer() -> Case:
    from diffusers import SD3Transformer2DModel

    model = SD3Transformer2DModel(
        sample_size=32, patch_size=2, in_channels=4, num_layers=3, attention_head_dim=16,
        num_attention_heads=4, joint_attention_dim=32, caption_projection_dim=64,
        pooled_projection_dim=64, out_channels=4, pos_embed_max_size=32,
    )  # fmt: skip
    kwargs = {
        "encoder_hidden_states": torch.randn(2, 32, 32),
        "pooled_projections": torch.randn(2, 64),
        "timestep": torch.randint(0, 1000, (2,)),
    }
    return Case(model.train(), (torch.randn(2, 4, 32, 32),), kwargs, sample_of)


@wild("diffusers")
def flux_transformer() -> Case:
    from diffusers import FluxTransformer2DModel

    model = FluxTransformer2DModel(
        patch_size=1, in_channels=4, num_layers=1, num_single_layers=2, attention_head_dim=16,
        num_attention_heads=4, joint_attention_dim=32, pooled_projection_dim=32,
        axes_dims_rope=(4, 4, 8),
    )  # fmt: skip
    kwargs = {
        "hidden_states": torch.randn(2, 256, 4),
        "encoder_hidden_states": torch.randn(2, 48, 32),
        "pooled_projections": torch.randn(2, 32),
        "timestep": torch.rand(2),
        "img_ids": torch.randn(256, 3),
        "txt_ids": torch.randn(48, 3),
    }
    return Case(model.train(), (), kwargs, sample_of)


@wild("diffusers")
def pixart_transformer() -> Case:
    from diffusers import PixArtTransformer2DModel

    model = PixArtTransformer2DModel(
        sample_size=32, num_layers=3, patch_size=2, attention_head_dim=16, num_attention_heads=4,
        in_channels=4, out_channels=8, cross_attention_dim=64, caption_channels=32,
        use_additional_conditions=False,
    )  # fmt: skip
    kwargs = {
        "encoder_hidden_states": torch.randn(2, 16, 32),
        "timestep": torch.randint(0, 1000, (2,)),
    }
    return Case(model.train(), (torch.randn(2, 4, 32, 32),), kwargs, sample_of)


@wild("diffusers")
def controlnet() -> Case:
    from diffusers import ControlNetModel

    model = ControlNetModel(
        block_out_channels=(32, 64), layers_per_block=1, norm_num_groups=8, cross_attention_dim=32,
        attention_head_dim=8, down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        conditioning_embedding_out_channels=(8, 16),
    )  # fmt: skip
    args = torch.randn(2, 4, 32, 32), torch.randint(0, 1000, (2,)), torch.randn(2, 16, 32)
    kwargs = {"controlnet_cond": torch.randn(2, 3, 64, 64)}

    def loss(outputs: object) -> torch.Tensor:
        down, mid = outputs.down_block_res_samples, outputs.mid_block_res_sample  # type: ignore[attr-defined]
        return sum((x.square().mean() for x in (*down, mid)), torch.zeros(()))

    return Case(model.train(), args, kwargs, loss)
