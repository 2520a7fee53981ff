"""Drawn layouts: every element has exactly one owner."""

from hypothesis import example, given

from zero_sim.fuzz.layouts import layouts
from zero_sim.layout import LayoutPolicy, ParamSpec, plan_buffers

EMPTY = [ParamSpec(name="empty", shape=(0,), dtype="fp32")]
LONE = LayoutPolicy(shard_count=3, align_elems=2, bucket_elems=1)


@given(layouts())
@example((EMPTY, LONE, plan_buffers(EMPTY, policy=LONE)))
def test_every_param_is_placed_once(layout):
    """Grouping, ordering and bucketing lose and duplicate no param."""
    specs, policy, buffers = layout
    placed = [param for buffer in buffers for param in buffer.params]
    assert sorted(p.name for p in placed) == sorted(s.name for s in specs)
    assert all(p.span.numel == p.spec.numel for p in placed)
    for buffer in buffers:
        members = [s for s in specs if (s.kind, s.dtype) == (buffer.key.kind, buffer.key.dtype)]
        expected = members if policy.param_order == "registration" else members[::-1]
        assert [p.spec for p in buffer.params] == expected


@given(layouts())
def test_buckets_tile_the_buffer_and_params_tile_their_bucket(layout):
    """A buffer is a sequence of buckets, each of params and then padding."""
    _, _, buffers = layout
    for buffer in buffers:
        position = 0
        for index, bucket in enumerate(buffer.buckets):
            assert (bucket.index, bucket.span.start) == (index, position)
            for param in bucket.params:
                assert (param.bucket, param.span.start) == (index, position)
                position = param.span.stop
            assert bucket.padding.start == position
            position = bucket.padding.stop
            assert bucket.span.stop == position
        assert buffer.span.stop == position
        assert buffer.numel + buffer.padding_elems == position


@given(layouts())
def test_bucket_closes_once_full(layout):
    """All buckets but the last reach bucket_elems, and only with their last non-empty param."""
    _, policy, buffers = layout
    for buffer in buffers:
        if policy.bucket_elems is None:
            assert len(buffer.buckets) == 1
            continue
        for bucket in buffer.buckets:
            sizes = [param.spec.numel for param in bucket.params if param.spec.numel]
            assert sum(sizes[:-1]) < policy.bucket_elems
            if bucket is not buffer.buckets[-1]:
                assert sum(sizes) >= policy.bucket_elems


@given(layouts())
def test_shards_tile_their_bucket(layout):
    """Shards are in order and without gaps under every partition; shard_of inverts them."""
    _, policy, buffers = layout
    for buffer in buffers:
        for bucket in buffer.buckets:
            spans = [bucket.shard_span(shard) for shard in range(policy.shard_count)]
            assert tuple(span.numel for span in spans) == bucket.shard_sizes
            assert bucket.is_even == (len(set(bucket.shard_sizes)) == 1)
            edges = [bucket.span.start, *(span.stop for span in spans)]
            assert [span.start for span in spans] == edges[:-1]
            assert edges[-1] == bucket.span.stop
            for shard, span in enumerate(spans):
                if not span.empty:
                    assert {bucket.shard_of(span.start), bucket.shard_of(span.stop - 1)} == {shard}


@given(layouts())
def test_padded_shards_are_even_and_aligned(layout):
    """All shards have one length, and each starts on both alignment boundaries."""
    _, policy, buffers = layout
    for buffer in buffers if policy.partition == "padded" else ():
        elem_bytes = {"bf16": 2, "fp32": 4}[buffer.key.dtype]
        for bucket in buffer.buckets:
            assert bucket.is_even
            for start in (bucket.shard_span(shard).start for shard in range(policy.shard_count)):
                assert start % policy.align_elems == 0
                assert start * elem_bytes % policy.align_bytes == 0
            # Padding is the least that makes shards even and aligned.
            multiple = policy.shard_multiple(buffer.key.dtype)
            assert bucket.padding.numel < policy.shard_count * multiple
            # The multiple is the least length that fits both alignments.
            assert not any(
                length % policy.align_elems == 0 and length * elem_bytes % policy.align_bytes == 0
                for length in range(1, multiple)
            )


@given(layouts())
def test_uneven_shards_are_unpadded_and_longest_first(layout):
    """The first numel % shard_count shards of a bucket hold one element more."""
    _, policy, buffers = layout
    for buffer in buffers if policy.partition == "uneven" else ():
        for bucket in buffer.buckets:
            assert bucket.padding.empty
            remainder = bucket.span.numel % policy.shard_count
            least = bucket.span.numel // policy.shard_count
            expected = (least + 1,) * remainder + (least,) * (policy.shard_count - remainder)
            assert bucket.shard_sizes == expected


@given(layouts())
def test_whole_buckets_are_assigned_round_robin(layout):
    """One shard owns a whole bucket without padding; the next shard owns the next bucket."""
    _, policy, buffers = layout
    for buffer in buffers if policy.partition == "one-owner" else ():
        for bucket in buffer.buckets:
            assert bucket.padding.empty
            owner = bucket.index % policy.shard_count
            assert [shard for shard, size in enumerate(bucket.shard_sizes) if size] in ([], [owner])


@given(layouts())
def test_no_row_crosses_a_shard_boundary(layout):
    """Each non-empty param has its own bucket, even shards and boundaries only between rows."""
    _, policy, buffers = layout
    for buffer in buffers if policy.partition == "rows" else ():
        for bucket in buffer.buckets:
            assert bucket.is_even
            shapes = [param.spec.shape for param in bucket.params if param.spec.numel]
            assert len(shapes) <= 1
            for shape in shapes:
                row_elems = bucket.payload.numel // (shape[0] if shape else 1)
                assert bucket.shard_sizes[0] % row_elems == 0
                # The fewest rows per shard that hold all rows.
                rows = -(-(shape[0] if shape else 1) // policy.shard_count)
                assert bucket.shard_sizes[0] == rows * row_elems


@given(layouts())
def test_fragments_cover_every_element_once_without_padding(layout):
    """Fragments of all shards cover the payload without overlap and agree with owner."""
    _, policy, buffers = layout
    for buffer in buffers:
        owners = [None] * buffer.span.stop
        for shard in range(policy.shard_count):
            for fragment in buffer.fragments(shard):
                for element in range(fragment.in_buffer.start, fragment.in_buffer.stop):
                    assert owners[element] is None
                    owners[element] = shard
        assert owners == [buffer.owner(element) for element in range(buffer.span.stop)]
        for bucket in buffer.buckets:
            payload, padding = bucket.payload, bucket.padding
            assert None not in owners[payload.start : payload.stop]
            assert set(owners[padding.start : padding.stop]) <= {None}


@given(layouts())
def test_concatenated_fragments_are_the_param(layout):
    """In shard order, the fragments of a param are adjacent and end where the param ends."""
    _, policy, buffers = layout
    for buffer in buffers:
        reached = {param.name: 0 for param in buffer.params}
        spans = {param.name: param.span for param in buffer.params}
        for shard in range(policy.shard_count):
            for fragment in buffer.fragments(shard):
                shard_span = buffer.shard_span(bucket=fragment.bucket, shard=shard)
                assert not fragment.in_param.empty
                assert fragment.in_param.start == reached[fragment.param]
                assert fragment.in_param.shift(spans[fragment.param].start) == fragment.in_buffer
                assert fragment.in_shard.shift(shard_span.start) == fragment.in_buffer
                reached[fragment.param] = fragment.in_param.stop
        assert reached == {param.name: param.spec.numel for param in buffer.params}
