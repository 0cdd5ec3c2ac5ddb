"""Schedules as numbers: nothing lost on the way."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from fxremat.ir import Backward, Forward, Keep, Schedule
from fxremat.ir.schedule import ALL, BACKWARD, KINDS, coded, decoded

STAGES = st.integers(0, 5000)
OPS = st.one_of(
    st.builds(Backward, STAGES),
    st.builds(Forward, STAGES, st.sampled_from([Keep.NONE, Keep.INPUT])),
    st.builds(Forward, STAGES, st.just(Keep.ALL), st.integers(0, KINDS - ALL - 1)),
)


@given(st.lists(OPS).map(tuple).map(Schedule))
def test_a_schedule_is_what_its_codes_stand_for(schedule: Schedule):
    codes = coded(schedule)
    assert decoded(codes) == schedule
    assert codes.dtype == np.int64
    assert codes.shape == (len(schedule),)
    stages, backwards = codes // KINDS, codes % KINDS == BACKWARD
    assert stages.tolist() == [op.stage for op in schedule.computations]
    assert backwards.tolist() == [isinstance(op, Backward) for op in schedule]
