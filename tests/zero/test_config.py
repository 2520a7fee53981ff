"""The engine's configuration."""

from __future__ import annotations

import dataclasses

import pytest

from tests.configs import zero_config
from zero_sim.errors import UsageError
from zero_sim.zero import ZeroConfig


class TestZeroConfig:
    """ZeroConfig refuses values that mean nothing."""

    @pytest.mark.parametrize(
        ("field", "value"),
        [
            ("stage", 4),
            ("stage", True),
            ("divide", "mean"),
            ("divide_by", "rows"),
            ("sync", "first"),
            ("grad_dtype", "bf16"),
        ],
    )
    def test_refuses_an_unknown_value(self, field, value):
        """The message names the field, its choices and what came."""
        with pytest.raises(UsageError, match=f"{field} to be one of .*, got {value!r}"):
            ZeroConfig(**{field: value})

    @pytest.mark.parametrize("field", ["redundancy", "micro_batches"])
    @pytest.mark.parametrize("value", [0, -1, 1.0, True, "2"])
    def test_refuses_what_is_no_count(self, field, value):
        """Counts are integers of at least 1."""
        with pytest.raises(UsageError, match=f"{field} to be an integer.*, got {value!r}"):
            ZeroConfig(**{field: value})

    @pytest.mark.parametrize(
        ("field", "value"),
        [("redundancy", 2), ("partition", "uneven"), ("overlap_params", True)],
    )
    def test_refuses_shards_with_stage_0(self, field, value):
        """What is about shards means nothing without any."""
        with pytest.raises(UsageError, match=f"{field}=.* with stage=0.*got {value!r}"):
            zero_config(stage=0, **{field: value})

    @pytest.mark.parametrize("divide", ["pre", "premul"])
    def test_refuses_a_count_that_comes_too_late(self, divide):
        """Rows, or micro-batches of unknown number, before the first of several sums."""
        early = {"divide": divide, "sync": "every"}
        with pytest.raises(UsageError, match=r"rows are counted only after.*sync='last'"):
            ZeroConfig(divide_by="tokens", **early)
        with pytest.raises(UsageError, match="expected micro_batches with"):
            ZeroConfig(divide_by="micro-batches", **early)
        assert ZeroConfig(divide_by="micro-batches", micro_batches=2, **early).divides_before_sum

    def test_refuses_a_number_of_shards(self):
        """It follows from the groups, and one that is set would be ignored."""
        with pytest.raises(UsageError, match=r"got 2\. Remove shard_count"):
            zero_config(shard_count=2)

    def test_cannot_change(self):
        """A config read by three layers stays what it was."""
        with pytest.raises(dataclasses.FrozenInstanceError):
            ZeroConfig().stage = 0
