"""Features are read off plans made by hand."""

import pytest

from zero_sim.fuzz.coverage import NAMES, Grid, features_of, pairs_count
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
    assert features_of(layout(sizes, **policy)) == expected


def test_several_buffers_are_one_layout():
    specs = [
        ParamSpec(name="dense", shape=(4,), dtype="fp32"),
        ParamSpec(name="expert", shape=(3,), dtype="fp32", kind="expert"),
    ]
    dense = plan_buffers(specs[:1], policy=LayoutPolicy(shard_count=4))
    expert = plan_buffers(specs[1:], policy=LayoutPolicy(shard_count=1))
    found = features_of([*dense, *expert], redundancy=2)
    assert {"several buffers", "buffers sharded differently", "redundant", "one shard"} <= found
    assert "rank that owns nothing" not in found


def test_the_grid_counts_features_and_pairs():
    grid = Grid()
    grid.add({"empty param", "one shard", "reversed"})
    grid.add({"empty param"})
    assert grid.counts["empty param"] == 2
    assert grid.counts["one shard + empty param"] == 1
    assert (grid.features_seen, grid.pairs_seen) == (3, 3)
    assert len(grid.pairs_unseen()) == pairs_count() - 3


def test_the_table_has_a_row_for_each_feature_and_a_mark_for_each_pair():
    grid = Grid()
    grid.add(NAMES[:2])
    rows = grid.table().splitlines()
    assert len(rows) == len(NAMES)
    assert rows[1].endswith("1  #")
    assert rows[2].endswith("0  . .")


def test_grids_add_up():
    one, other = Grid(), Grid()
    one.add({"aligned"})
    other.add({"aligned", "reversed"})
    one.merge(other.counts)
    assert one.counts["aligned"] == 2
    assert one.pairs_seen == 1
