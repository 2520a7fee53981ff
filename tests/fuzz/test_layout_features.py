"""Features are read off plans made by hand."""

import pytest

from zero_sim.fuzz.layout_features import layout_features
from zero_sim.layout import LayoutPolicy, ParamSpec, plan_buffers


def layout(sizes, **policy):
    specs = [ParamSpec(name=f"p{i}", shape=(n,), dtype="fp32") for i, n in enumerate(sizes)]
    return plan_buffers(specs, policy=LayoutPolicy(**policy))


@pytest.mark.parametrize(
    ("sizes", "policy", "expected"),
    [
        ([4], {"shard_count": 1}, {"one shard"}),
        ([4], {"shard_count": 2}, {"param cut once", "payload just fits"}),
        ([6], {"shard_count": 3}, {"param cut often", "payload just fits"}),
        (
            [2, 2],
            {"shard_count": 2},
            {"shard ends between params", "param of N", "payload just fits"},
        ),
        (
            [3],
            {"shard_count": 2},
            {"param cut once", "bucket with padding", "payload one over", "payload one short"},
        ),
        (
            [1, 0],
            {"shard_count": 4},
            {
                "bucket with padding", "shard without payload", "rank that owns nothing",
                "empty param", "one-element param", "param smaller than N", "payload one over",
            },
        ),
        (
            [4, 4],
            {"shard_count": 2, "bucket_elems": 4},
            {
                "param cut once", "payload just fits", "bucket exactly full", "bucket of one param",
                "several buckets",
            },
        ),
        (
            [5],
            {"shard_count": 2, "partition": "uneven"},
            {"param cut once", "uneven shards", "payload one over", "payload one short"},
        ),
        (
            [6],
            {"shard_count": 2, "align_elems": 3},
            {"param cut once", "aligned", "payload just fits"},
        ),
        (
            [2, 2],
            {"shard_count": 1, "param_order": "reverse"},
            {"one shard", "reversed"},
        ),
    ],
)  # fmt: skip
def test_features_of_a_layout(sizes, policy, expected):
    assert layout_features(layout(sizes, **policy)) == expected


def test_several_buffers_are_one_layout():
    specs = [
        ParamSpec(name="dense", shape=(4,), dtype="fp32"),
        ParamSpec(name="expert", shape=(3,), dtype="fp32", kind="expert"),
    ]
    dense = plan_buffers(specs[:1], policy=LayoutPolicy(shard_count=4))
    expert = plan_buffers(specs[1:], policy=LayoutPolicy(shard_count=1))
    found = layout_features([*dense, *expert])
    assert {"several buffers", "buffers sharded differently", "one shard"} <= found
    assert "rank that owns nothing" not in found
