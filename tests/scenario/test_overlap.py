"""Whether a case that says nothing of it overlaps."""

from __future__ import annotations

import pytest

from zero_sim.scenario.overlap import overlaps_grads, overlaps_params
from zero_sim.scenario.spec import SystemSpec


@pytest.mark.parametrize(
    ("settings", "grads", "params"),
    [
        ({}, False, False),
        ({"bucket_elems": 9}, True, True),
        ({"bucket_elems": 9, "stage": 0}, True, False),
        ({"bucket_elems": 9, "overlap_grads": False, "overlap_params": False}, False, False),
        ({"overlap_grads": True, "overlap_params": True}, True, True),
    ],
)
def test_follows_the_buckets_unless_told(settings, grads, params):
    """One bucket has nothing to overlap with, and stage 0 no params to gather."""
    system = SystemSpec(**settings)
    assert (overlaps_grads(system), overlaps_params(system)) == (grads, params)
