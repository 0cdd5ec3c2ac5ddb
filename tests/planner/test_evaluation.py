"""What is said of an evaluation."""

from __future__ import annotations

import pytest

from fxremat.ir import Backward, Forward, Keep
from fxremat.planner.decision.candidates import Evaluation


@pytest.mark.parametrize(
    ("loss_point_bytes", "end_bytes", "peak"), [(4, 3, 9), (10, 3, 10), (4, 11, 11)]
)
def test_peak_is_the_most_at_any_instant(loss_point_bytes: int, end_bytes: int, peak: int):
    found = Evaluation(
        ops=(Forward(1, Keep.ALL), Backward(1), Backward(0)),
        loss_point=1,
        peaks_bytes=(5, 9, 2),
        held_bytes=(1, 2, 3),
        loss_point_bytes=loss_point_bytes,
        end_bytes=end_bytes,
        seconds=(0.0, 0.0, 0.0),
    )
    assert found.peak_bytes == peak
