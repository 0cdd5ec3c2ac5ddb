"""Tiny random models of other libraries, see ``benchmarks/wild.py``."""

from __future__ import annotations

from benchmarks.wild_models import (
    broken,
    broken_texts,
    graphs,
    images,
    pictures,
    texts,
    trainers,
    volumes,
)
from benchmarks.wild_models.registry import PACKAGES, WILD, Case, Wild, prepare

__all__ = [
    "PACKAGES",
    "WILD",
    "Case",
    "Wild",
    "broken",
    "broken_texts",
    "graphs",
    "images",
    "pictures",
    "prepare",
    "texts",
    "trainers",
    "volumes",
]
