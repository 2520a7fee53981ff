"""Requests for a layout."""

from __future__ import annotations

import pytest

from zero_sim.errors import LayoutError
from zero_sim.layout import LayoutPolicy, ParamSpec


class TestParamSpec:
    """ParamSpec: a name, a shape and the keys for grouping."""

    @pytest.mark.parametrize(("shape", "numel"), [((), 1), ((3, 4), 12), ((3, 0), 0)])
    def test_counts_elements(self, shape, numel):
        assert ParamSpec(name="w", shape=shape, dtype="bf16").numel == numel

    def test_refuses_a_negative_dimension(self):
        with pytest.raises(LayoutError, match=r"\(3, -1\) for param 'w'"):
            ParamSpec(name="w", shape=(3, -1), dtype="bf16")


class TestLayoutPolicy:
    """Policies that LayoutPolicy refuses."""

    @pytest.mark.parametrize("field", ["shard_count", "align_elems", "align_bytes", "bucket_elems"])
    @pytest.mark.parametrize("value", [0, -1, 1.5, True, "2"])
    def test_refuses_an_invalid_count(self, field, value):
        with pytest.raises(LayoutError, match=f"{field}={value!r}"):
            LayoutPolicy(**{"shard_count": 1, field: value})

    @pytest.mark.parametrize(
        ("fields", "said"),
        [
            ({"param_order": "size"}, "registration, reverse, got param_order='size'"),
            ({"partition": "even"}, "padded, uneven, rows, one-owner, got partition='even'"),
            (
                {"partition": "rows", "bucket_elems": 9},
                r"bucket_elems=1 with partition='rows'.*got.*=9",
            ),
            *(
                ({"partition": "uneven", align: 2}, rf"no alignment.*{align}=2.*partition='padded'")
                for align in ("align_elems", "align_bytes")
            ),
        ],
        ids=str,
    )
    def test_refuses_settings_without_a_layout(self, fields, said):
        with pytest.raises(LayoutError, match=said):
            LayoutPolicy(shard_count=1, **fields)

    def test_refuses_byte_alignment_of_an_unknown_dtype(self):
        """align_elems alone needs no bytes."""
        assert LayoutPolicy(shard_count=1, align_elems=3).shard_multiple("int4") == 3
        with pytest.raises(LayoutError, match=r"align_bytes=16, got dtype='int4'.*fp32"):
            LayoutPolicy(shard_count=1, align_bytes=16).shard_multiple("int4")
