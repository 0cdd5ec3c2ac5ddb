"""The style of all pictures: readable at 480 pixels, on white, with labels next to the lines."""

from __future__ import annotations

from pathlib import Path
from typing import Any

IMAGES = Path(__file__).parent.parent.parent / "docs" / "images"

WIDTH_IN = 6.0
"""Width of a picture in inches. At 480 pixels an inch has 80, and a font of 10 points 11 pixels."""

OURS, THEIRS, OTHER, GRAY = "#1f6f8b", "#c2541b", "#7b4fa3", "#626a78"
"""Colors of fxremat, of its peers, of a third thing, and of what is given."""


def new_picture(height_in: float, rows: int = 1, **options: Any) -> tuple[Any, Any]:
    """Return a figure on white and its axes, without frames at the top and at the right."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    with rc_context({"font.size": 11, "axes.linewidth": 0.8, "svg.hashsalt": "fxremat"}):
        figure = Figure(figsize=(WIDTH_IN, height_in), layout="constrained", facecolor="white")
        axes = figure.subplots(rows, 1, **options)
    for each in [axes] if rows == 1 else list(axes):
        each.spines[["top", "right"]].set_visible(False)
        each.tick_params(length=3)
    return figure, axes


def write(figure: Any, name: str) -> Path:
    """Write a picture as ``docs/images/NAME.png``, and return its path."""
    path = IMAGES / f"{name}.png"
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=160, metadata={"Software": None})
    _reduce_colors(path)
    print(f"wrote {path}: {path.stat().st_size} bytes")
    return path


def _reduce_colors(path: Path) -> None:
    """Store a picture with a palette of 128 colors, a third of its size."""
    from PIL import Image

    with Image.open(path) as image:
        small = image.convert("RGB").quantize(128, dither=Image.Dither.NONE)
    small.save(path, optimize=True)
