"""What a layout is asked for."""

from __future__ import annotations

import pytest

from zero_sim.errors import LayoutError
from zero_sim.layout import LayoutPolicy, ParamSpec


class TestParamSpec:
    """ParamSpec is a name, a shape and what groups it."""

    @pytest.mark.parametrize(("shape", "numel"), [((), 1), ((3, 4), 12), ((3, 0), 0)])
    def test_counts_elements(self, shape, numel):
        """A scalar has one element; a zero dimension leaves none."""
        assert ParamSpec(name="w", shape=shape, dtype="bf16").numel == numel

    def test_refuses_a_negative_dimension(self):
        """The message names the param and the shape."""
        with pytest.raises(LayoutError, match=r"\(3, -1\) for param 'w'"):
            ParamSpec(name="w", shape=(3, -1), dtype="bf16")


class TestLayoutPolicy:
    """LayoutPolicy refuses what cannot be laid out."""

    @pytest.mark.parametrize("field", ["shard_count", "align_elems", "align_bytes", "bucket_elems"])
    @pytest.mark.parametrize("value", [0, -1, 1.5, True, "2"])
    def test_refuses_what_is_no_count(self, field, value):
        """Counts are integers of at least 1; the message names field and value."""
        with pytest.raises(LayoutError, match=f"{field}={value!r}"):
            LayoutPolicy(**{"shard_count": 1, field: value})

    def test_refuses_an_unknown_order(self):
        """The message lists the orders that exist."""
        with pytest.raises(LayoutError, match=r"registration, reverse, got param_order='size'"):
            LayoutPolicy(shard_count=1, param_order="size")

    def test_refuses_an_unknown_partition(self):
        """The message lists the partitions that exist."""
        with pytest.raises(
            LayoutError, match="padded, uneven, rows, one-owner, got partition='even'"
        ):
            LayoutPolicy(shard_count=1, partition="even")

    def test_refuses_rows_of_several_params(self):
        """Rows are cut in one param at a time."""
        with pytest.raises(LayoutError, match=r"bucket_elems=1 with partition='rows'.*got.*=9"):
            LayoutPolicy(shard_count=1, partition="rows", bucket_elems=9)

    @pytest.mark.parametrize("field", ["align_elems", "align_bytes"])
    def test_refuses_alignment_without_padding(self, field):
        """Uneven shards cannot be aligned."""
        with pytest.raises(LayoutError, match=rf"no alignment.*{field}=2.*partition='padded'"):
            LayoutPolicy(shard_count=1, partition="uneven", **{field: 2})

    def test_refuses_bytes_of_a_dtype_it_does_not_know(self):
        """Only where bytes are counted at all."""
        assert LayoutPolicy(shard_count=1, align_elems=3).shard_multiple("int4") == 3
        with pytest.raises(LayoutError, match=r"align_bytes=16, got dtype='int4'.*fp32"):
            LayoutPolicy(shard_count=1, align_bytes=16).shard_multiple("int4")
