"""All layouts up to small bounds, checked exhaustively."""

from itertools import product

import pytest

from zero_sim.layout import LayoutPolicy, ParamSpec, plan_buffers

SIZE_MAX = 4
PARAM_COUNT_MAX = 3
SHARD_COUNTS = (1, 2, 3, 4, 6)
ALIGNMENTS = (1, 2, 3)
BUCKET_ELEMS = (None, 1, 2, 3, 5)


def place_by_counting(sizes, *, shard_count, align_elems, bucket_elems, partition="padded"):
    """Lay the params out element by element: a list of (param, element, shard), None for padding.

    Written without spans or division, so that it shares no mistakes with the planner.
    """
    flat = []
    bucket = []

    def close_bucket():
        while partition == "padded" and len(bucket) % (shard_count * align_elems):
            bucket.append(None)
        # Round-robin turns give each shard's length; sorting makes the shards contiguous.
        shards = sorted(turn % shard_count for turn in range(len(bucket)))
        for entry, shard in zip(bucket, shards, strict=True):
            flat.append(None if entry is None else (*entry, shard))
        bucket.clear()

    for param, size in enumerate(sizes):
        if bucket_elems is not None and size and len(bucket) >= bucket_elems:
            close_bucket()
        bucket.extend((param, element) for element in range(size))
    close_bucket()
    return flat


def place_by_planner(sizes, **policy):
    """Return the list of `place_by_counting`, from the planner's fragments."""
    specs = [ParamSpec(name=str(i), shape=(n,), dtype="fp32") for i, n in enumerate(sizes)]
    (buffer,) = plan_buffers(specs, policy=LayoutPolicy(**policy))
    flat = [None] * buffer.span.stop
    for shard in range(policy["shard_count"]):
        for fragment in buffer.fragments(shard):
            for step in range(fragment.in_buffer.numel):
                position = fragment.in_buffer.start + step
                assert flat[position] is None
                flat[position] = (int(fragment.param), fragment.in_param.start + step, shard)
    return flat


@pytest.mark.parametrize("shard_count", SHARD_COUNTS)
def test_every_small_uneven_layout_agrees_with_counting(shard_count):
    """Without padding, the first shards get one element more."""
    for param_count in range(1, PARAM_COUNT_MAX + 1):
        for sizes in product(range(SIZE_MAX + 1), repeat=param_count):
            for bucket_elems in BUCKET_ELEMS:
                policy = {
                    "shard_count": shard_count,
                    "align_elems": 1,
                    "bucket_elems": bucket_elems,
                    "partition": "uneven",
                }
                expected = place_by_counting(sizes, **policy)
                assert place_by_planner(sizes, **policy) == expected, (sizes, policy)


@pytest.mark.parametrize("shard_count", SHARD_COUNTS)
def test_every_small_layout_agrees_with_counting(shard_count):
    """Position and owner of every element are those found by counting."""
    for param_count in range(1, PARAM_COUNT_MAX + 1):
        for sizes in product(range(SIZE_MAX + 1), repeat=param_count):
            for align_elems, bucket_elems in product(ALIGNMENTS, BUCKET_ELEMS):
                policy = {
                    "shard_count": shard_count,
                    "align_elems": align_elems,
                    "bucket_elems": bucket_elems,
                }
                expected = place_by_counting(sizes, **policy)
                assert place_by_planner(sizes, **policy) == expected, (sizes, policy)
