"""The targets that a scenario may name."""

from __future__ import annotations

from zero_sim.errors import UsageError
from zero_sim.targets.own import ZeroSimTarget
from zero_sim.targets.protocol import Target

_TARGETS: dict[str, Target] = {target.name: target for target in (ZeroSimTarget(),)}


def target_names() -> tuple[str, ...]:
    """Names of all registered targets."""
    return tuple(sorted(_TARGETS))


def find_target(name: str) -> Target:
    """The registered target of that name.

    Raises:
        UsageError: There is none; lists those there are.
    """
    if name not in _TARGETS:
        raise UsageError(
            f"expected system.target to be one of {', '.join(target_names())}, got {name!r}"
        )
    return _TARGETS[name]
