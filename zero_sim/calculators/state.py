"""Each optimizer's state tensors, under torch's names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from zero_sim.errors import UsageError
from zero_sim.scenario.spec import OptimizerName, OptimizerSpec

_ALWAYS: Final[Mapping[OptimizerName, tuple[str, ...]]] = {
    "adamw": ("exp_avg", "exp_avg_sq"),
    "adam": ("exp_avg", "exp_avg_sq"),
    "sgd": (),
    "rmsprop": ("square_avg",),
    "adagrad": ("sum",),
    "nadam": ("exp_avg", "exp_avg_sq"),
    "radam": ("exp_avg", "exp_avg_sq"),
    "adamax": ("exp_avg", "exp_inf"),
    "adadelta": ("square_avg", "acc_delta"),
    "asgd": ("ax",),
    "rprop": ("prev", "step_size"),
    "muon": ("momentum_buffer",),
    "lamb": ("exp_avg", "exp_avg_sq"),
}
"""Names of fp32 state tensors. Counters are omitted, because they do not grow with the model."""

# Masters are fp32, and torch keeps state in the dtype of the stepped tensor.
STATE_BYTES: Final = 4
"""Bytes per element in a state tensor."""


def state_names(spec: OptimizerSpec) -> tuple[str, ...]:
    """Return the names of state tensors that have the master's shape.

    Args:
        spec: The optimizer and its settings, some of which need more state.
    """
    # A target's own update rule has unknown state, which counts as none.
    names = _ALWAYS.get(spec.name, ())
    if spec.name in ("adam", "adamw") and spec.amsgrad:
        names += ("max_exp_avg_sq",)
    if spec.name in ("sgd", "rmsprop") and spec.momentum:
        names += ("momentum_buffer",)
    return names


def check_name(name: str) -> OptimizerName:
    """Return the name of a known optimizer, ignoring case.

    Raises:
        UsageError: If the optimizer is unknown; the message lists all names.
    """
    for known in _ALWAYS:
        if name.lower() == known:
            return known
    names = ", ".join(_ALWAYS)
    raise UsageError(f"expected --optimizer to be one of {names}; got {name!r}.")
