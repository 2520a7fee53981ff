"""The targets that a scenario may name, and how a user's own is found."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

from zero_sim.errors import UsageError
from zero_sim.targets.own import ZeroSimTarget
from zero_sim.targets.protocol import Target
from zero_sim.targets.torch_ddp import TorchDDP, TorchZeroRedundancy
from zero_sim.targets.torch_fsdp2 import TorchFSDP2

_TARGETS: dict[str, Target] = {
    target.name: target
    for target in (ZeroSimTarget(), TorchDDP(), TorchZeroRedundancy(), TorchFSDP2())
}


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
            f"expected system.target to be one of {', '.join(target_names())}, got {name!r}. A "
            "target of your own is named with --target module:name."
        )
    return _TARGETS[name]


def import_target(name: str) -> Target:
    """A registered target, or for `module:name` one imported from a module; runs its code.

    Args:
        name: A registered name; or a module, found in the current folder too, and what in it is
            the target: an object, or a class made without arguments.

    Raises:
        UsageError: There is no such module or name in it, or what it names is no target.
    """
    module_name, colon, attribute = name.partition(":")
    if not colon:
        return find_target(name)
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise  # Of what the module itself imports.
        raise UsageError(
            f"expected an importable module before the colon, got --target {name}. Try running in "
            "its folder, or installing it."
        ) from None
    except ValueError:
        raise UsageError(f"expected --target module:name, got {name!r}.") from None
    target: Any = getattr(module, attribute, None)
    if isinstance(target, type):
        target = target()
    if not hasattr(target, "build") or not hasattr(target, "name"):
        raise UsageError(
            f"expected a target, with `name` and `build`, got {target!r} from --target {name}. "
            "zero_sim.targets.Target says what it needs."
        )
    return target
