"""The state that each optimizer keeps of an element, under torch's own names."""

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
"""In fp32 each; counters, which do not grow with the model, are left out."""

STATE_BYTES: Final = 4


def state_names(spec: OptimizerSpec) -> tuple[str, ...]:
    """Names of the state tensors that have an element for each of a master's.

    Args:
        spec: The optimizer with its settings, some of which ask for more state; of a target's own
            rule nothing is known, and none is counted.
    """
    names = _ALWAYS.get(spec.name, ())
    if spec.name in ("adam", "adamw") and spec.amsgrad:
        names += ("max_exp_avg_sq",)
    if spec.name in ("sgd", "rmsprop") and spec.momentum:
        names += ("momentum_buffer",)
    return names


def check_name(name: str) -> OptimizerName:
    """The name of an optimizer.

    Raises:
        UsageError: There is no such optimizer; lists those there are.
    """
    for known in _ALWAYS:
        if name.lower() == known:
            return known
    names = ", ".join(_ALWAYS)
    raise UsageError(f"expected --optimizer to be one of {names}; got {name!r}.")
