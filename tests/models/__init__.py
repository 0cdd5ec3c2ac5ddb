"""The zoo: small models of every kind that must train, and the larger ones that are timed."""

from __future__ import annotations

from tests.models import (
    autocast,
    branches,
    densenet,
    features,
    gpt,
    hf,
    inception,
    recurrent,
    resnet,
    siamese,
    unet,
)
from tests.models.zoo import ZooModel

_FAMILIES = (
    gpt,
    hf,
    resnet,
    densenet,
    inception,
    unet,
    siamese,
    features,
    recurrent,
    autocast,
    branches,
)

ZOO: dict[str, ZooModel] = {entry.name: entry for kind in _FAMILIES for entry in kind.ZOO}
BENCH: dict[str, ZooModel] = {entry.name: entry for kind in _FAMILIES for entry in kind.BENCH}

RARE = (
    "gpt_logits", "resnet50", "hf_gpt2", "hf_llama", "hf_llama_states", "hf_t5", "hf_clip",
    "hf_vit", "densenet121", "inception", "siamese_resnet", "triplet", "triplet_resnet",
    "image_recipe", "composed", "coca", "two_texts", "autocast_around",
)  # fmt: skip
"""Models of which the zoo has a smaller one of the kind: tests of these are slow ones."""

__all__ = ["BENCH", "RARE", "ZOO", "ZooModel"]
