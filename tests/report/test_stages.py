"""Stages are told together where they are treated alike, and no stage is told twice."""

from __future__ import annotations

import random
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from fxremat.report.stages import MOST_ROWS, StageReport, group_alike, report_stages
from tests.examples import examples
from tests.plans import MIB, everything_kept, plan_of, schedule_of

KEPT = report_stages(plan_of(everything_kept(1), stages=1))[0]
AGAIN, _ = report_stages(plan_of(schedule_of("F_ck 0, F_all 1, B 1, F_all 0, B 0"), stages=2))


def stories(ways: str) -> list[StageReport]:
    """One stage a letter: ``k`` is kept, ``r`` recomputed."""
    found = {"k": KEPT, "r": replace(AGAIN, held_bytes=0)}
    return [replace(found[way], index=i) for i, way in enumerate(ways)]


def labels(ways: str, modules: list[str] | None = None) -> list[tuple[str, str]]:
    return [(row.label, row.module) for row in group_alike(stories(ways), modules or [])]


def test_stages_that_follow_each_other():
    assert labels("kkkrrk") == [("0–2", ""), ("3–4", ""), ("5", "")]
    assert labels("") == []


def test_blocks_that_repeat():
    blocks = [f"h.{i}.{part}" for i in range(6) for part in ("attn", "mlp")]
    modules = ["embed", *blocks, "head"]
    assert labels("k" + 6 * "kr" + "k", modules) == [
        ("0", "embed"),
        ("1 … 11", "h.0–5.attn"),
        ("2 … 12", "h.0–5.mlp"),
        ("13", "head"),
    ]


def test_blocks_treated_otherwise_are_told_apart():
    blocks = [f"h.{i}.{part}" for i in range(6) for part in ("attn", "mlp")]
    assert labels(3 * "rr" + 3 * "kk", blocks) == [("0–5", "h.0–2"), ("6–11", "h.3–5")]


def test_shares_that_differ_much_are_told_apart():
    part = replace(AGAIN, saved_bytes=8 * MIB, held_bytes=6 * MIB)
    less = replace(part, held_bytes=MIB)
    own = [replace(s, index=i) for i, s in enumerate((part, part, less, less))]
    modules = [f"{i}" for i in range(4)]
    assert [row.module for row in group_alike(own, modules)] == ["0–1", "2–3"]


@examples(1)
@given(st.text(alphabet="kr", max_size=300), st.integers(1, 9))
def test_every_stage_is_told_once(ways: str, length: int):
    own = stories(ways)
    for modules in ([], [f"h.{i // length}.{i % length}" for i in range(len(ways))]):
        rows = group_alike(own, modules)
        told = [story.index for row in rows for story in row.stages]
        assert sorted(told) == list(range(len(ways)))
        assert all(run for row in rows for run in row.runs)


def test_many_rows_become_one_a_block():
    """Blocks of which each is treated in its own way, by chance."""
    ways = "".join(random.Random(0).choices("kr", k=160))
    modules = [f"h.{i // 8}.{i % 8}" for i in range(160)]
    rows = group_alike(stories(ways), modules)
    assert len(rows) <= 20 < MOST_ROWS
    assert all(run[0].index % 8 == 0 and len(run) == 8 for row in rows for run in row.runs)
