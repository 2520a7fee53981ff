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

    @pytest.mark.parametrize("field", ["shard_count", "align_elems", "bucket_elems"])
    @pytest.mark.parametrize("value", [0, -1, 1.5, True, "2"])
    def test_refuses_what_is_no_count(self, field, value):
        """Counts are integers of at least 1; the message names field and value."""
        with pytest.raises(LayoutError, match=f"{field}={value!r}"):
            LayoutPolicy(**{"shard_count": 1, field: value})

    def test_refuses_an_unknown_order(self):
        """The message lists the orders that exist."""
        with pytest.raises(LayoutError, match=r"registration, reverse but got param_order='size'"):
            LayoutPolicy(shard_count=1, param_order="size")
