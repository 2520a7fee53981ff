"""Drawn layouts: every kind occurs, and failures shrink to small ones."""

import random

import pytest
from hypothesis import Phase, find, given, seed, settings

from tests.fuzz.test_strategies import QUIET
from zero_sim.fuzz.layouts import layouts

MANY = settings(QUIET, max_examples=5000)


@pytest.fixture(scope="module")
def drawn():
    taken = []

    @seed(0)
    @settings(QUIET, max_examples=1000, phases=(Phase.generate,))
    @given(layouts())
    def take(layout):
        taken.append(layout)

    take()
    return taken


FEATURES = {
    "scalar": lambda specs, policy, buffers: any(spec.shape == () for spec in specs),
    "matrix": lambda specs, policy, buffers: any(len(spec.shape) == 2 for spec in specs),
    "empty param": lambda specs, policy, buffers: any(spec.numel == 0 for spec in specs),
    "eight params": lambda specs, policy, buffers: len(specs) == 8,
    "several buffers": lambda specs, policy, buffers: len(buffers) > 2,
    "several buckets": lambda specs, policy, buffers: len(buffers[0].buckets) > 1,
    "a bucket that fits": lambda specs, policy, buffers: (
        policy.bucket_elems in [bucket.payload.numel for bucket in buffers[0].buckets]
    ),
    "uneven": lambda specs, policy, buffers: policy.partition == "uneven",
    "reverse": lambda specs, policy, buffers: policy.param_order == "reverse",
    "both alignments": lambda specs, policy, buffers: (
        policy.align_elems > 1 and policy.align_bytes > 1
    ),
    "more shards than elements": lambda specs, policy, buffers: (
        policy.shard_count > sum(spec.numel for spec in specs) > 0
    ),
}


@pytest.mark.parametrize("feature", FEATURES)
def test_every_kind_of_layout_is_drawn(drawn, feature):
    assert 5 <= sum(FEATURES[feature](*layout) for layout in drawn) < len(drawn)


@pytest.mark.parametrize("start", range(8))
def test_split_param_shrinks_to_two_shards_and_two_elements(start):
    def has_cut_param(layout):
        _, policy, buffers = layout
        names = [
            fragment.param
            for buffer in buffers
            for shard in range(policy.shard_count)
            for fragment in buffer.fragments(shard)
        ]
        return len(set(names)) < len(names)

    specs, policy, _ = find(layouts(), has_cut_param, settings=MANY, random=random.Random(start))
    assert [(spec.shape, spec.dtype, spec.kind) for spec in specs] == [((2,), "fp32", "dense")]
    assert (policy.shard_count, policy.bucket_elems, policy.partition) == (2, None, "padded")
