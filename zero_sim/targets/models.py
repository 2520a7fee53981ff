"""A target's own models: `Target.models`, named `own:NAME` in scenarios."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from zero_sim.errors import Problem, ProtocolError
from zero_sim.scenario.kinds import is_own_model
from zero_sim.scenario.spec import OwnModelName
from zero_sim.targets.answers import shown
from zero_sim.targets.protocol import Target
from zero_sim.workloads import OwnModel, make_known


def own_models_of(target: Target) -> tuple[OwnModelName, ...]:
    """Register a target's own models in this process, and return their names.

    Raises:
        ProtocolError: Its `models` are no mapping from names to `OwnModel`.
    """
    declared: object = getattr(target, "models", None)
    if declared is None:
        return ()
    if not isinstance(declared, Mapping):
        raise _misdeclared(target, shown(declared))
    models: dict[OwnModelName, OwnModel] = {}
    for key, model in declared.items():
        name = f"own:{key}"
        # The name appears in TOML, file names and commands, so few characters are allowed.
        if not isinstance(model, OwnModel) or not is_own_model(name):
            raise _misdeclared(target, f"{key!r}: {shown(model)}")
        models[name] = model
    make_known(models)
    return tuple(models)


def _misdeclared(target: Target, got: str) -> ProtocolError:
    return ProtocolError(
        f"expected `models` of target {target.name!r} to map names of letters, digits, `_`, `.` "
        f"and `-` to zero_sim.targets.OwnModel, got {got}."
    )


def unknown_own_model(name: OwnModelName, models: Sequence[str]) -> Problem:
    """Return the problem of a case whose model belongs to another target."""
    own = ", ".join(filter(is_own_model, models)) or "none"
    return Problem(
        path="model.name",
        message=f"expected a model in this target's `models` ({own}), got {name!r}.",
        suggestion="Name the target that has it: --target module:name.",
    )
