"""Configuration of the engine."""

from __future__ import annotations

import dataclasses

import pytest

from tests.configs import zero_config
from zero_sim.errors import UsageError
from zero_sim.zero import ZeroConfig


class TestZeroConfig:
    """Values that ZeroConfig refuses."""

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
        """The message names the field, its choices and the value."""
        with pytest.raises(UsageError, match=f"{field} to be one of .*, got {value!r}"):
            ZeroConfig(**{field: value})

    @pytest.mark.parametrize("field", ["redundancy", "micro_batches"])
    @pytest.mark.parametrize("value", [0, -1, 1.0, True, "2"])
    def test_refuses_an_invalid_count(self, field, value):
        """Counts are integers of at least 1."""
        with pytest.raises(UsageError, match=f"{field} to be an integer.*, got {value!r}"):
            ZeroConfig(**{field: value})

    @pytest.mark.parametrize(
        ("field", "value"),
        [("redundancy", 2), ("partition", "uneven"), ("overlap_params", True)],
    )
    def test_stage_0_refuses_settings_of_shards(self, field, value):
        """Settings of shards have no meaning without shards."""
        with pytest.raises(UsageError, match=f"{field}=.* with stage=0.*got {value!r}"):
            zero_config(stage=0, **{field: value})

    @pytest.mark.parametrize("divide", ["pre", "premul"])
    def test_refuses_a_count_known_only_after_the_sum(self, divide):
        """The number of rows, or of undeclared micro-batches, is unknown at the first sum."""
        early = {"divide": divide, "sync": "every"}
        with pytest.raises(UsageError, match=r"rows are counted only after.*sync='last'"):
            ZeroConfig(divide_by="tokens", **early)
        with pytest.raises(UsageError, match="expected micro_batches with"):
            ZeroConfig(divide_by="micro-batches", **early)
        assert ZeroConfig(divide_by="micro-batches", micro_batches=2, **early).divides_before_sum

    def test_refuses_a_number_of_shards(self):
        """It follows from the groups, so a given value would be ignored."""
        with pytest.raises(UsageError, match=r"got 2\. Remove shard_count"):
            zero_config(shard_count=2)

    def test_is_immutable(self):
        """Three layers read the same config."""
        with pytest.raises(dataclasses.FrozenInstanceError):
            ZeroConfig().stage = 0
