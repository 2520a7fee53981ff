"""The engine's configuration."""

from __future__ import annotations

import dataclasses

import pytest

from zero_sim.errors import UsageError
from zero_sim.zero import ZeroConfig


class TestZeroConfig:
    """ZeroConfig refuses values that mean nothing."""

    @pytest.mark.parametrize(
        ("field", "value"),
        [("stage", 2), ("stage", True), ("divide", "mean"), ("grad_dtype", "bf16")],
    )
    def test_refuses_an_unknown_value(self, field, value):
        """The message names the field, its choices and what came."""
        with pytest.raises(UsageError, match=f"{field} to be one of .* but got {value!r}"):
            ZeroConfig(**{field: value})

    def test_cannot_change(self):
        """A config read by three layers stays what it was."""
        with pytest.raises(dataclasses.FrozenInstanceError):
            ZeroConfig().stage = 0
