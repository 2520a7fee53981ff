"""The targets that a scenario may name, and how a user's own is found."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from functools import cache
from importlib import import_module

from zero_sim.errors import UsageError
from zero_sim.scenario.suggest import nearest
from zero_sim.targets.imported import load_target
from zero_sim.targets.protocol import Target


def _by_name(names: Mapping[str, Sequence[str]]) -> dict[str, str]:
    return {name: f"zero_sim.targets.{module}" for module in names for name in names[module]}


# By name: a case imports the target that it names, and no other.
_TARGETS = _by_name(
    {
        "own": ["zero_sim"],
        "single_device": ["single-device", "single-device-keeping-grads"],
        "torch.ddp": ["torch-ddp", "torch-ddp-as-is", "torch-zero-redundancy"],
        "torch.fsdp1": ["torch-fsdp1", "torch-fsdp1-as-is"],
        "torch.fsdp2": ["torch-fsdp2", "torch-fsdp2-as-is"],
    }
)
"""Module that has a target in its `TARGETS`, by the target's name."""

_LIBRARIES = _by_name(
    {
        "deepspeed.declaration": [
            *("deepspeed-zero-0", "deepspeed-zero-1", "deepspeed-zero-2", "deepspeed-zero-3"),
            *("deepspeed-zero-0-as-is", "deepspeed-zero-1-as-is", "deepspeed-zero-3-as-is"),
        ],
        "megatron.core": ["megatron-core"],
        "megatron.fsdp": ["megatron-fsdp", "megatron-fsdp-as-is"],
    }
)
"""The same for targets of libraries, which are installed with an extra."""


@cache
def _registered(name: str) -> Target | None:
    """Return the registered target of a name; None if there is none."""
    module = _TARGETS.get(name) or _LIBRARIES.get(name)
    if module is None:
        return None
    (target,) = (each for each in import_module(module).TARGETS if each.name == name)
    return target


def target_names() -> tuple[str, ...]:
    """Names of all registered targets that need no package besides torch."""
    return tuple(sorted(_TARGETS))


def library_target_names() -> tuple[str, ...]:
    """Names of all registered targets of libraries that may not be installed."""
    return tuple(sorted(_LIBRARIES))


def find_target(name: str) -> Target:
    """The registered target of that name.

    Raises:
        UsageError: There is none; lists those there are.
    """
    target = _registered(name)
    if target is None:
        known = (*target_names(), *library_target_names())
        raise UsageError(
            f"expected a registered target, got {name!r}. Choose {nearest(name, known)}. "
            "Name a target of your own with --target module:name."
        )
    return target


def name_of(target: Target) -> str:
    """The name by which `import_target` finds a target again; empty where it has none.

    Args:
        target: A registered one; one that a module has under a name; or an object without any
            state, which its class makes as well.
    """
    if _registered(target.name) is target:
        return target.name
    made_by = type(target)
    module = sys.modules.get(made_by.__module__)
    if module is None or made_by.__module__ == "__main__":
        return ""
    held = [name for name, value in vars(module).items() if value is target]
    if not held and not getattr(target, "__dict__", True):
        held = [name for name, value in vars(module).items() if value is made_by]
    return f"{made_by.__module__}:{held[0]}" if held else ""


def import_target(name: str) -> Target:
    """A registered target, or for `module:name` one imported from a module; runs its code.

    Args:
        name: A registered name; or a module, found in the current folder too, and what in it is
            the target: an object, or a class made without arguments.

    Raises:
        UsageError: There is no such module or name in it, its code does not come through, or what
            it names is no target.
    """
    return load_target(name) if ":" in name else find_target(name)
