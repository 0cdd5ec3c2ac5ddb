"""Pictures of the documentation show the recorded figures."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from benchmarks.pictures import frontier, style
from benchmarks.pictures.frontier import best_of, points_of

ROOT = Path(__file__).parents[2]


def test_settings_with_the_same_peak_are_one_point() -> None:
    rows = [
        {"peak": 3 << 20, "seconds": {"ours": [2.0, 2.0], "kept": [1.0, 2.0]}},
        {"peak": 3 << 20, "seconds": {"ours": [6.0], "kept": [2.0]}},
        {"peak": 1 << 20, "seconds": {"ours": [4.0], "kept": [1.0]}},
    ]
    assert points_of(rows, "ours", "peak") == [(1.0, 4.0), (3.0, 2.0)]


def test_the_best_points_are_those_that_no_smaller_peak_undercuts() -> None:
    assert best_of([(1, 4.0), (2, 5.0), (3, 2.0), (4, 2.0)]) == [(1, 4.0), (3, 2.0)]


def test_the_picture_of_the_readme_is_drawn_from_recorded_figures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(style, "IMAGES", tmp_path)
    figure, axes = frontier.draw("gpt16")
    frontier.label(axes)
    assert style.write(figure, "frontier").stat().st_size > 10_000
    file = ROOT / "benchmarks/results/frontier/gpt16.json"
    recorded = json.loads(file.read_text())["results"]["points"]
    shown = sum(len(line.get_xdata()) for line in axes.lines if line.get_marker() != "None")
    assert len(recorded) < shown <= 2 * len(recorded)


def test_pictures_are_small_and_have_a_text() -> None:
    used = set()
    for page in (ROOT / "docs/explanation").glob("*.md"):
        for text, target in re.findall(r"!\[([^\]]*)\]\(([^)]+)\)", page.read_text()):
            picture = (page.parent / target).resolve()
            assert picture.stat().st_size < 60_000
            assert len(text.split()) > 10, target
            used.add(picture.name)
    assert len(used) >= 8
