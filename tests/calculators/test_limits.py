"""Limits of memory as ranks grow, and their picture."""

import runpy
from pathlib import Path

import pytest

from zero_sim.calculators.counted import counted_model
from zero_sim.calculators.limits import limit_rows

SCRIPT = Path(__file__).parents[2] / "docs" / "site" / "memory_picture.py"
RANKS = (2, 4, 8, 64, 1024)


@pytest.fixture(scope="module")
def rows():
    model = counted_model(10**10, dtype="bf16")
    found = limit_rows(model, ranks=RANKS, stages=(0, 1, 2, 3))
    return {row.name: row for row in found}


def test_limits_are_4_times_8_times_and_n_times_less(rows):
    assert {row.unsharded for row in rows.values()} == {160 * 10**9}
    limits = [rows[f"stage {stage}"].limit for stage in (0, 1, 2, 3)]
    assert limits == [160 * 10**9, 160 * 10**9 // 4, 160 * 10**9 // 8, 0]
    assert [rows["stage 3"].unsharded / b for b in rows["stage 3"].by_ranks.values()] == [*RANKS]


def test_stage_1_takes_4_bytes_per_param_and_12_over_the_ranks(rows):
    held = list(rows["stage 1"].by_ranks.values())
    assert held == [10**10 * (4 + 12 / ranks) for ranks in RANKS]


def test_moments_alone_save_a_quarter_on_2_ranks_and_at_most_a_half(rows):
    row = rows["fp32, moments alone"]
    saved = [1 - count / row.unsharded for count in row.by_ranks.values()]
    assert saved == [0.25, 0.375, 0.4375, 0.4921875, 0.49951171875]
    assert 1 - row.limit / row.unsharded == 0.5


def test_picture_is_up_to_date():
    names = runpy.run_path(str(SCRIPT))
    assert names["PICTURE"].read_text() == names["draw"](), f"Run python {SCRIPT}."
