"""Plans on recorded costs are what they were when they were last written on purpose."""

from __future__ import annotations

import pytest
import torch

from tests.golden import CASES, FOLDER, TORCH, plans_of, text_of


@pytest.mark.skipif(torch.__version__.split("+")[0] != TORCH, reason=f"recorded with {TORCH}")
@pytest.mark.parametrize("case", CASES)
def test_plans_are_what_they_were(case: str):
    expected = (FOLDER / "plans" / f"{case}.txt").read_text()
    assert text_of(plans_of(case)) == expected, "if that is meant: python -m tests.golden --write"


def test_each_file_belongs_to_a_case():
    assert {file.stem for file in (FOLDER / "plans").iterdir()} == {*CASES}
    used = {costs for costs, _ in CASES.values()}
    assert {file.stem for file in (FOLDER / "costs").iterdir()} == used
